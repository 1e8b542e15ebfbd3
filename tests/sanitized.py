"""Run the kernel tests on a build with the address and undefined-behaviour sanitizers: `python -m tests.sanitized`.

Any argument is passed to pytest. The instrumented package goes into a temporary folder; the installed one stays.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SANITIZERS = "address,undefined"


def _find(library: str) -> str:
    command = ["c++", f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "setup.py", "build", "--build-base", f"{folder}/temp", "--build-lib", f"{folder}/lib"]
        options = {"FUSED8_SANITIZE": SANITIZERS, "FUSED8_REQUIRE_BUILD": "1", "FUSED8_NO_CUDA": "1"}
        subprocess.run(build, cwd=ROOT, env=os.environ | options, check=True)
        runtime = " ".join(map(_find, ("libasan.so", "libubsan.so", "libstdc++.so")))
        tests = [sys.executable, "-m", "pytest", "-n", "2", "tests/test_parity.py", *sys.argv[1:]]
        environment = os.environ | {
            "PYTHONPATH": f"{folder}/lib",
            # The program, Python, is neither instrumented nor linked with libstdc++: the runtimes have to come first.
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory until it ends
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
        return subprocess.run(tests, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
