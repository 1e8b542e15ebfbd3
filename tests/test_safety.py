"""No code from files: how files are loaded, what is never called, and what a saved state names."""

import ast
import io
import pickle
import pickletools
import re
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import fused8

from .support import CODECS, make_parameters, parameters, set_gradients

ROOT = Path(__file__).parent.parent
SHIPPED = ("py", "triton_kernels", "examples", "bench", ".ci")
FOLDERS = [ROOT / folder for folder in (*SHIPPED, "tests")]
SOURCES = [ROOT / "setup.py", *sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))]

# A whole optimizer, as this test itself has just written it: objects of our own classes need their class.
UNRESTRICTED = {("tests/test_optimizer.py", "test_deepcopy_and_pickle_go_on_alike_and_apart")}
# What runs or may run code in its input; `tests` unpickle what they have pickled.
NEVER = {"eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open"}
NEVER |= {"yaml.load", "joblib.load", "torch.serialization.add_safe_globals", "torch.hub.load", "os.system"}


def calls(path):
    """(name of the function around it, dotted name of what is called, the call) of each call in a file."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, ast.unparse(child.func), child
            inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            yield from visit(child, inside)

    return visit(ast.parse(path.read_text()), "")


def keyword(call, name):
    """The constant that a call passes by name; None if it does not."""
    values = [k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)]
    return values[0] if values else None


def test_every_torch_load_says_weights_only():
    found, unrestricted = 0, set()
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        for function, called, call in calls(path):
            if called in ("torch.load", "torch.serialization.load"):
                found += 1
                if keyword(call, "weights_only") is not True:
                    unrestricted.add((name, function))
        text = path.read_text()
        assert not re.search(r"from torch(\.serialization)? import [^\n]*\bload\b", text), f"{name}: write torch.load"
    assert found > 5 and unrestricted <= UNRESTRICTED


def test_nothing_that_is_shipped_unpickles_or_evaluates():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "tests"):
            continue
        for _, called, call in calls(path):
            where = f"{path.relative_to(ROOT)}:{call.lineno} calls {called}"
            assert called not in NEVER, where
            assert keyword(call, "trust_remote_code") is not True, where
            assert keyword(call, "allow_pickle") is not True and keyword(call, "shell") is not True, where


def test_readme_loads_with_weights_only():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]:
        loads = re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", path.read_text())
        assert all("weights_only=True" in load for load in loads if load != "torch.load()"), path


def test_json_that_is_nested_without_end_is_refused(tmp_path):
    deep = b"[" * 200_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    (tmp_path / "model.safetensors.index.json").write_bytes(deep)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        with pytest.raises(ValueError, match=f"{name}: the JSON in it is nested too deep"):
            fused8.estimate_memory(tmp_path / name)


def names_in(data: bytes) -> set[str]:
    """What a pickle of protocol 2, as torch.save writes it, would import."""
    return {arg.replace(" ", ".") for opcode, arg, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}


@pytest.mark.parametrize("master_bits", [None, 24])
@pytest.mark.parametrize("codec", CODECS)
def test_a_saved_state_names_no_class_of_ours(codec, master_bits):
    """Of 8 and 32 bits, with amsgrad, of named parameters; with corrections, or converted."""
    params = make_parameters([(16, 300), (5,)], torch.bfloat16)
    optimizer = fused8.AdamW8bit(
        [{"params": [("a", params[0])]}, {"params": [("b", params[1])], "state_bits": 32}],
        codec=codec, min_8bit_size=0, amsgrad=True, master_bits=master_bits, max_grad_norm=1.0, lr=torch.tensor(1e-3),
    )  # fmt: skip
    set_gradients(parameters(optimizer), 1)
    optimizer.step()
    for state_dict in [optimizer.state_dict()] + ([optimizer.torch_state_dict()] if master_bits is None else []):
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        with zipfile.ZipFile(buffer) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            named = names_in(archive.read(name))
        assert named and all(name.partition(".")[0] in ("torch", "collections") for name in named), named
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
        assert not [name for name in names_in(pickle.dumps(state_dict, protocol=2)) if name.startswith("fused8")]


def test_constraints_are_exact_and_of_the_same_torch_as_the_makefile():
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._!]+", pin) for pin in pins)
    torch_of_makefile = re.search(r"^TORCH\s*\?= (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch_of_makefile[1] in pins
    named = {re.split(r"[=]", pin)[0].lower().replace("_", "-") for pin in pins}
    assert {"pytest", "pytest-xdist", "pytest-cov", "hypothesis", "ruff", "mypy", "clang-format"} <= named
