"""Real files to start from: optimizer states of every kind, models, an index of shards; with the names they need."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused8 import checkpoints

from ..convert_support import MAKERS

SHAPES = ((9, 16), (2, 70), (3,))
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def state_dicts() -> dict[str, dict[str, Any]]:
    return {name: make(SHAPES) for name, make in MAKERS.items()}


def model() -> dict[str, Tensor]:
    return {
        "embedding.weight": torch.randn(16, 8),
        "layer.weight": torch.randn(8, 8).bfloat16(),
        "norm.running_mean": torch.zeros(8),
        "steps": torch.tensor(3),
    }


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """By the format's description; needs no package."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        shape = list(tensor.shape)
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def files() -> dict[str, bytes]:
    """Name -> content. The ending of the name says how a file is read."""
    states = state_dicts()
    found = {f"{name}.pt": saved(state_dict) for name, state_dict in states.items()}
    found["legacy.pt"] = saved(states["torch"], _use_new_zipfile_serialization=False)
    nested = {"model": model(), "epoch": 3, "optimizer_states": [states["fused8"], states["torch"]]}
    found["checkpoint.pt"] = saved(nested)
    found["model.pt"] = saved(model())
    found["model.safetensors"] = safetensors(model())
    weight_map = dict.fromkeys(model(), "model.safetensors")
    found["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    found["config.json"] = b'{"architectures": ["Nothing"], "hidden_size": 8}'
    if importlib.util.find_spec("safetensors"):
        with tempfile.TemporaryDirectory() as folder:
            for name, state_dict in states.items():
                path = Path(folder) / f"{name}.safetensors"
                checkpoints.save_safetensors(state_dict, path)
                found[path.name] = path.read_bytes()
    return found
