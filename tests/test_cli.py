"""The fused8 command: output, exit codes, errors of one line."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fused8 import AdamW8bit, backends, cli, estimate_memory, param_groups

from .convert_support import MAKERS


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with a model, the state of its optimizer, and a text."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(100, 200), nn.LayerNorm(200))
    optimizer = AdamW8bit(param_groups(model), lr=3e-4)
    model(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), "model.pt")
    torch.save({"optimizer_states": [optimizer.state_dict()]}, "last.ckpt")
    torch.save(optimizer.state_dict(), "optimizer.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    return tmp_path


def test_the_command_by_itself_prints_help(capsys):
    code, out, err = run(capsys)
    assert code == 2 and not err
    assert all(command in out for command in ("estimate", "report", "doctor", "bench"))


@pytest.mark.parametrize("command", ["estimate", "report", "doctor", "bench"])
def test_help_of_each_command(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"example: fused8 {command}" in out and "--json" in out
    assert max(map(len, out.splitlines())) <= 120


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("fused8 ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["estimate"], "PATH"),
        (["frobnicate"], "frobnicate"),
        (["estimate", "model.pt", "--codec", "int8"], "int8"),
        (["estimate", "model.pt", "--block-size", "100"], "100"),
        (["estimate", "model.pt", "--min-8bit-size", "-1"], "min_8bit_size"),
        (["estimate", "model.pt", "--world-size", "0"], "world_size"),
        (["estimate", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["estimate", "optimizer.pt"], "fused8 report"),
        (["estimate", "text.pt"], "text.pt could not be read"),
        (["report"], "CHECKPOINT"),
        (["report", "nowhere.pt"], "nowhere.pt does not exist"),
        (["report", "text.pt"], "text.pt could not be read"),
        (["report", "model.pt"], "no optimizer state"),
        (["report", "."], "directory"),
        (["bench", "--device", "nonsense"], "nonsense"),
        (["bench", "--dtype", "int8"], "int8"),
    ],
)
def test_bad_input_is_one_line_on_stderr(capsys, files, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert message in err and err.startswith("fused8") and err.count("\n") == 1


def test_estimate(capsys, files):
    code, out, _ = run(capsys, "estimate", "model.pt", "--dtype", "bf16", "--codec", "dynamic", "--block-size", "64")
    expected = estimate_memory("model.pt", dtype=torch.bfloat16, codec="dynamic", block_size=64)
    assert code == 0
    assert f"{expected.state:,}" in out and "codec dynamic, block_size 64" in out and "bitsandbytes" in out


def test_estimate_json(capsys, files):
    code, out, _ = run(capsys, "estimate", "model.pt", "--amsgrad", "--json", "--min-8bit-size", "0")
    expected = estimate_memory("model.pt", amsgrad=True, min_8bit_size=0)
    found = json.loads(out)
    assert code == 0
    assert (found["state"], found["total"], found["by_dtype"]) == (expected.state, expected.total, expected.by_dtype)
    assert found["peers"]["bitsandbytes AdamW8bit"] is None


def test_estimate_with_master_bits(capsys, files):
    code, out, _ = run(capsys, "estimate", "model.pt", "--dtype", "bf16", "--master-bits", "24")
    expected = estimate_memory("model.pt", dtype=torch.bfloat16, master_bits=24)
    assert code == 0 and expected.master_weights == expected.parameters
    assert f"{expected.state:,}" in out and "master_bits 24" in out and "master weights" in out


def test_estimate_of_ranks(capsys, files):
    code, out, _ = run(capsys, "estimate", "model.pt", "--world-size", "8")
    expected = estimate_memory("model.pt", world_size=8).per_rank
    assert code == 0 and "Each of 8 ranks under FSDP2" in out and f"{expected.state.largest:,}" in out
    code, out, _ = run(capsys, "estimate", "model.pt", "--world-size", "8", "--json")
    assert json.loads(out)["per_rank"]["weights"] == {
        "largest": expected.weights.largest,
        "mean": expected.weights.mean,
    }


def test_report(capsys, files):
    code, out, _ = run(capsys, "report", "last.ckpt")
    assert code == 0
    assert "last.ckpt: optimizer_states[0]: fused8, state of 20,600 parameters after 1 step" in out
    assert "lr 0.0003" in out and "0.weight" in out
    code, out, _ = run(capsys, "report", "optimizer.pt", "--json")
    found = json.loads(out)[""]
    assert found["parameters"] == 20600 and found["steps"] == [1, 1]


@pytest.mark.parametrize("has_rich", [True, False])
def test_tables_on_a_terminal(capsys, files, monkeypatch, has_rich):
    if has_rich:
        pytest.importorskip("rich")
    find_spec = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: has_rich and find_spec(name))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "report", "last.ckpt")
    assert code == 0
    # A table's title must not be taken for markup: this one has brackets.
    assert "optimizer_states[0]: fused8" in out and "exp_avg_scale" in out and "[200, 100]" in out


def test_runs_as_a_process_and_leaves_quietly_when_the_reader_does(files):
    command = f"{sys.executable} -m fused8.cli report last.ckpt | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "fused8" in done.stdout and "Traceback" not in done.stderr


# -- doctor -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def selection():
    """The choice of a backend is remembered; forget it before and after."""
    backends.select.cache_clear()
    yield
    backends.select.cache_clear()


def cpu_only(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(cli.shutil, "which", lambda name: None)
    monkeypatch.delenv("FUSED8_CPU_ISA", raising=False)


def test_doctor_is_content(capsys, monkeypatch, selection):
    cpu_only(monkeypatch)
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    assert "All is fine." in out and "same bits as the reference" in out and "instruction set" in out
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    cpu = found["devices"][0]
    assert (cpu["device"], cpu["backend"], found["advice"]) == ("cpu", "cpp", [])
    assert set(cpu["others"]) == set(backends.BACKENDS) - {"cpp"} and all(cpu["others"].values())
    assert found["versions"]["torch"].startswith(torch.__version__)
    assert found["versions"]["C++ compiler"] is None


def test_doctor_misses_the_library(capsys, monkeypatch, selection):
    cpu_only(monkeypatch)
    monkeypatch.setattr(backends, "load_library", lambda: "the compiled library is missing (here)")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "the compiled library is missing (here). Install a C++20 compiler" in out and cli.REINSTALL in out
    assert "cpu is served by the slow reference" in out


def test_doctor_finds_wrong_results(capsys, monkeypatch, selection):
    cpu_only(monkeypatch)
    cpp = backends.BACKENDS["cpp"]

    def forgetful(params, *args, cache):
        before = params[0].clone()
        cpp.adam_step(params, *args, cache=cache)
        params[0].copy_(before)

    monkeypatch.setitem(backends.BACKENDS, "cpp", cpp._replace(adam_step=forgetful))
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "the self-test of cpp on cpu failed" in out and "differ from the reference" in out
    code, out, err = run(capsys, "bench", "--million", "0.01")
    assert code == 1 and not out and err.count("\n") == 1 and "no speed is given for wrong results" in err


def test_doctor_reports_a_self_test_that_fails(capsys, monkeypatch, selection):
    cpu_only(monkeypatch)

    def broken(*args, cache):
        raise RuntimeError("no\nkernel")

    monkeypatch.setitem(backends.BACKENDS, "cpp", backends.BACKENDS["cpp"]._replace(adam_step=broken))
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "RuntimeError: no kernel" in out


def test_doctor_sees_a_gpu_that_torch_cannot_use(capsys, monkeypatch, selection):
    cpu_only(monkeypatch)
    answers = {"nvidia-smi": "GPU 0: NVIDIA H200 (UUID: GPU-1)"}
    monkeypatch.setattr(cli, "_first_line", lambda command, line=0: answers.get(command[0]))
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "GPU 0: NVIDIA H200 is here, and this torch cannot use it" in out


def test_doctor_asks_the_driver_for_a_gpu(capsys, monkeypatch, selection, tmp_path):
    cpu_only(monkeypatch)
    driver = tmp_path / "nvidia-smi"
    monkeypatch.setattr(cli.shutil, "which", lambda name: str(driver) if name == "nvidia-smi" else None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for program, found in (("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", True), ("echo broken; exit 9", False)):
        driver.write_text(f"#!/bin/sh\n{program}\n")
        driver.chmod(0o755)
        code, out, _ = run(capsys, "doctor")
        assert ("GPU 0: NVIDIA H200 is here, and this torch cannot use it" in out) == found and code == int(found)
    driver.write_bytes(b"\0")  # which nothing can run
    assert run(capsys, "doctor")[0] == 0


def test_doctor_says_when_the_environment_chooses_the_instruction_set(capsys, monkeypatch, selection):
    cpu_only(monkeypatch)
    monkeypatch.setenv("FUSED8_CPU_ISA", "generic")
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "FUSED8_CPU_ISA forces the instruction set generic; unset it for the best one" in out
    monkeypatch.setenv("FUSED8_CPU_ISA", "mmx")
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 1 and "FUSED8_CPU_ISA is mmx" in found["library"]["problem"]
    assert found["advice"][0].endswith("which this library does not have: unset it for the best one")
    assert not any(cli.REINSTALL in line for line in found["advice"])


def test_doctor_knows_versions_that_are_too_old(capsys, monkeypatch, selection):
    cpu_only(monkeypatch)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "torch 2.9.1+cpu is too old" in out
    assert cli._release("3.10.0a0+git1") == (3, 10) and cli._release("2.11") == (2, 11)


# -- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bench(capsys, dtype):
    arguments = ["bench", "--million", "0.05", "--seconds", "0", "--dtype", dtype]
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "bit for bit" in out and "times as fast" in out
    code, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert found["parameters"] == 49 * 1024 and found["backend"] == "cpp" and found["speedup"] > 0
    ours, theirs = found["results"]
    for result in (ours, theirs):
        assert result["ms"] == pytest.approx(result["ns_per_parameter"] * found["parameters"] / 1e6)
    element = 4 if dtype == "fp32" else 2
    assert theirs["state_bytes"] == 2 * element * found["parameters"] + 4
    # weights read and written, gradients read, state read and written
    moved = 3 * element * found["parameters"] + 2 * ours["state_bytes"]
    assert ours["gb_per_s"] == pytest.approx(moved / ours["ms"] / 1e6)


def test_convert(tmp_path, capsys):
    p = torch.nn.Parameter(torch.randn(64, 256))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "in.pt")
    code, _, _ = run(capsys, "convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--to", "fused8")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert code == 0 and saved["epoch"] == 3
    assert saved["optimizer"]["state"][0]["exp_avg"].dtype == torch.int8
    code, _, err = run(capsys, "convert", str(tmp_path / "missing.pt"), str(tmp_path / "no.pt"), "--to", "torch")
    assert code == 2 and err.count("\n") == 1 and not (tmp_path / "no.pt").exists()


# -- a person at a terminal -------------------------------------------------------------------------------------------


def test_an_interruption_is_no_traceback(capsys, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_versions", interrupted)
    assert run(capsys, "doctor") == (130, "", "")


def test_convert_shows_its_progress_on_a_terminal_alone(files, capsys, monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    command = ("convert", "optimizer.pt", "new.pt", "--to", "torch")
    code, plain, err = run(capsys, *command)
    assert code == 0 and not err
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert cli.main([*command]) == 0
    assert "converting" in sys.stderr.getvalue() and capsys.readouterr().out == plain
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert cli.main([*command, "--json"]) == 0
    assert not sys.stderr.getvalue()


def test_report_refuses_a_damaged_state_in_one_line(files, capsys):
    torch.save({"state": {0: 1}, "param_groups": [{"params": [0]}]}, "damaged.pt")
    code, out, err = run(capsys, "report", "damaged.pt")
    assert code == 2 and not out
    assert err.count("\n") == 1 and "the state of parameter 0 must be a dict, not int" in err


def test_report_names_the_library_of_each_file(files, capsys):
    for maker, name in (("torch", "Adam of torch or alike"), ("FlashOptim", "flashoptim"), ("bitsandbytes",) * 2):
        torch.save(MAKERS[maker](), "state.pt")
        code, out, _ = run(capsys, "report", "state.pt")
        assert code == 0 and name in out


def test_convert_without_safetensors_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(4)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "in.pt")
    assert cli.main(["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.safetensors"), "--to", "fused8"]) != 0
    assert "pip install safetensors" in capsys.readouterr().err
