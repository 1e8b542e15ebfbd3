"""Foreign bytes and foreign state dicts: a short run of the fuzzer, and by name what longer runs have found."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused8

from . import corpus, targets

ROOT = Path(__file__).parent.parent.parent
INPUTS = 700  # some 10 seconds on a quiet machine; `make fuzz ARGS=600` for longer


def in_process(*args, timeout=300):
    """In a process of its own, with bounded memory: a crash or a hang ends that, not the tests."""
    command = [sys.executable, "-m", "tests.fuzz", *map(str, args)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )


def test_damaged_input_works_or_is_refused(tmp_path):
    done = in_process("--inputs", INPUTS, "--folder", tmp_path)
    number = (tmp_path / "current").read_text() if (tmp_path / "current").exists() else "none"
    assert done.returncode == 0, f"{done.stdout}\n(the last input was {number}: `--first {number} --inputs 1`)"


def test_the_same_number_is_the_same_input():
    from .__main__ import Run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "file", lambda *_: 0)
        patch.setattr(targets, "load_state_dict", lambda *_: 0)
        a, b = (Run.__new__(Run) for _ in range(2))
        files, state_dicts = corpus.files(), [*corpus.state_dicts().values()]
        for run in (a, b):
            run.files, run.state_dicts = files, state_dicts
        assert all(repr(a.input(number)) == repr(b.input(number)) for number in range(60))


# -- files, by what is wrong with them --------------------------------------------------------------------------------


def header(text, length=None):
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor_entry(**changes):
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def with_groups(groups):
    return header(json.dumps({"__metadata__": {"param_groups": groups}}).encode())


def adam_state(**tensors):
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)} | tensors
    group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    return corpus.saved({"state": {0: state}, "param_groups": [group]})


def groups(*param_groups):
    return corpus.saved({"state": {}, "param_groups": [*param_groups]})


GIGANTIC = 2**50  # elements: more bytes than there are addresses, so that no machine is taken down
FILES = {
    # name of the file -> its bytes
    "a header of 2^60 bytes.safetensors": header(b"{}", 2**60),
    "a header of 2^64 - 1 bytes.safetensors": header(b"{}", 2**64 - 1),
    "a tensor of 2^60 bytes.safetensors": header(
        json.dumps(tensor_entry(shape=[2**58], data_offsets=[0, 2**60])).encode()
    ),
    "a tensor of 2^60 elements of 0 bytes.safetensors": header(
        json.dumps(tensor_entry(shape=[2**60, 0], data_offsets=[0, 0])).encode()
    ),
    "a shape beyond 2^64.safetensors": header(
        json.dumps(tensor_entry(shape=[2**40, 2**40], data_offsets=[0, 2**82])).encode()
    ),
    "a deep header.safetensors": header(b'{"a":' * 100_000),
    "a deep index.json": b"[" * 100_000,
    "deep groups.safetensors": with_groups("[" * 100_000),
    "groups that are no list.safetensors": with_groups("3"),
    "groups without params.pt": groups({}),
    "groups that are no dicts.pt": groups(1),
    "params that are no list.pt": groups({"params": 3}),
    "a list as a key.pt": groups({"params": [[0]]}),
    "a step of NaN.pt": adam_state(step=torch.tensor(float("nan"))),
    "a step of infinity.pt": adam_state(step=torch.tensor(float("inf"))),
    "a complex step.pt": adam_state(step=torch.tensor(1j)),
    "one element that says it is 2^50.pt": adam_state(
        exp_avg=torch.zeros(1).expand(GIGANTIC), exp_avg_sq=torch.zeros(1).expand(GIGANTIC)
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_or_read(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    for turn in range(len(targets.CONVERSIONS)):
        targets.file(path, turn)


# -- state dicts ------------------------------------------------------------------------------------------------------


def damaged(kind, **options):
    state_dict = corpus.state_dicts()[kind]
    state_dict["param_groups"][0].update(options)
    return state_dict


STATE_DICTS = {
    "a file without its state, with amsgrad": lambda: damaged("bitsandbytes", amsgrad=True),
    "an lr of 10^400": lambda: damaged("torch", lr=10**400),
    "an eps of 10^400": lambda: damaged("torch", eps=10**400),
    "a weight decay of 10^400": lambda: damaged("torch", weight_decay=10**400),
    "a seed of 10^5000": lambda: damaged("torch", rounding_seed=10**5000),
    "a matrix as a key": lambda: damaged("torch", params=[torch.ones(3, 3), 1, 2]),
    "a matrix among the betas": lambda: damaged("torch", betas={"a": torch.ones(3, 3)}),
}


@pytest.mark.parametrize("name", STATE_DICTS)
def test_a_state_dict_is_refused_or_loaded(name):
    targets.load_state_dict(STATE_DICTS[name]())


@pytest.mark.parametrize("option", ["lr", "eps", "weight_decay"])
def test_an_option_beyond_fp64_is_refused_when_it_is_given(option):
    with pytest.raises(ValueError, match=option):
        fused8.AdamW8bit([torch.nn.Parameter(torch.ones(3))], **{option: 10**400})
