"""`make gpu-check` where there is no GPU: it says so; its dry run goes through all of it in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def gpu_check(*arguments):
    command = [sys.executable, "-m", "bench.gpu_check", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        return
    done = gpu_check()
    assert done.returncode == 2 and "needs a GPU" in done.stderr


def test_dry_run(tmp_path):
    done = gpu_check("--dry-run", "--output", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert not [check for check in found["checks"] if check["passed"] is False]
    passed = [check["name"] for check in found["checks"] if check["passed"]]
    assert "offload" in passed and any("divisions" in name for name in passed) and len(passed) >= 15
    assert all(speed["launches"] in (1, 2) for speed in found["speeds"]) and len(found["speeds"]) == 16
    assert "the times mean nothing" in done.stdout
