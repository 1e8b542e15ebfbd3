"""The demo, examples/gpt.py: it learns, its table holds what is claimed, and its errors are one line."""

import importlib
import json
import math
import os
import statistics
import struct
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parent.parent / "examples" / "gpt.py"
TINY = ("--size", "tiny", "--batch", "4")


def run_demo(*arguments: object) -> subprocess.CompletedProcess:
    # One thread: tests run side by side. Wide enough that no row of the table is broken.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(SCRIPT), "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def numbers(out: Path) -> dict:
    return json.loads((out / "gpt.json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[str, Path]:
    """What a run of 40 steps printed, and the folder that it filled."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    done = run_demo(*TINY, "--steps", 40, "--out", out)
    assert done.returncode == 0, done.stderr
    return done.stdout, out


@pytest.fixture
def gpt(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("gpt")


def test_both_runs_learn_the_same(demo):
    runs = numbers(demo[1])["runs"]
    for run in runs.values():
        assert len(run["losses"]) == 40 and all(map(math.isfinite, run["losses"]))
        assert run["losses"][0] > 5 > 3.5 > statistics.fmean(run["losses"][-10:])
        assert run["held_out_loss"] < 3.5 and run["optimizer_ms"] > 0
    theirs, ours = runs["AdamW"], runs["AdamW8bit"]
    assert theirs["losses"][0] == ours["losses"][0]  # the same weights, the same batch
    assert abs(ours["held_out_loss"] / theirs["held_out_loss"] - 1) < 0.01


def test_state_is_a_quarter(demo):
    results = numbers(demo[1])
    theirs, ours = results["runs"]["AdamW"], results["runs"]["AdamW8bit"]
    assert 8 <= theirs["bytes_per_parameter"] < 8.001  # two FP32 moments, and a step counter per tensor
    assert theirs["state_bytes"] == theirs["bytes_per_parameter"] * results["parameters"]
    assert "bytes_per_quantized_parameter" not in theirs
    assert 2 < ours["bytes_per_quantized_parameter"] <= 2.05
    assert ours["bytes_per_parameter"] < 2.1


def test_resume_is_exact(demo):
    assert [run["resume_is_exact"] for run in numbers(demo[1])["runs"].values()] == [True, True]


def test_snapshot_notices_one_bit(gpt):
    """Otherwise the comparison after a resume would say nothing."""
    args = Namespace(size="tiny", steps=2, lr=1e-3, batch=1, seed=0, codec="adaptive", device=torch.device("cpu"))
    run = gpt.build_run(gpt.ADAMW8BIT, args, seed=0)
    run.train_step(gpt.batch_at(0, torch.arange(200, dtype=torch.uint8), args))
    before = run.snapshot()
    assert before == run.snapshot()
    state = run.optimizer.state[run.model.head.weight]
    assert {f"head.weight/{key}" for key in state} | {"head.weight"} <= before.keys() and len(state) == 5
    state["exp_avg"][0, 0] ^= 1
    assert [name for name, bits in run.snapshot().items() if bits != before[name]] == ["head.weight/exp_avg"]


def test_table_and_plot(demo):
    printed, out = demo
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in printed.splitlines() if "│" in line]
    ours = numbers(out)["runs"]["AdamW8bit"]
    assert [row[2] for row in rows] == [
        f"{ours['training_loss']:.4f}",
        f"{ours['held_out_loss']:.4f}",
        f"{ours['state_bytes']:,}",
        f"{ours['bytes_per_parameter']:.3f}",
        f"{ours['bytes_per_quantized_parameter']:.3f}",
        f"{ours['optimizer_ms']:.2f}",
        "yes",
    ]
    png = (out / "gpt.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png.endswith(b"IEND\xaeB`\x82")
    assert min(struct.unpack(">II", png[16:24])) >= 800
    assert sorted(file.name for file in out.iterdir()) == ["gpt.json", "gpt.png"]


@pytest.mark.parametrize(("codec", "steps"), [("dynamic", 2), ("e4m3", 1)])
def test_own_text_and_codec(tmp_path, codec, steps):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 3)
    options = ("--text", text, "--codec", codec, "--seed", 3, "--lr", 0.01, "--steps", steps, "--out", tmp_path)
    done = run_demo(*TINY, *options)
    assert done.returncode == 0, done.stderr
    results = numbers(tmp_path)
    assert (results["codec"], results["seed"], results["lr"], results["text"]) == (codec, 3, 0.01, str(text))
    assert all(run["resume_is_exact"] and len(run["losses"]) == steps for run in results["runs"].values())
    assert results["runs"]["AdamW8bit"]["bytes_per_quantized_parameter"] <= 2.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", 0), "--steps must be positive, not 0"),
        (("--lr", "nan"), "--lr must be positive, not nan"),
        (("--batch", -1), "--batch must be positive, not -1"),
        (("--codec", "int4"), "invalid choice: 'int4'"),
        (("--size", "huge"), "invalid choice: 'huge'"),
        (("--text", "missing.txt"), "No such file or directory: 'missing.txt'"),
        (("--text", os.devnull), "the text is too short: 0 bytes"),
        (("--out", SCRIPT), "File exists"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, gpt, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpt.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        gpt.main()
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out) == (2, "")
    assert printed.err.startswith("gpt.py: error: ") and message in printed.err and printed.err.count("\n") == 1


def test_an_error_ends_the_script_without_a_traceback(tmp_path):
    done = run_demo("--text", tmp_path / "missing.txt", "--out", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
