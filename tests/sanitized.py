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


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "setup.py", "build", "--build-base", f"{folder}/temp", "--build-lib", f"{folder}/lib"]
        options = {"FUSED8_SANITIZE": SANITIZERS, "FUSED8_REQUIRE_BUILD": "1", "FUSED8_NO_CUDA": "1"}
        subprocess.run(build, cwd=ROOT, env=os.environ | options, check=True)
        find = ["g++", "-print-file-name=libasan.so"]
        runtime = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
        tests = [sys.executable, "-m", "pytest", "-n", "2", "tests/test_parity.py", *sys.argv[1:]]
        environment = os.environ | {
            "PYTHONPATH": f"{folder}/lib",
            "LD_PRELOAD": runtime,  # the program, Python, is not instrumented: the runtime has to come first
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory until it ends
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
        return subprocess.run(tests, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
