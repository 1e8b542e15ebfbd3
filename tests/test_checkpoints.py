"""Optimizer state in files: found wherever it stands, converted, replaced in one piece, and no code in it is run."""

import argparse
import json
import os
import pickle
import stat
import sys

import pytest
import torch

import fused8
from fused8 import checkpoints, convert, convert_cli

from .convert_support import (
    MAKERS,
    SHAPES,
    advance,
    assert_nearest,
    assert_same_nested,
    bitsandbytes_state,
    loaded,
    source_moments,
    torch_state,
)
from .support import assert_same_optimizers, make_parameters, parameters


@pytest.fixture
def safetensors():
    return pytest.importorskip("safetensors", reason="safetensors is not installed")


def command(*args):
    """Run `fused8 convert`; the exit code."""
    parser = argparse.ArgumentParser()
    convert_cli.add_convert_parser(parser.add_subparsers())
    parsed = parser.parse_args(["convert", *map(str, args)])
    return parsed.run(parsed)


def load(path):
    return checkpoints.read(path)


# -- conversion -------------------------------------------------------------------------------------------------------

REST = {"model": {"weight": torch.arange(6.0)}, "epoch": 3, "rng": torch.tensor([1, 2], dtype=torch.uint8)}
NESTINGS = {
    # how a checkpoint holds the state, and where
    "by itself": (lambda sd: sd, lambda c: c),
    "under a key": (lambda sd: REST | {"optimizer": sd}, lambda c: c["optimizer"]),
    "in a list, as Lightning": (lambda sd: REST | {"optimizer_states": [sd]}, lambda c: c["optimizer_states"][0]),
    "in a tuple": (lambda sd: (REST, sd), lambda c: c[1]),
    "in a state of everything": (
        lambda sd: {"state": REST | {"optimizers": {"Adam": sd}}},
        lambda c: c["state"]["optimizers"]["Adam"],
    ),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_the_state_is_found_and_the_rest_is_kept(nesting, tmp_path):
    wrap, unwrap = NESTINGS[nesting]
    torch.save(wrap(torch_state()), tmp_path / "in.pt")
    assert command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", "fused8") == 0
    before, after = load(tmp_path / "in.pt"), load(tmp_path / "out.pt")
    converted = unwrap(after)
    assert converted["param_groups"][0]["codec"] == "adaptive"
    assert "exp_avg_scale" in converted["state"][0]
    assert_same_nested(wrap(0), checkpoints._replaced(after, converted, 0))
    assert_same_nested(before, wrap(torch_state()))


def test_several_states_in_one_file(tmp_path, capsys):
    torch.save({"generator": torch_state(), "critic": [bitsandbytes_state()]}, tmp_path / "in.pt")
    assert command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch") == 0
    out = capsys.readouterr().out
    assert "generator: state of torch.optim" in out and "critic[0]: state of bitsandbytes" in out
    content = load(tmp_path / "out.pt")
    for state_dict in (content["generator"], content["critic"][0]):
        torch.optim.AdamW(make_parameters(SHAPES)).load_state_dict(state_dict)


@pytest.mark.parametrize("codec, block_size", [("adaptive", 256), ("dynamic", 64), ("e4m3", 128)])
@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_what_is_written_for_fused8_loads(codec, block_size, extension, tmp_path, request):
    if extension == "safetensors":
        request.getfixturevalue("safetensors")
    source = advance(torch.optim.AdamW(make_parameters(SHAPES), amsgrad=True), 1, 3)
    torch.save(source.state_dict(), tmp_path / "in.pt")
    out = tmp_path / f"out.{extension}"
    assert command(tmp_path / "in.pt", out, "--to", "fused8", "--codec", codec, "--block-size", block_size) == 0
    ours, messages = loaded(source, load(out), min_8bit_size=4096, codec=codec, block_size=block_size, amsgrad=True)
    assert messages == []  # it is in the optimizer's own format already
    direct, _ = loaded(source, min_8bit_size=4096, codec=codec, block_size=block_size, amsgrad=True)
    assert_same_optimizers(ours, direct, "through a file")
    for p, q in zip(parameters(source), parameters(ours), strict=True):
        assert_nearest(ours.state[q], tuple(p.shape), codec, block_size, source_moments(source, p), str(p.shape))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("to", checkpoints.TARGETS)
def test_every_format_converts_to_every_library(kind, to, tmp_path):
    state_dict = MAKERS[kind]()
    torch.save(state_dict, tmp_path / "in.pt")
    assert command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", to) == 0
    content = load(tmp_path / "out.pt")
    assert content["state"].keys() == state_dict["state"].keys()
    in_memory = checkpoints.TARGETS[to](state_dict)
    assert_same_nested(content, in_memory)
    if to == "fused8":
        min_8bit_size = content["param_groups"][0]["min_8bit_size"]
        ours = fused8.AdamW8bit(make_parameters(SHAPES), amsgrad=kind == "torch", min_8bit_size=min_8bit_size)
        ours.load_state_dict(content)
    elif to == "torch":
        torch.optim.AdamW(make_parameters(SHAPES)).load_state_dict(content)


def test_a_state_of_fused8_keeps_its_own_rules_of_what_is_in_8_bits(tmp_path):
    groups = [{"params": make_parameters([(64, 128)]), "state_bits": 32}, {"params": make_parameters([(8, 16)])}]
    source = advance(fused8.AdamW8bit(groups, min_8bit_size=0, codec="dynamic"), 1, 2)
    state_dict = convert.to_fused8_state_dict(source.state_dict())
    assert state_dict["state"][0]["exp_avg"].dtype == torch.float32
    assert state_dict["state"][1]["exp_avg"].dtype == torch.int8
    assert [group["state_bits"] for group in state_dict["param_groups"]] == [32, 8]


def test_the_file_may_be_converted_in_place_and_a_link_stays_one(tmp_path):
    torch.save(torch_state(), tmp_path / "real.pt")
    os.chmod(tmp_path / "real.pt", 0o640)
    (tmp_path / "link.pt").symlink_to("real.pt")
    assert command(tmp_path / "link.pt", tmp_path / "link.pt", "--to", "fused8") == 0
    assert (tmp_path / "link.pt").is_symlink()
    assert "codec" in load(tmp_path / "real.pt")["param_groups"][0]
    assert stat.S_IMODE(os.stat(tmp_path / "real.pt").st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.pt", "real.pt"]


def test_json_output(tmp_path, capsys):
    torch.save(torch_state(), tmp_path / "in.pt")
    assert command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", "bitsandbytes", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    state = result["states"][""]
    assert state["origin"] == "torch.optim"
    assert state["lost"] == ["max_exp_avg_sq, since bitsandbytes has no amsgrad"]
    conversions = {(c["to"], c["exact"]): c["parameters"] for c in state["conversions"]}
    assert conversions == {("dynamic in blocks of 256", False): 2, ("32 bits", True): 4}


def test_progress_counts_the_elements(tmp_path):
    torch.save({"a": torch_state(), "b": torch_state()}, tmp_path / "in.pt")
    seen = []
    checkpoints.convert_file(
        tmp_path / "in.pt", tmp_path / "out.pt", "fused8", progress=lambda done, total: seen.append((done, total))
    )
    total = 2 * sum(torch.Size(shape).numel() for shape in SHAPES)
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) == 2 * len(SHAPES)


# -- what goes wrong --------------------------------------------------------------------------------------------------


class RunsCode:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (self.marker,))


def truncated(path):
    torch.save(torch_state(), path)
    path.write_bytes(path.read_bytes()[:-2000])


def legacy_truncated(path):
    torch.save(torch_state(), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-2000])


def with_code(path):
    torch.save({"state": {}, "param_groups": [], "extra": RunsCode(str(path.parent / "code was run"))}, path)


def plain_pickle_with_code(path):
    path.write_bytes(pickle.dumps(RunsCode(str(path.parent / "code was run"))))


def damaged_state(path):
    state_dict = torch_state()
    del state_dict["state"][1]["exp_avg"]
    torch.save({"optimizer": state_dict}, path)


BAD_FILES = {
    "missing": (lambda path: None, "in.pt"),
    "empty": (lambda path: path.write_bytes(b""), "could not be read"),
    "no file of torch": (lambda path: path.write_text("hello"), "in.pt"),
    "truncated": (truncated, "could not be read"),
    "truncated, of an old torch": (legacy_truncated, "in.pt"),
    "a pickle with code": (with_code, "code in files is not run"),
    "a plain pickle with code": (plain_pickle_with_code, "in.pt"),
    "no optimizer": (lambda path: torch.save({"model": {"w": torch.ones(2)}}, path), "holds no optimizer state"),
    "a damaged state": (damaged_state, "optimizer: the saved state of parameter 1 of group 0 lacks exp_avg"),
    "a directory": (lambda path: path.mkdir(), "in.pt"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_input_is_a_clear_error_and_the_target_is_untouched(case, tmp_path):
    make, message = BAD_FILES[case]
    make(tmp_path / "in.pt")
    (tmp_path / "out.pt").write_text("precious")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises((ValueError, TypeError, OSError), match=message) as error:
        command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", "fused8")
    assert "\n" not in str(error.value)
    assert (tmp_path / "out.pt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # no leftovers, and no code was run


def test_an_error_while_writing_leaves_the_target_as_it_was(tmp_path, monkeypatch):
    torch.save(torch_state(), tmp_path / "in.pt")
    (tmp_path / "out.pt").write_text("precious")

    def full_disk(content, path):
        with open(path, "wb") as file:
            file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch")
    assert (tmp_path / "out.pt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out.pt"]


@pytest.mark.parametrize(
    "target, options, message",
    [
        ("missing/out.pt", (), "does not exist"),
        (".", (), "is a directory"),
        ("out.pt", ("--codec", "dynamic"), "--codec goes with --to fused8 only"),
        ("out.pt", ("--block-size", "64"), "--block-size goes with --to fused8 only"),
    ],
)
def test_bad_targets_and_options(target, options, message, tmp_path):
    torch.save(torch_state(), tmp_path / "in.pt")
    with pytest.raises((ValueError, OSError), match=message):
        command(tmp_path / "in.pt", tmp_path / target, "--to", "torch", *options)


def test_a_file_with_tensors_of_torchao(tmp_path, monkeypatch):
    """The package is imported for it, or the error says to install it."""
    torchao_optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.compiler.set_stance("force_eager")
    try:
        source = advance(torchao_optim.AdamW8bit(make_parameters(SHAPES)), 1, 2)
    finally:
        torch.compiler.set_stance("default")
    torch.save({"optimizer": source.state_dict()}, tmp_path / "in.pt")
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as in a process that has not imported torchao
    try:
        monkeypatch.setitem(sys.modules, "torchao.optim", None)  # as if it were not installed
        with pytest.raises(ValueError, match="holds tensors of torchao: pip install torchao"):
            command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch")
    finally:
        torch.serialization.add_safe_globals(allowed)
        monkeypatch.undo()
    assert command(tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch") == 0
    state = load(tmp_path / "out.pt")["optimizer"]["state"]
    assert torch.equal(state[0]["exp_avg"], source.state_dict()["state"][0]["exp_avg"].dequantize())


# -- safetensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_safetensors_round_trip(safetensors, kind, tmp_path):
    state_dict = MAKERS[kind]()
    checkpoints.save_safetensors(state_dict, tmp_path / "state.safetensors")
    back = checkpoints.load_safetensors(tmp_path / "state.safetensors")
    flat = {key: checkpoints.foreign.flattened(state) for key, state in state_dict["state"].items()}
    for state in flat.values():
        if isinstance(state["step"], torch.Tensor) and state["step"].dtype == torch.int64:
            state["step"] = state["step"].item()
    assert_same_nested(flat, back["state"])
    assert_same_nested(state_dict["param_groups"], back["param_groups"])


def test_our_state_resumes_from_safetensors_bit_for_bit(safetensors, tmp_path):
    source = advance(fused8.AdamW8bit(make_parameters(SHAPES), min_8bit_size=0, lr=torch.tensor(0.01)), 1, 3)
    checkpoints.save_safetensors(source.state_dict(), tmp_path / "state.safetensors")
    resumed, messages = loaded(source, checkpoints.load_safetensors(tmp_path / "state.safetensors"))
    assert messages == []
    assert_same_optimizers(advance(source, 4, 6), advance(resumed, 4, 6), "resumed")


def test_safetensors_holds_no_shared_memory_and_plain_names(safetensors, tmp_path):
    checkpoints.save_safetensors(bitsandbytes_state(), tmp_path / "state.safetensors")
    with safetensors.safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        assert {"state.0.step", "state.0.state1", "state.0.qmap1", "state.1.qmap1"} <= set(file.keys())
        assert json.loads(file.metadata()["param_groups"])[0]["betas"] == [0.9, 0.999]


def test_names_as_keys(safetensors, tmp_path):
    """Full states of distributed checkpoints name parameters, with dots in the names."""
    state_dict = torch_state()
    names = [f"layers.{i}.weight" for i in range(len(SHAPES))]
    state_dict["state"] = {names[i]: state for i, state in state_dict["state"].items()}
    state_dict["param_groups"][0]["params"] = names
    checkpoints.save_safetensors(state_dict, tmp_path / "state.safetensors")
    assert_same_nested(checkpoints.load_safetensors(tmp_path / "state.safetensors"), state_dict)


def test_what_safetensors_cannot_hold(safetensors, tmp_path):
    path = tmp_path / "state.safetensors"
    for change, message in (
        (lambda sd: sd.update(extra=1), "the entries extra"),
        (lambda sd: sd["state"][0].update(text="x"), "state.0.text of type str"),
        (lambda sd: sd["state"][0].update({"a.b": torch.ones(1)}), "must have no dot"),
        (lambda sd: sd["param_groups"][0].update(thing=object()), "an option of the param groups"),
        (lambda sd: sd["param_groups"][0].update(thing=float("nan")), "an option of the param groups"),
    ):
        state_dict = torch_state()
        change(state_dict)
        with pytest.raises((TypeError, ValueError), match=message):
            checkpoints.save_safetensors(state_dict, path)
        assert not path.exists()
    torch.save({"optimizer": torch_state(), "model": {}}, tmp_path / "in.pt")
    with pytest.raises(ValueError, match="can hold an optimizer state only"):
        command(tmp_path / "in.pt", path, "--to", "fused8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.pt"]


def test_damaged_safetensors(safetensors, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "in.safetensors"
    checkpoints.save_safetensors(torch_state(), path)
    whole = path.read_bytes()
    groups = json.dumps([{"params": [0]}])
    for make, message in (
        (lambda: path.write_bytes(whole[:-100]), "could not be read"),
        (lambda: path.write_bytes(b"\xff" * 100), "could not be read"),
        (lambda: save_file({"w": torch.ones(2)}, path), "metadata has no param_groups"),
        (lambda: save_file({"w": torch.ones(2)}, path, {"param_groups": groups}), "holds w, which is no"),
        (lambda: save_file({"state.0.step": torch.ones(2)}, path, {"param_groups": "[1"}), "are damaged"),
        (lambda: save_file({"state.0.step": torch.ones(2)}, path, {"param_groups": "[1]"}), "are damaged"),
        (lambda: save_file({"state.0.step": torch.ones(2)}, path, {"param_groups": groups}), "lacks lr, betas"),
        (lambda: path.unlink(), "No such file"),
    ):
        make()
        with pytest.raises((ValueError, OSError), match=message):
            command(path, tmp_path / "out.pt", "--to", "fused8")
        assert not (tmp_path / "out.pt").exists()
