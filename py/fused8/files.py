"""What is in a file: the header of safetensors, the content of torch.save, optimizer states in nested containers.

No code in a file is run, and no weights are read that need not be.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

DEPTH = 4  # how many containers deep an optimizer state is looked for

# https://github.com/huggingface/safetensors#format
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SAFETENSORS_HEADER_LIMIT = 100_000_000  # the format's own


class StoredTensor(NamedTuple):
    """What the header of a safetensors file says about a tensor."""

    name: str
    dtype: torch.dtype | None
    """None: one that torch does not have."""
    shape: tuple[int, ...]
    nbytes: int


def safetensors_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file, none of which is read, and its metadata.

    Raises:
        ValueError: the file is truncated or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"{path}: truncated: a safetensors file begins with 8 bytes")
        (length,) = struct.unpack("<Q", start)
        if length > _SAFETENSORS_HEADER_LIMIT:
            raise ValueError(f"{path} is no safetensors file: its header would have {length:,} bytes")
        if 8 + length > size:
            raise ValueError(f"{path}: truncated within its header")
        header = json_of(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    tensors = [_stored_tensor(path, name, entry) for name, entry in header.items()]
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size:
        raise ValueError(f"{path}: truncated: {size:,} bytes of {end:,}")
    return tensors, metadata if isinstance(metadata, dict) else {}


def _stored_tensor(path: Path, name: str, entry: Any) -> StoredTensor:
    try:
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        shape = tuple(entry["shape"])
        first, last = entry["data_offsets"]
        valid = all(isinstance(n, int) and n >= 0 for n in (*shape, first, last)) and first <= last
        valid = valid and (dtype is None or last - first == math.prod(shape) * dtype.itemsize)
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"{path}: the header's entry of {name!r} is damaged")
    return StoredTensor(name, dtype, shape, last - first)


def load_file(path: Path) -> Any:
    """What torch.save has written, mapped rather than read where the file allows it. Runs no code from the file.

    Raises:
        ValueError: it holds other things than tensors and plain containers, or is damaged.
    """
    try:
        # The format before torch 1.6 is no zip archive and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        if found := str(error).partition("GLOBAL ")[2].split():
            message = f"was not loaded: it names {found[0]}, and code in files is not run"
        else:
            message = "could not be read: it is damaged or holds more than tensors and plain containers"
        raise ValueError(f"{path} {message}") from None
    except Exception as error:  # a damaged file can make an unpickler fail in any way
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} could not be read: it is damaged or no file of torch.save ({first_line})") from None


def json_of(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object in a file, or in a part of it."""
    try:
        content = json.loads(text)
    except ValueError as error:  # also covers what is no UTF-8
        raise ValueError(f"{path}: the JSON in it is damaged: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: the JSON in it is nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the JSON in it is no object")
    return content


def optimizer_states(content: Any, place: str = "", depth: int = DEPTH) -> dict[str, Mapping[str, Any]]:
    """The optimizer states within nested containers: place ("optimizer_states[0]") -> state dict."""
    if _is_optimizer_state(content):
        return {place: content}
    found: dict[str, Mapping[str, Any]] = {}
    if not depth:
        return found
    if isinstance(content, Mapping):
        for key, value in content.items():
            found |= optimizer_states(value, f"{place}.{key}" if place else str(key), depth - 1)
    elif isinstance(content, (list, tuple)):
        for i, value in enumerate(content):
            found |= optimizer_states(value, f"{place}[{i}]", depth - 1)
    return found


def _is_optimizer_state(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and isinstance(content.get("state"), Mapping)
        and isinstance(content.get("param_groups"), (list, tuple))
    )
