"""The CPU kernel's threads under ThreadSanitizer: each writes its own elements alone, wherever the tensors are cut.

tests/cpu_host has the program. It starts the threads itself: in torch's libraries, which are not instrumented, and in
OpenMP the sanitizer sees races where there are none.
"""

import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import setuptools

from . import thread_sanitizer
from .support import ISAS, choose_isa

ROOT = Path(__file__).parent.parent
CASES = 4 * 11  # codecs and ways to store parameters
COUNT_ALL = "exitcode=0:symbolize=0:suppress_equal_stacks=0:suppress_equal_addresses=0"


def compiled(folder):
    """The program and the kernel, compiled as setup.py compiles the library for a sanitizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED8_SANITIZE", "thread")
        patch.setenv("FUSED8_NO_CUDA", "1")
        patch.chdir(ROOT)  # setup.py looks for its sources from there
        patch.setattr(setuptools, "setup", lambda **_: None)
        build = runpy.run_path("setup.py")["BuildLibraries"](setuptools.Distribution())
    sources = [path for path in (ROOT / "csrc/cpu").glob("*.cpp") if path.name != "adam_cpu.cpp"]  # which needs torch
    sources.append(ROOT / "tests/cpu_host/races.cpp")
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: build.compile(source, folder), sources))
    subprocess.run([*build.cxx(), "-fsanitize=thread", *objects, "-o", folder / "races"], check=True)
    return folder / "races"


def assert_all_ok(done, what):
    assert done.returncode == 0, f"{what}: {done.stderr[-5000:]}"
    lines = done.stdout.splitlines()
    assert not [line for line in lines if not line.endswith(": ok")] and len(lines) == CASES, what


def test_threads_do_not_race_and_would_be_seen_to(tmp_path, monkeypatch):
    """One test, so that the program is compiled once, however many workers there are: about 20 s."""
    thread_sanitizer.skip_without()
    program = compiled(tmp_path)
    for isa in ISAS:
        if not choose_isa(isa, monkeypatch):
            continue
        assert_all_ok(thread_sanitizer.run(program, isa), isa)
        # Each array that two threads write is reported, so that silence above says something.
        assert_all_ok(thread_sanitizer.run(program, isa, "shared", options=COUNT_ALL), f"{isa}, shared")
