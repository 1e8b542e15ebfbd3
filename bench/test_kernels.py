"""The time of one step, small enough to run often:  pytest bench/test_kernels.py"""

import pytest
import torch

from .cpu_speed import DTYPES, contenders, make_params, parity_error

SIZE = 2**20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contender", contenders(), ids=lambda contender: contender.name.replace(" ", "-"))
def test_step(benchmark, contender, dtype):
    benchmark.group = dtype
    benchmark.extra_info["threads"] = torch.get_num_threads()
    error = parity_error(contender, DTYPES[dtype])
    assert error is None, error
    optimizer = contender.make(make_params(SIZE, 1, DTYPES[dtype]))
    benchmark.pedantic(optimizer.step, rounds=3 if contender.slow else 50, warmup_rounds=1 if contender.slow else 3)
