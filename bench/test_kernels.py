"""The time of one step, small enough to run often:  pytest bench/test_kernels.py"""

import pytest
import torch

from . import parity, workloads
from .contenders import DTYPES, peers

SIZE = 2**20
SLOW = ("bitsandbytes 8-bit", "torchao 8-bit")


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("contender", peers(), ids=lambda contender: contender.name.replace(" ", "-"))
def test_step(benchmark, contender, dtype):
    benchmark.group = dtype
    benchmark.extra_info["threads"] = torch.get_num_threads()
    verdict = parity.check(contender, dtype)
    if verdict.status == "not available" and contender.options is None:
        pytest.skip(verdict.reason)
    assert verdict.status == "measured", verdict.reason
    optimizer = contender.make(workloads.make_params(workloads.one_tensor(SIZE), DTYPES[dtype]), lr=1e-3)
    slow = contender.name in SLOW
    benchmark.pedantic(optimizer.step, rounds=3 if slow else 50, warmup_rounds=1 if slow else 3)
