"""The CUDA C++ kernel: its source on the CPU has the bits of the reference; compiled, what its machine code holds.

tests/cuda_host stands in for the GPU: threads, shuffles, barriers and shared memory.
"""

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.cpp_extension import include_paths

from bench import gpu_static
from fused8 import backends, reference
from fused8.codecs import FP32
from fused8.state import rows_and_inner

from . import support, thread_sanitizer
from .bucket import Bucket, assert_same_buckets
from .support import (
    CODECS,
    DTYPES,
    FP8_DTYPES,
    SHAPES,
    STORAGE,
    STORAGE_IDS,
    assert_same_optimizers,
    assert_stores_as_the_reference,
    run,
)

ROOT = Path(__file__).parent.parent
HOST = ROOT / "tests" / "cuda_host"
CXX_FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
CXX_FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing", "-DFUSED8_ISA=cuda"]

CODEC_NUMBERS = {FP32: 0, "adaptive": 1, "dynamic": 2, "e4m3": 3}  # CodecName in csrc/tensor_view.h
SCALARS_ON_DEVICE, TABLE_ON_DEVICE = 1, 2


def compile_cpp(target, *flags):
    command = [thread_sanitizer.CXX, *CXX_FLAGS, *flags, *sorted(map(str, HOST.glob("*.cpp"))), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


class Host:
    """The kernel source compiled for the CPU, as a backend."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.cuda_host_error.restype = ctypes.c_char_p
        self.launches = 0
        self.on_device = 0

    def adam_step(
        self, params, grads, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, max_exp_avg_sq, max_exp_avg_sq_scale,
        param_correction, scalars, table, grad_scale, found_inf, nonfinite, codec, block_size, decoupled_weight_decay,
        maximize, stochastic_rounding, cache,
    ):  # fmt: skip
        lists = (
            params, grads, exp_avg, exp_avg_sq, max_exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, max_exp_avg_sq_scale,
            param_correction,
        )  # fmt: skip
        views = []
        for i, p in enumerate(params):
            rows, inner = rows_and_inner(p.shape)
            pointers = [tensors[i].data_ptr() if tensors else 0 for tensors in lists]
            views.append([*pointers, rows, inner, -(-inner // block_size)])
        views = np.array(views, dtype=np.int64)

        def pointer(tensor):
            return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

        launches = self.library.cuda_host_step(
            ctypes.c_void_p(views.ctypes.data), ctypes.c_int64(len(params)), pointer(scalars), pointer(table),
            self.on_device, pointer(grad_scale), pointer(found_inf), pointer(nonfinite), CODEC_NUMBERS[codec],
            (*DTYPES, *FP8_DTYPES).index(params[0].dtype),
            8 * param_correction[0].element_size() if param_correction else 0, stochastic_rounding,
            DTYPES.index(grads[0].dtype), bool(max_exp_avg_sq),
            ctypes.c_int64(block_size), maximize, not decoupled_weight_decay,
        )  # fmt: skip
        assert launches >= 0, self.library.cuda_host_error()
        self.launches = launches


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda_host") / "libcuda_host.so"
    compile_cpp(path, "-O1", "-shared", "-fPIC")
    host = Host(path)
    backends.BACKENDS["cuda_host"] = backends.Backend("cuda_host", lambda device: None, host.adam_step)
    yield host
    del backends.BACKENDS["cuda_host"]


FLAGS = tuple(support.FLAGS.values())

# Each codec with each pair of dtypes, with each block size and with each set of flags.
CASES = [
    (codec, *dtypes, (64, 128, 256)[(i + j + k) % 3], FLAGS[(2 * i + j + k) % len(FLAGS)])
    for k, codec in enumerate(CODECS)
    for i, dtypes in enumerate(itertools.product(DTYPES, DTYPES))
    for j in range(2)
]


@pytest.mark.parametrize("codec, dtype, grad_dtype, block_size, flags", CASES)
def test_equals_reference(host, codec, dtype, grad_dtype, block_size, flags):
    options = dict(codec=codec, dtype=dtype, grad_dtype=grad_dtype, block_size=block_size, lrs=(1e-3, 1e-2), **flags)
    ours, truth = (run(backend, SHAPES, steps=3, **options) for backend in ("cuda_host", "reference"))
    assert_same_optimizers(ours, truth, f"{codec} {dtype}")
    assert ours.nonfinite_count() == truth.nonfinite_count() > 0


@pytest.mark.parametrize("i", range(len(STORAGE)), ids=STORAGE_IDS)
def test_equals_reference_however_parameters_are_stored(host, i):
    dtype, name, storage = STORAGE[i]
    codec = [*CODECS, FP32][i % 4]
    options = dict(steps=3, dtype=dtype, grad_dtype=DTYPES[i % 3], lrs=(1e-3, 0.3), **storage, **FLAGS[i % len(FLAGS)])
    options |= dict(min_8bit_size=1 << 40) if codec == FP32 else dict(codec=codec)
    ours, truth = (run(backend, SHAPES, **options) for backend in ("cuda_host", "reference"))
    assert_same_optimizers(ours, truth, f"{codec} {dtype} {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8_DTYPES])
def test_stores_every_kind_of_number_as_the_reference(host, dtype):
    for extra, stochastic in itertools.product((0, 8, 16), (False, True)):
        assert_stores_as_the_reference("cuda_host", dtype, extra, stochastic)


# -- one call, made directly


@pytest.mark.parametrize("on_device", [0, SCALARS_ON_DEVICE, SCALARS_ON_DEVICE | TABLE_ON_DEVICE])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("codec", [*CODECS, FP32])
def test_shards_unaligned_pointers_and_tables_on_the_device(host, monkeypatch, codec, offset, on_device):
    """Shards of dim 0, shards of dim 1, whole tensors; one parameter in one row of many blocks; two (group, step)s."""
    monkeypatch.setattr(host, "on_device", on_device)
    shapes = ((36, 256), (3, 512), (5, 70), (17, 16), (9000,), (0,))
    layout = [
        [1, 7, 0, 256], [0, 2**23, 256, 1280], [1, 5, 64, 140], [0, 2**40 // 16, 0, 16], [1, 0, 0, 9000], [0, 0, 0, 1]
    ]  # fmt: skip
    stochastic = offset == 1 or on_device != 0
    ours, truth = (
        Bucket(shapes, codec, torch.bfloat16, offset=offset, amsgrad=True, stochastic=stochastic) for _ in range(2)
    )
    for step in (1, 2, 3):
        grad_scale = torch.tensor(3.0 * 2**10) if step == 2 else None
        ours.step(host.adam_step, step, torch.tensor(layout), grad_scale, torch.zeros(1))
        truth.step(reference.adam_step, step, torch.tensor(layout), grad_scale)
        assert host.launches == 1
    assert_same_buckets(ours, truth, codec)


def test_found_inf_leaves_everything(host):
    ours, untouched = (Bucket(((36, 256), (5, 70)), "adaptive") for _ in range(2))
    ours.step(host.adam_step, 1, torch.tensor([[0, 0, 0, 256], [0, 0, 0, 70]]), found_inf=torch.ones(1))
    assert_same_buckets(ours, untouched, "found_inf")


@pytest.mark.parametrize("rows, launches", [(1, 4), (40, 25)])
def test_a_launch_takes_as_many_tensors_as_its_parameters_hold(host, rows, launches):
    """32 tensors, with 4 different rows of scalars."""
    shapes = ((3, 17),) * 100
    ours, truth = (Bucket(shapes, "adaptive") for _ in range(2))
    table = torch.tensor([[i % rows, i, 0, 17] for i in range(100)])
    for step in (1, 2):
        ours.step(host.adam_step, step, table, rows=rows)
        truth.step(reference.adam_step, step, table, rows=rows)
    assert_same_buckets(ours, truth, f"{rows} rows")
    assert host.launches == launches


@pytest.mark.parametrize("error", [-1, 1])
@pytest.mark.parametrize("codec", CODECS)
def test_quick_divisions_are_exact_for_any_error_of_the_estimates(host, codec, error):
    """The PTX ISA lets rcp.approx be off by one unit in the last place."""
    host.library.cuda_host_set_estimate_error(error)
    try:
        options = dict(codec=codec, steps=4, weight_decay=0.01)
        ours, truth = (run(backend, SHAPES, **options) for backend in ("cuda_host", "reference"))
    finally:
        host.library.cuda_host_set_estimate_error(0)
    assert_same_optimizers(ours, truth, f"{codec} {error}")


def test_the_host_notices_threads_that_diverge(host):
    for where, word in ((1, "shuffle"), (2, "barrier")):
        assert host.library.cuda_host_diverge(where) == -1
        assert re.search(f"diverge.*{word}.*ended", host.library.cuda_host_error().decode())
    assert host.library.cuda_host_diverge(0) == 0


def test_the_backend_says_why_it_cannot_serve():
    with pytest.raises(RuntimeError, match="backend 'cuda' cannot serve device 'cpu': it serves CUDA devices"):
        backends.select(torch.device("cpu"), "cuda")
    if torch.version.cuda is None:
        reason = backends.BACKENDS["cuda"].unavailable(torch.device("cuda"))
        assert "FUSED8_CUDA" in reason or "could not be loaded" in reason


# -- races


def test_threads_do_not_race(tmp_path):
    """Every CUDA thread as a thread of its own, under ThreadSanitizer."""
    thread_sanitizer.skip_without()
    program = tmp_path / "races"
    compile_cpp(program, "-O1", "-g", "-fsanitize=thread", "-DCUDA_HOST_THREADS")
    result = thread_sanitizer.run(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["fp32 ok", "adaptive ok", "dynamic ok", "e4m3 ok"]


# -- machine code

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


@needs_nvcc
def test_machine_code():
    """No spills, 128-bit accesses, and `adaptive` in bf16 near what an H200 can issue at its bandwidth (69)."""
    cases = [("sm_90", codec, dtype) for codec in (*CODECS, FP32) for dtype in (torch.bfloat16, torch.float32)]
    cases += [(target, "adaptive", torch.bfloat16) for target in ("sm_80", "sm_100")]
    for target, codec, dtype in cases:
        row = gpu_static.cuda_report(target, codec, dtype, dtype)
        assert row.spilled_bytes == row.local_accesses == 0, row
        assert row.registers <= 128, row  # 16 warps on a multiprocessor
        state = 4 if codec == FP32 else 1
        assert row.wide_accesses == 3 * dtype.itemsize + 2 * 2 * state, row
        assert row.narrow_loads <= 20 and row.narrow_stores <= 2, row  # scalars and block scales
        if (codec, dtype) == ("adaptive", torch.bfloat16):
            assert row.instructions <= 85, row


@needs_nvcc
def test_amsgrad_and_mixed_dtypes_spill_nothing():
    for codec in CODECS:
        row = gpu_static.cuda_report("sm_90", codec, torch.float16, torch.float32, amsgrad=True)
        assert row.spilled_bytes == row.local_accesses == 0, row


@needs_nvcc
def test_the_op_compiles_without_warnings_and_needs_one_symbol_of_libtorch_cuda(tmp_path):
    """One library serves every torch and every Python: it is built on PyTorch's stable ABI."""
    command = ["nvcc", *gpu_static.NVCC_FLAGS, "-Xcompiler", "-Wall,-Wextra,-Werror", "-arch=sm_80"]
    command += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    for path in include_paths():
        command += ["-isystem", path]
    target = tmp_path / "adam_cuda.o"
    source = ROOT / "csrc" / "cuda" / "adam_cuda.cu"
    result = subprocess.run([*command, "-c", source, "-o", target], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    undefined = symbols("--undefined-only", target)
    assert not {name for name in undefined if re.search(r"_ZN?K?(2at|3c10|5torch)", name)}, "not the stable ABI"
    of_torch = {name for name in undefined if re.match("aoti_|torch_", name)}
    libtorch_cpu = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    assert of_torch - symbols("--dynamic", libtorch_cpu) == {"aoti_torch_get_current_cuda_stream"}


def symbols(kind, path):
    text = subprocess.run(["nm", kind, path], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"[UT] (\w+)", text))
