"""One call of a kernel, made directly: its arguments, and the comparison of what it leaves."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from fused8 import formats, reference, step_plan
from fused8.codecs import CODECS as CODEC_OF
from fused8.codecs import FP32
from fused8.state import rows_and_inner

from .support import assert_same_bits, hostile_gradient


class Bucket:
    """Arguments of one call: the same values for each call with the same arguments."""

    def __init__(self, shapes, codec, dtype=torch.float32, *, offset=0, amsgrad=False, extra=0, stochastic=False):
        block_size = 256

        def tensor(shape, dtype, fill):
            numel = int(np.prod(shape))
            return torch.full((numel + offset,), fill, dtype=dtype)[offset:].view(shape)

        generator = torch.Generator().manual_seed(3)
        self.codec, self.block_size, self.offset, self.stochastic = codec, block_size, offset, stochastic
        self.params, self.states = [], [[] for _ in range(7)]
        for shape in shapes:
            self.params.append(tensor(shape, dtype, 0).copy_(torch.randn(shape, generator=generator)))
            if extra:
                self.states[6].append(tensor(shape, formats.CORRECTION_DTYPES[extra], 0))
            rows, inner = rows_and_inner(shape)
            scales = (rows, -(-inner // block_size))
            for i in (0, 1, 1)[: 2 + amsgrad]:
                first = 4 if amsgrad and len(self.states[i]) == len(self.params) else i
                if codec == FP32:
                    self.states[first].append(tensor(shape, torch.float32, 0))
                    continue
                self.states[first].append(tensor(shape, CODEC_OF[codec].code_dtypes[i], CODEC_OF[codec].zero_codes[i]))
                scale = tensor(scales, CODEC_OF[codec].scale_dtypes[i], 0)
                self.states[5 if first == 4 else 2 + i].append(scale)
        self.nonfinite = torch.zeros(1, dtype=torch.int64)
        self.cache = {}

    def step(self, kernel, step, table, grad_scale=None, found_inf=None, rows=2):
        h = [step_plan.Hyperparameters(1e-3 * n * step, 0.9, 0.999, 1e-8, 0.01, True) for n in range(1, rows + 1)]
        scalars = step_plan.scalar_table([step_plan.scalar_row(x, step + 5 * i) for i, x in enumerate(h)])
        grads = []
        for p in self.params:
            g = hostile_gradient(tuple(p.shape), step)
            grads.append(torch.empty(g.numel() + self.offset)[self.offset :].view(g.shape).copy_(g))
        options = {} if kernel is reference.adam_step else {"cache": self.cache}
        kernel(
            self.params, grads, *self.states, scalars, table, grad_scale, found_inf, self.nonfinite,
            self.codec, self.block_size, True, False, self.stochastic, **options,
        )  # fmt: skip

    def tensors(self):
        return [*self.params, *itertools.chain(*self.states), self.nonfinite]


def assert_same_buckets(a, b, what):
    for i, (x, y) in enumerate(zip(a.tensors(), b.tensors(), strict=True)):
        assert_same_bits(x, y, f"{what}: tensor {i}")
