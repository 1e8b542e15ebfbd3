"""ThreadSanitizer for C++ programs of the tests."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

CXX = os.environ.get("CXX", "c++")


@functools.cache
def _why_not() -> str | None:
    """Why the compiler at hand, or this machine, has none."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "empty.cpp"), Path(folder, "empty")
        source.write_text("int main() {}\n")
        command = [*CXX.split(), "-fsanitize=thread", str(source), "-o", str(program)]
        try:
            for done in (subprocess.run(command, capture_output=True, text=True), run(program)):
                if done.returncode != 0:
                    said = " ".join(done.stderr.split())[-300:] or f"status {done.returncode}"
                    return f"no ThreadSanitizer here: {CXX}: {said}"
        except OSError as error:
            return f"no ThreadSanitizer here: {error}"
    return None


def skip_without() -> None:
    if reason := _why_not():
        pytest.skip(reason)


def run(program: Path, *arguments: str, options: str = "halt_on_error=1") -> subprocess.CompletedProcess[str]:
    """Run a program that was compiled with -fsanitize=thread."""
    # Without setarch, older runtimes fail where the kernel spreads addresses further than they know of.
    command = ["setarch", "-R", str(program), *arguments]
    settings: dict[str, Any] = dict(capture_output=True, text=True, timeout=300)
    return subprocess.run(command, env=os.environ | {"TSAN_OPTIONS": options}, **settings)
