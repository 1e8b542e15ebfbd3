"""Build the compiled kernels (csrc/) into shared libraries beside the package's Python files.

They use PyTorch's stable ABI and contain no Python, so one build serves every torch from 2.10 on and every Python.
Without a compiler, or without torch, fused8 is installed without them.

Environment: CXX, CXXFLAGS; FUSED8_NO_BUILD=1 (do not try), FUSED8_REQUIRE_BUILD=1 (a failed build and a compiler
warning are errors), FUSED8_SANITIZE=address,undefined (an instrumented build for the tests).
"""

import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NO_BUILD = os.environ.get("FUSED8_NO_BUILD") == "1"
REQUIRE_BUILD = os.environ.get("FUSED8_REQUIRE_BUILD") == "1"
SANITIZE = os.environ.get("FUSED8_SANITIZE", "")

TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10, the oldest torch that the libraries load into

CXX_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *["-Werror"] * REQUIRE_BUILD]
OPTIMIZE_FLAGS = ["-O3"]
SANITIZE_FLAGS = ["-O1", "-g", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
# The same bits everywhere need each operation rounded once: no contraction to FMA. The other two change no result but
# let the compiler vectorize square roots and comparisons.
FLOAT_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
AVX2_FLAGS = ["-mavx2", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # false alarms in the intrinsics of GCC 12
ISA_FLAGS = {"step_avx2.cpp": AVX2_FLAGS, "step_avx512.cpp": AVX512_FLAGS}  # empty files elsewhere than on x86-64
IS_X86_64 = platform.machine().lower() in ("x86_64", "amd64")


def library(name: str, folder: str) -> Extension:
    """The library fused8/<name>.so from the sources in csrc/<folder>."""
    sources = sorted(str(path) for path in Path("csrc", folder).iterdir() if path.suffix in (".cpp", ".cu"))
    return Extension(f"fused8.{name}", sources, depends=sorted(str(path) for path in Path("csrc").rglob("*.h")))


LIBRARIES = [library("libfused8", "cpu")]


def execute(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    if status := subprocess.run(command).returncode:
        raise RuntimeError(f"{command[0]} failed with status {status} on {command[-1]}")


class BuildLibraries(build_ext):
    """Compile each source with flags of its own, several at a time, and link them."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if REQUIRE_BUILD:
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
        sanitizer = SANITIZE_FLAGS if SANITIZE else []
        execute(
            [*self.cxx(), "-shared", *sanitizer, *compiled, f"-L{torch_libraries}", "-ltorch_cpu", "-o", str(target)]
        )

    def compile(self, source: Path, objects: Path) -> str:
        from torch.utils.cpp_extension import include_paths

        target = str(objects / source.with_suffix(".o").name)
        flags = [*CXX_FLAGS, *(SANITIZE_FLAGS if SANITIZE else OPTIMIZE_FLAGS), *FLOAT_FLAGS]
        flags += ISA_FLAGS.get(source.name, []) if IS_X86_64 else []
        flags += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
        for path in include_paths():
            flags += ["-isystem", path]  # torch's headers need not pass our warnings
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))
        execute([*self.cxx(), *flags, "-o", target, "-c", str(source)])
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
