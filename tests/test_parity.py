"""Every backend gives the bits of the reference: the promise that the rest is tested on."""

import itertools

import pytest
import torch

from fused8 import AdamW8bit
from fused8.backends import BACKENDS
from fused8.codecs import CODECS as CODEC_OF
from fused8.codecs import Dynamic
from fused8.step_plan import scalar_table

from .support import (
    CODECS,
    DTYPES,
    FLAGS,
    FP8_DTYPES,
    ISAS,
    SHAPES,
    STORAGE,
    STORAGE_IDS,
    assert_same_bits,
    assert_same_optimizers,
    assert_stores_as_the_reference,
    choose_isa,
    require_isa,
    run,
)


@pytest.fixture
def cpp(monkeypatch):
    """Runs of the C++ backend, one per instruction set."""

    def runs(**options):
        for isa in ISAS:
            if choose_isa(isa, monkeypatch):
                yield isa, run("cpp", SHAPES, **options)

    return runs


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("codec", CODECS)
def test_cpp_equals_reference(codec, block_size, flags, cpp):
    options = dict(steps=20, codec=codec, block_size=block_size, lrs=(1e-3, 3e-3, 1e-2), **FLAGS[flags])
    expected = run("reference", SHAPES, **options)
    for isa, optimizer in cpp(**options):
        assert_same_optimizers(optimizer, expected, f"{isa} {codec} {flags}")


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_cpp_equals_reference_in_every_dtype(codec, dtype, grad_dtype, cpp):
    options = dict(steps=20, dtype=dtype, grad_dtype=grad_dtype, codec=codec, weight_decay=0.01)
    expected = run("reference", SHAPES, **options)
    for isa, optimizer in cpp(**options):
        assert_same_optimizers(optimizer, expected, f"{isa} {codec} {dtype} {grad_dtype}")


@pytest.mark.parametrize("codec", [*CODECS, "fp32"])
@pytest.mark.parametrize("dtype, name, storage", STORAGE, ids=STORAGE_IDS)
def test_cpp_equals_reference_however_parameters_are_stored(dtype, name, storage, codec, cpp):
    """Every codec beside every storage; the dtype of the gradient and amsgrad, weight decay and so on go round."""
    i = len(name) + len(codec)
    options = dict(steps=5, dtype=dtype, grad_dtype=DTYPES[i % 3], lrs=(1e-3, 0.3), rounding_seed=i)
    options |= storage | list(FLAGS.values())[i % len(FLAGS)]
    options |= dict(codec="adaptive", min_8bit_size=1 << 40) if codec == "fp32" else dict(codec=codec)
    expected = run("reference", SHAPES, **options)
    for isa, optimizer in cpp(**options):
        assert_same_optimizers(optimizer, expected, f"{isa} {codec} {dtype} {name}")


def blocks_around_every_floor():
    """FP32 rows [blocks, 256]: a divisor, positive, and numbers whose quotients by it lie a few units in the last place
    from the middle between two values of the dynamic map, for divisors of every size."""
    generator = torch.Generator().manual_seed(9)
    exponents = (-148, -127, -126, -90, -81, -80, -79, -45, -20, -2, -1, 0, 1, 10, 45, 61, 62)
    mantissas = 1 + torch.rand(len(exponents), generator=generator, dtype=torch.float64)
    divisors = mantissas * 2.0 ** torch.tensor(exponents)
    divisors = torch.cat([divisors, torch.tensor([1.0, 2.0**-80, 2.0**-126, 2.0**63, 2 - 2.0**-23])]).float()
    maps = torch.tensor([Dynamic.SIGNED, Dynamic.UNSIGNED], dtype=torch.float64)
    middles = maps.unfold(1, 2, 1).mean(2).flatten()
    near = (middles[:, None] * divisors.double()).float()
    patterns = near.view(torch.int32)[..., None] + torch.arange(-4, 5, dtype=torch.int32)
    x = patterns.view(torch.float32).permute(1, 0, 2).reshape(len(divisors), -1)
    x = torch.where(x.abs() <= divisors[:, None], x, -0.0)
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 255)).view(len(divisors), -1, 255)
    return torch.cat([divisors[:, None, None].expand(-1, x.shape[1], 1), x], dim=2).reshape(-1, 256)


def encoded(backend, codec, grad, beta2=0.0, sq_scale=0.0):
    """The state tensors that a step leaves of m = grad and v = grad^2 (and of beta2 * sq_scale, times any code)."""
    scale_shape = (len(grad), 1)
    format = CODEC_OF[codec]
    m = torch.full(grad.shape, format.zero_codes[0], dtype=format.code_dtypes[0])
    v = (torch.arange(grad.numel()) % 127).to(format.code_dtypes[1]).view(grad.shape)
    scales = [torch.full(scale_shape, x, dtype=d) for x, d in zip((0, sq_scale), format.scale_dtypes, strict=True)]
    row = [0.0, 1.0, beta2, 1.0, 1e-8, 1e-3, 1.0, 1.0, 0.0, 0, 0]
    BACKENDS[backend].adam_step(
        [torch.zeros(grad.shape)], [grad], [m], [v], [scales[0]], [scales[1]], [], [], [],
        scalar_table([row]), torch.tensor([[0, 0, 0, 256]]), None, None, torch.zeros(1, dtype=torch.int64),
        codec, 256, True, False, False, cache={},
    )  # fmt: skip
    return [m, v, *scales]


@pytest.mark.parametrize("codec", ["dynamic", "e4m3"])
def test_cpp_rounds_to_codes_as_the_reference_on_both_sides_of_every_floor(codec, monkeypatch):
    x = blocks_around_every_floor()
    cases = {
        "m": dict(grad=x),
        "v": dict(grad=x.abs().double().sqrt().float()),
        "v, from states of the largest scale": dict(grad=x.clamp(-(2.0**60), 2.0**60), beta2=0.999, sq_scale=3e38),
    }
    for name, case in cases.items():
        expected = encoded("reference", codec, **case)
        for isa in ISAS:
            if not choose_isa(isa, monkeypatch):
                continue
            for ours, truth in zip(encoded("cpp", codec, **case), expected, strict=True):
                assert_same_bits(ours, truth, f"{isa} {name}")


@pytest.mark.parametrize("codec", CODECS)
def test_cpp_keeps_the_sign_of_zero(codec, cpp):
    """A moment that was rounded to -0 meets a gradient of -0: E4M3 has a code for it."""

    def stepped(backend):
        p = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = AdamW8bit([p], codec=codec, backend=backend, min_8bit_size=0)
        for small in (-1e-6, -0.0):
            p.grad = torch.ones(64, 64)
            p.grad[:, 1] = small
            optimizer.step()
        return optimizer

    expected = stepped("reference")
    for isa, _ in cpp(steps=1):
        assert_same_optimizers(stepped("cpp"), expected, f"{isa} {codec}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8_DTYPES])
def test_cpp_stores_every_kind_of_number_as_the_reference(dtype, isa, monkeypatch):
    require_isa(isa, monkeypatch)
    for extra, stochastic in itertools.product((0, 8, 16), (False, True)):
        assert_stores_as_the_reference("cpp", dtype, extra, stochastic)


def test_an_instruction_set_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setenv("FUSED8_CPU_ISA", "mmx")
    with pytest.raises(RuntimeError, match="FUSED8_CPU_ISA is mmx"):
        run("cpp", [(16, 256)], steps=1)


def test_flush_to_zero_and_threads_change_nothing():
    """torch.set_flush_denormal reaches the calling thread alone; the kernel's threads all keep denormals."""
    shapes = [(600, 300)]
    expected = run("reference", shapes, steps=4)
    threads = torch.get_num_threads()
    for count, flush in ((1, True), (2, True), (2, False)):
        torch.set_num_threads(count)
        supported = torch.set_flush_denormal(flush)
        try:
            optimizer = run("cpp", shapes, steps=4)
            assert supported == torch.set_flush_denormal(flush)
        finally:
            torch.set_flush_denormal(False)
            torch.set_num_threads(threads)
        assert_same_optimizers(optimizer, expected, f"{count} threads, flush {flush}")
