"""fused8.estimate_memory of models in files, checkpoint_reports of optimizer states in files: exact, and never run."""

import json
import os
import struct

import pytest
import torch

import fused8
from fused8.memory import checkpoint_reports, load_file, safetensors_header

from .memory_support import TinyGPT, convnet, counted, parameters_of, step, write_safetensors


def test_safetensors_file(tmp_path):
    tensors = convnet().bfloat16().state_dict()
    write_safetensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    expected = fused8.estimate_memory(tensors)
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path / "model.safetensors")):
        assert fused8.estimate_memory(path) == expected


def test_safetensors_header_is_what_safetensors_writes(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = convnet().state_dict()
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    stored, _ = safetensors_header(tmp_path / "model.safetensors")
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored}
    assert found == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_safetensors_weights_are_not_read(tmp_path):
    """A hole of 64 GB, which no one could read."""
    path = tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 17, 1 << 17], "data_offsets": [0, 1 << 36]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 36))
    assert fused8.estimate_memory(path).weights == 1 << 36


def test_index_of_shards(tmp_path):
    tensors = TinyGPT().state_dict()
    names = list(tensors)
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for shard, own in shards.items():
        write_safetensors(tmp_path / shard, {name: tensors[name].clone() for name in own})
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    separate = {name: tensor.clone() for name, tensor in tensors.items()}
    assert fused8.estimate_memory(tmp_path) == fused8.estimate_memory(separate)

    index["weight_map"]["other.weight"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"a.safetensors lacks other.weight"):
        fused8.estimate_memory(tmp_path)
    for shard in ("c.safetensors", "../a.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
        with pytest.raises(FileNotFoundError, match="not beside it"):
            fused8.estimate_memory(tmp_path)


def damaged_header(entry):
    text = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "truncated"),
        (b"\x01\x02", "truncated"),
        (b"\xff" * 64, "no safetensors file"),
        (damaged_header(GOOD)[:40], "truncated within its header"),
        (damaged_header(GOOD)[:-1], "truncated: "),
        (struct.pack("<Q", 4) + b"{]}x" + bytes(16), "damaged"),
        (struct.pack("<Q", 2) + b"[]" + bytes(16), "no object"),
        (damaged_header({"dtype": "F32", "shape": [2, 2]}), "'w' is damaged"),
        (damaged_header(GOOD | {"shape": [2, 3]}), "'w' is damaged"),
        (damaged_header(GOOD | {"shape": [-2, -2]}), "'w' is damaged"),
        (damaged_header(GOOD | {"shape": "22"}), "'w' is damaged"),
        (damaged_header(GOOD | {"data_offsets": [16, 0]}), "'w' is damaged"),
        (damaged_header("w"), "'w' is damaged"),
    ],
)
def test_damaged_safetensors_files(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        fused8.estimate_memory(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("nesting", [None, "model", "state_dict", "model_state_dict"])
def test_saved_state_dict(tmp_path, nesting):
    state_dict = TinyGPT().state_dict()
    path = tmp_path / "model.pt"
    torch.save(state_dict if nesting is None else {nesting: state_dict, "epoch": 3}, path)
    assert fused8.estimate_memory(path) == fused8.estimate_memory(TinyGPT())
    path.rename(tmp_path / "pytorch_model.bin")
    assert fused8.estimate_memory(tmp_path) == fused8.estimate_memory(TinyGPT())


def test_state_dict_of_the_old_format(tmp_path):
    torch.save(TinyGPT().state_dict(), tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    assert fused8.estimate_memory(tmp_path / "model.pt") == fused8.estimate_memory(TinyGPT())


class Code:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_code_in_files_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": {}, "param_groups": [], "more": Code()}, "evil.pt")
    for read in (fused8.estimate_memory, checkpoint_reports):
        with pytest.raises(ValueError, match=r"mkdir.* code in files is not run"):
            read(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02hello", b"PK\x03\x04", b"text"])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load_file(path)
    torch.save({"w": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="damaged"):
        load_file(path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("index.json", {"weight_map": ["a"]}, "no map"),
        ("config.json", {"hidden": 3}, "neither an index"),
        ("broken.json", None, "damaged"),
    ],
)
def test_json_that_is_no_model(tmp_path, name, content, message):
    (tmp_path / name).write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        fused8.estimate_memory(tmp_path / name)


def test_paths_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has none of model\.safetensors"):
        fused8.estimate_memory(tmp_path)
    torch.save(step(TinyGPT()).state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match="`fused8 report`"):
        fused8.estimate_memory(tmp_path / "optimizer.pt")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="no state dict"):
        fused8.estimate_memory(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="architecture goes with a configuration"):
        fused8.estimate_memory(tmp_path / "other.pt", architecture="BertModel")


# -- optimizer states in files ----------------------------------------------------------------------------------------


def wrapped(state_dict):
    return {
        "": state_dict,
        "optimizer": {"optimizer": state_dict, "epoch": 3, "model": {"w": torch.zeros(3)}},
        "optimizer_states[0]": {"optimizer_states": [state_dict], "lr_schedulers": [{"last_epoch": 3}]},
        "a.b[1].c": {"a": {"b": [0, {"c": state_dict}]}},
    }


@pytest.mark.parametrize("place", wrapped(None))
def test_states_are_found_in_a_file(tmp_path, place):
    optimizer = step(TinyGPT())
    torch.save(wrapped(optimizer.state_dict())[place], tmp_path / "checkpoint.pt")
    report = checkpoint_reports(tmp_path / "checkpoint.pt")[place]
    measured = fused8.memory_report(optimizer)
    assert (report.state, report.by_name, report.by_dtype) == (measured.state, measured.by_name, measured.by_dtype)
    assert (report.optimizer, report.parameters, report.steps) == ("fused8", measured.parameters, (1, 1))
    assert [p.name for p in report.largest] == [p.name for p in measured.largest]
    assert report.weights is None and report.gradients is None
    str(report)


@pytest.mark.parametrize(
    "make, kind", [(torch.optim.AdamW, "Adam of torch or alike"), (torch.optim.Adagrad, "optimizer")]
)
def test_states_of_others_in_a_file(tmp_path, make, kind):
    optimizer = step(parameters_of(torch.float32), make)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    report = checkpoint_reports(tmp_path / "optimizer.pt")[""]
    assert (report.optimizer, report.state) == (kind, counted(optimizer))


def test_bitsandbytes_state_in_a_file(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer = step(parameters_of(torch.float32), bitsandbytes.optim.Adam8bit)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    report = checkpoint_reports(tmp_path / "optimizer.pt")[""]
    assert report.optimizer == "bitsandbytes" and report.steps == (1, 1)
    assert report.state == fused8.memory_report(optimizer).state
    assert report.parameters == sum(p.numel() for p in parameters_of(torch.float32))


def test_safetensors_state(tmp_path):
    optimizer = step(TinyGPT())
    saved = optimizer.state_dict()
    tensors = {f"state.{key}.{name}": t for key, own in saved["state"].items() for name, t in own.items()}
    path = tmp_path / "optimizer.safetensors"
    write_safetensors(path, tensors, {"param_groups": json.dumps(saved["param_groups"])})
    report, measured = checkpoint_reports(path)[""], fused8.memory_report(optimizer)
    assert (report.state, report.by_name, report.by_dtype) == (measured.state, measured.by_name, measured.by_dtype)
    assert (report.optimizer, report.parameters) == ("fused8", measured.parameters)
    assert [group.tensors for group in report.groups] == [group.tensors for group in measured.groups]

    write_safetensors(path, {"weight": torch.zeros(3)}, {"format": "pt"})
    with pytest.raises(ValueError, match="no optimizer state"):
        checkpoint_reports(path)


def test_files_without_an_optimizer_state(tmp_path):
    for name, content in (("model.pt", TinyGPT().state_dict()), ("number.pt", 3)):
        torch.save(content, tmp_path / name)
        with pytest.raises(ValueError, match="no optimizer state"):
            checkpoint_reports(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        checkpoint_reports(tmp_path / "nowhere.pt")
    with pytest.raises(IsADirectoryError, match=r"optimizer\.pt"):
        checkpoint_reports(tmp_path)
