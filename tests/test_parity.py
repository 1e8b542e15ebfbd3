"""Every backend gives the bits of the reference: the promise that the rest is tested on."""

import itertools

import pytest
import torch

from .support import (
    CODECS,
    DTYPES,
    FLAGS,
    FP8_DTYPES,
    SHAPES,
    STORAGE,
    STORAGE_IDS,
    assert_same_optimizers,
    assert_stores_as_the_reference,
    run,
)

ISAS = ("generic", "avx2", "avx512")


@pytest.fixture
def cpp(monkeypatch):
    """Runs of the C++ backend, one per instruction set."""

    def runs(**options):
        for isa in ISAS:
            monkeypatch.setenv("FUSED8_CPU_ISA", isa)
            try:
                assert torch.ops.fused8.cpu_isa() == isa
            except RuntimeError as error:  # an older processor: the others are still compared
                assert isa != "generic" and "does not have" in str(error)
                continue
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8_DTYPES])
def test_cpp_stores_every_kind_of_number_as_the_reference(dtype, isa, monkeypatch):
    monkeypatch.setenv("FUSED8_CPU_ISA", isa)
    if isa != "generic":
        try:
            torch.ops.fused8.cpu_isa()
        except RuntimeError as error:
            pytest.skip(str(error))
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
