"""Build the compiled kernels (csrc/) into shared libraries beside the package's Python files.

They use PyTorch's stable ABI and contain no Python, so one build serves every torch from 2.10 on and every Python.
Without a compiler, or without torch, fused8 is installed without them.

libfused8.so, the CPU kernels, is always built. libfused8_cuda.so, the CUDA C++ kernels, is built where nvcc is found
(in CUDA_HOME or on the PATH) and torch is a CUDA build; with FUSED8_CUDA=1 also beside a CPU build of torch, with which
the same library is compiled but cannot be loaded. It takes about a minute of one core for each architecture.

Environment: CXX, CXXFLAGS; FUSED8_NO_BUILD=1 (do not try), FUSED8_REQUIRE_BUILD=1 (a failed build and a compiler
warning are errors), FUSED8_SANITIZE=address,undefined (an instrumented build for the tests); FUSED8_CUDA=1 and
FUSED8_NO_CUDA=1, FUSED8_CUDA_ARCHS="80;90" (otherwise 80, 90 and 100, as far as nvcc knows them; code that later GPUs
compile for themselves comes with the newest), CUDA_HOME.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NO_BUILD = os.environ.get("FUSED8_NO_BUILD") == "1"
REQUIRE_BUILD = os.environ.get("FUSED8_REQUIRE_BUILD") == "1"
SANITIZE = os.environ.get("FUSED8_SANITIZE", "")
CUDA = os.environ.get("FUSED8_CUDA") == "1"
NO_CUDA = os.environ.get("FUSED8_NO_CUDA") == "1"
CUDA_ARCHS = os.environ.get("FUSED8_CUDA_ARCHS", "")
DEFAULT_CUDA_ARCHS = ("80", "90", "100")

TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10, the oldest torch that the libraries load into

CXX_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *["-Werror"] * REQUIRE_BUILD]
OPTIMIZE_FLAGS = ["-O3"]
SANITIZE_FLAGS = ["-O1", "-g", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
# The same bits everywhere need each operation rounded once: no contraction to FMA. The other two change no result but
# let the compiler vectorize square roots and comparisons.
FLOAT_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # false alarms in the intrinsics of GCC 12
ISA_FLAGS = {"step_avx2.cpp": AVX2_FLAGS, "step_avx512.cpp": AVX512_FLAGS}  # empty files elsewhere than on x86-64
# The same for a GPU: no FMA, correctly rounded square roots and divisions, denormals kept.
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-prec-sqrt=true", "-prec-div=true", "-ftz=false"]
NVCC_FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
NVCC_FLAGS += ["--Werror", "all-warnings"] * REQUIRE_BUILD
IS_X86_64 = platform.machine().lower() in ("x86_64", "amd64")


def library(name: str, folder: str, optional: bool = False) -> Extension:
    """The library fused8/<name>.so from the sources in csrc/<folder>."""
    sources = sorted(str(path) for path in Path("csrc", folder).iterdir() if path.suffix in (".cpp", ".cu"))
    headers = sorted(str(path) for path in Path("csrc").rglob("*") if path.suffix in (".h", ".cuh"))
    return Extension(f"fused8.{name}", sources, depends=headers, optional=optional)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return (home and shutil.which("nvcc", path=os.path.join(home, "bin"))) or shutil.which("nvcc")


def builds_cuda() -> bool:
    if NO_CUDA or NO_BUILD:
        return False
    if find_nvcc() is None:
        if CUDA:
            sys.exit("FUSED8_CUDA=1, but nvcc is neither in CUDA_HOME nor on the PATH")
        return False
    if CUDA:
        return True
    try:
        import torch
    except ImportError:
        return False
    return torch.version.cuda is not None


def cuda_architectures() -> list[str]:
    """nvcc's options: machine code for each architecture, and for the newest also what later ones can compile."""
    archs = [arch for arch in CUDA_ARCHS.replace(",", ";").split(";") if arch]
    if not archs:
        command = [find_nvcc() or "nvcc", "--list-gpu-arch"]
        known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        archs = [arch for arch in DEFAULT_CUDA_ARCHS if f"compute_{arch}" in known]
    codes = [(arch, f"sm_{arch}") for arch in archs] + [(archs[-1], f"compute_{archs[-1]}")]
    return [f"-gencode=arch=compute_{arch},code={code}" for arch, code in codes]


LIBRARIES = [library("libfused8", "cpu")]
if builds_cuda():
    LIBRARIES.append(library("libfused8_cuda", "cuda", optional=not (REQUIRE_BUILD or CUDA)))


def execute(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    if status := subprocess.run(command).returncode:
        raise CompileError(f"{command[0]} failed with status {status} on {command[-1]}")


class BuildLibraries(build_ext):
    """Compile each source with flags of its own, several at a time, and link them."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if REQUIRE_BUILD or CUDA:
                raise
            for ext in self.extensions:  # of an earlier build
                Path(self.build_lib, self.get_ext_filename(ext.name)).unlink(missing_ok=True)
            self.extensions = self.distribution.ext_modules = []
            print(
                f"fused8: the compiled kernels were not built ({error}). The slow reference serves instead. To build "
                "them: install torch>=2.10 and a C++20 compiler, then pip install --no-build-isolation fused8 again.",
                file=sys.stderr,
            )

    def build_extension(self, ext: Extension) -> None:
        import torch

        objects = Path(self.build_temp, ext.name)
        objects.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.parallel or os.cpu_count()) as pool:
            compiled = list(pool.map(lambda source: self.compile(Path(source), objects), ext.sources))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        torch_libraries = Path(torch.__file__).with_name("lib")
        link = [*compiled, f"-L{torch_libraries}", "-ltorch_cpu", "-o", str(target)]
        if any(source.endswith(".cu") for source in ext.sources):
            self.link_cuda(link, objects, torch_libraries)
        else:
            execute([*self.cxx(), "-shared", *(SANITIZE_FLAGS if SANITIZE else []), *link])

    def link_cuda(self, link: list[str], objects: Path, torch_libraries: Path) -> None:
        """With the CUDA runtime inside and hidden. Needs libtorch_cuda, of which an empty one stands in where torch has
        none: its name is all that is recorded."""
        if not (torch_libraries / "libtorch_cuda.so").exists():
            stand_in = str(objects / "libtorch_cuda.so")
            execute([*self.cxx(), "-shared", "-Wl,-soname,libtorch_cuda.so", "-x", "c", os.devnull, "-o", stand_in])
            link = [*link, f"-L{objects}"]
        hidden = ["-Xlinker", "--exclude-libs=ALL", "-Xlinker", "--no-as-needed", "-ltorch_cuda"]
        execute([str(find_nvcc()), "-shared", "-cudart", "static", *link, *hidden])

    def compile(self, source: Path, objects: Path) -> str:
        from torch.utils.cpp_extension import include_paths

        target = str(objects / source.with_suffix(".o").name)
        common = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
        for path in include_paths():
            common += ["-isystem", path]  # torch's headers need not pass our warnings
        common += ["-o", target, "-c", str(source)]
        if source.suffix == ".cu":
            compiler = ["-ccbin", *self.cxx()[:1]] if "CXX" in os.environ else []
            execute([str(find_nvcc()), *compiler, *NVCC_FLAGS, *cuda_architectures(), *common])
            return target
        flags = [*CXX_FLAGS, *(SANITIZE_FLAGS if SANITIZE else OPTIMIZE_FLAGS)]
        flags += [*shlex.split(os.environ.get("CXXFLAGS", "")), *FLOAT_FLAGS]  # nobody's flags undo the same bits
        flags += ISA_FLAGS.get(source.name, []) if IS_X86_64 else []
        execute([*self.cxx(), *flags, *common])
        return target

    @staticmethod
    def cxx() -> list[str]:
        return shlex.split(os.environ.get("CXX", "c++"))


class Wheel(bdist_wheel):
    """One wheel for every Python; for every platform too if nothing was compiled."""

    def run(self) -> None:
        self.run_command("build")
        self.skip_build = True  # or the libraries would be built a second time
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[] if NO_BUILD else LIBRARIES,
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
)
