"""Every backend gives the bits of the reference: the promise that the rest is tested on."""

import itertools

import pytest
import torch

from .support import CODECS, DTYPES, SHAPES, assert_same_optimizers, run

ISAS = [isa for isa in ("generic", "avx2", "avx512") if isa == "generic" or isa in torch.ops.fused8.cpu_isas()]

FLAGS = {
    "adamw": dict(weight_decay=0.01),
    "l2": dict(weight_decay=0.01, decoupled_weight_decay=False),
    "maximize": dict(weight_decay=0.01, maximize=True),
    "amsgrad": dict(amsgrad=True),
    "all": dict(
        weight_decay=0.1,
        decoupled_weight_decay=False,
        maximize=True,
        amsgrad=True,
        betas=(0.8, 0.95),
        eps=0.0,
    ),
}


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("FUSED8_CPU_ISA", request.param)
    return request.param


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("codec", CODECS)
def test_cpp_equals_reference(codec, block_size, flags, isa):
    options = dict(steps=20, codec=codec, block_size=block_size, lrs=(1e-3, 3e-3, 1e-2), **FLAGS[flags])
    assert_same_optimizers(run("cpp", SHAPES, **options), run("reference", SHAPES, **options), f"{codec} {flags}")


@pytest.mark.parametrize("dtype, grad_dtype", itertools.product(DTYPES, DTYPES))
@pytest.mark.parametrize("codec", CODECS)
def test_cpp_equals_reference_in_every_dtype(codec, dtype, grad_dtype, isa):
    options = dict(steps=20, dtype=dtype, grad_dtype=grad_dtype, codec=codec, weight_decay=0.01)
    assert_same_optimizers(run("cpp", SHAPES, **options), run("reference", SHAPES, **options), f"{dtype}")
