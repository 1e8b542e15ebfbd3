"""Damage to files and to state dicts. Everything comes from the random.Random given, and so can be repeated.

Bytes are cut, flipped, repeated and spliced. What is more, an archive of torch.save is packed again around a damaged
pickle, and the header of safetensors is edited as JSON: damage that a checksum or a length would otherwise catch first.
"""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

INTEGERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    65535,
    2**24,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**32,
    2**60,
    2**63 - 1,
    2**64 - 1,
)
NAMES = (
    "params",
    "param_groups",
    "state",
    "step",
    "exp_avg",
    "exp_avg_sq",
    "exp_avg_scale",
    "state1",
    "absmax1",
    "qmap1",
)
NAMES += ("lr", "betas", "codec", "block_size", "__metadata__", "dtype", "shape", "data_offsets", "weight_map", "")
STORAGES = (b"FloatStorage", b"DoubleStorage", b"HalfStorage", b"BFloat16Storage", b"ByteStorage", b"CharStorage")
STORAGES += (b"LongStorage", b"IntStorage", b"BoolStorage", b"ComplexFloatStorage", b"UntypedStorage", b"NoStorage")
DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4", "I64", "I32", "I8", "U8", "U64", "BOOL", "", "X")


# -- bytes ------------------------------------------------------------------------------------------------------------


def file(name: str, corpus: dict[str, bytes], rng: random.Random) -> bytes:
    """A damaged copy of a file of the corpus."""
    data = corpus[name]
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = once(data, rng.choice([*corpus.values()]), rng)
    return data


def once(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Damage in one place; `other` is a file to splice from."""
    if data[:2] == b"PK" and rng.random() < 0.7:
        return _archive(data, other, rng)
    if data[8:9] == b"{" and rng.random() < 0.8:
        return _safetensors(data, rng)
    if data[:1] == b"{" and rng.random() < 0.7:
        return _json(data, rng)
    return _bytes(data, other, rng)


def _bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 8, 100, 10_000)))
    kind = rng.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + rng.randbytes(end - at) + data[end:]
    if kind == 3:
        return data[:at] + data[end:]
    if kind == 4:
        return data[:end] + data[at:end] * rng.choice((1, 2, 50)) + data[end:]
    if kind == 5:
        start = rng.randrange(len(other) + 1)
        return data[:at] + other[start : start + end - at] + data[end:]
    if kind == 6:
        return _number(data, at, rng)
    return data[:at] + other[rng.randrange(len(other) + 1) :]


def _number(data: bytes, at: int, rng: random.Random) -> bytes:
    """An integer of 1, 2, 4 or 8 bytes in place of what stands there."""
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice(INTEGERS) % 256**width
    return data[:at] + value.to_bytes(width, rng.choice(("little", "big"))) + data[at + width :]


def _archive(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """An archive of torch.save with one of its records damaged or gone, and the checksums right."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # damaged before
        return _bytes(data, other, rng)
    if not records:
        return data
    pickles = [name for name in records if name.endswith("data.pkl")]
    name = pickles[0] if pickles and rng.random() < 0.8 else rng.choice(sorted(records))
    kind = rng.randrange(10)
    if kind == 0:
        del records[name]
    elif kind == 1:
        records[name + "x"] = records.pop(name)
    elif name in pickles:
        records[name] = _pickle(records[name], rng)
    else:
        records[name] = _bytes(records[name], other, rng)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for record, content in records.items():
            archive.writestr(record, content)
    return buffer.getvalue()


def _pickle(data: bytes, rng: random.Random) -> bytes:
    """Another number, name, storage or opcode in a pickle of protocol 2."""
    kind = rng.randrange(6)
    if kind == 0:  # BININT1 and BININT: sizes, strides, offsets, keys
        return _at_opcode(data, rng, b"K", lambda: b"K" + bytes([rng.choice((0, 1, 2, 3, 9, 16, 70, 128, 255))]), 2)
    if kind == 1:
        value = struct.pack("<i", rng.choice((-(2**31), -1, 0, 1, 2**20, 2**31 - 1)))
        return _at_opcode(data, rng, b"K", lambda: b"J" + value, 2)
    if kind == 2:  # LONG1, of 8 bytes
        value = struct.pack("<q", rng.choice((-1, 2**33, 2**40, 2**60, 2**63 - 1)))
        return _at_opcode(data, rng, b"K", lambda: b"\x8a\x08" + value, 2)
    if kind == 3:
        present = [storage for storage in STORAGES if storage in data]
        if present:
            return data.replace(rng.choice(present), rng.choice(STORAGES), rng.choice((1, -1)))
    if kind == 4:
        name = rng.choice(NAMES).encode()
        present = [n for n in NAMES if n and b"X" + struct.pack("<I", len(n)) + n.encode() in data]
        if present:
            old = rng.choice(present).encode()
            pair = (b"X" + struct.pack("<I", len(x)) + x for x in (old, name))
            return data.replace(*pair, rng.choice((1, -1)))
    return _bytes(data, data, rng)


def _at_opcode(data: bytes, rng: random.Random, opcode: bytes, make: Callable[[], bytes], length: int) -> bytes:
    places = [i for i in range(len(data)) if data[i : i + 1] == opcode]
    if not places:
        return data
    at = rng.choice(places)
    return data[:at] + make() + data[at + length :]


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header edited, its length right or not."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.15:
        return struct.pack("<Q", rng.choice((*INTEGERS, length - 1, length + 1, len(data)))) + header + rest
    header = _json(header, rng)
    if rng.random() < 0.1:
        rest = rest[: rng.randrange(len(rest) + 1)]
    return struct.pack("<Q", len(header)) + header + rest


def _json(text: bytes, rng: random.Random) -> bytes:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return _bytes(text, text, rng)
    if not isinstance(content, dict) or not content or rng.random() < 0.1:
        return rng.choice((b"", b"[]", b"{}", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"NaN", text * 2))
    _edit_json(content, rng)
    return json.dumps(content).encode()


def _edit_json(content: Any, rng: random.Random) -> None:
    holder, key = _choose(content, rng)
    value = holder[key]
    if isinstance(value, str) and value[:1] in "[{" and value and rng.random() < 0.9:  # param_groups, JSON in JSON
        try:
            inner = json.loads(value)
            _edit_json(inner, rng)
        except (ValueError, IndexError, RecursionError):
            inner = None
        holder[key] = json.dumps(inner)
        return
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(NAMES)] = holder.pop(key)
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(NAMES)] = value
    elif kind == 3:
        holder[key] = rng.choice(DTYPES)
    elif kind == 4:
        holder[key] = rng.choice((*INTEGERS, -1, 0.5, 1e300, float("nan"), 2**70))
    else:
        holder[key] = rng.choice((None, True, [], {}, "", [0], [2**60, 2**60], [-1], {"a": {}}, [[]], [0, 2**60]))


# -- state dicts ------------------------------------------------------------------------------------------------------

SCALARS: tuple[Any, ...] = (None, True, -1, 0, 3, 2**24, 2**70, 0.5, -0.0, float("nan"), float("inf"), "", "adaptive")
SCALARS += (b"x", [], {}, (), [1], {1: 2}, {"step": 1}, object, 1j, 10**400, -(2**63))
CHANGES: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t[..., :-1] if t.dim() else t[None],
    lambda t: t.unsqueeze(0),
    lambda t: t.flatten(),
    lambda t: t.transpose(0, -1) if t.dim() else t,
    lambda t: -t,
    lambda t: t * 0,
    lambda t: t * float("nan"),
    lambda t: t / 0,
    lambda t: t * 1e30,
    lambda t: t.bfloat16(),
    lambda t: t.double(),
    lambda t: t.to(torch.int64),
    lambda t: t.to(torch.uint8),
    lambda t: t.to(torch.complex64),
    lambda t: t.bool(),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: t.flatten()[:1].expand(t.shape),  # one element in memory
    lambda t: t.new_zeros(()).expand(2**40),
    lambda t: t.contiguous().view(torch.uint8),
    lambda t: torch.randint(-(2**31), 2**31, t.shape).to(torch.int32).view(torch.float32),
    lambda t: torch.randint(-(2**31), 2**31, t.shape).to(torch.int32),
    lambda t: torch.randint(0, 256, t.shape).to(t.dtype),
    lambda t: torch.empty(0),
    lambda t: t.tolist(),
    lambda t: torch.nested.nested_tensor([t.float()], layout=torch.jagged),
)


def state_dict(original: dict[str, Any], others: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """A damaged copy of a state dict."""
    damaged = copy.deepcopy(original)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not damaged:
            break
        holder, key = _choose(damaged, rng)
        value = holder[key]
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = copy.deepcopy(rng.choice(SCALARS))
        elif kind == 2 and isinstance(holder, dict):
            holder[rng.choice((*NAMES, 0, 7))] = holder.pop(key)
        elif kind == 3:
            other_holder, other_key = _choose(rng.choice(others), rng)
            holder[key] = copy.deepcopy(other_holder[other_key])
        elif isinstance(value, Tensor):
            try:
                holder[key] = rng.choice(CHANGES)(value)
            except (RuntimeError, NotImplementedError, IndexError, TypeError):  # of one that was changed before
                holder[key] = value
    return damaged


def _choose(container: Any, rng: random.Random) -> tuple[Any, Any]:
    """A place within nested dicts and lists."""
    places = [*_places(container)]
    by_depth: dict[int, list[tuple[Any, Any]]] = {}
    for depth, holder, key in places:
        by_depth.setdefault(depth, []).append((holder, key))
    return rng.choice(by_depth[rng.choice(sorted(by_depth))])


def _places(container: Any, depth: int = 0) -> Iterator[tuple[int, Any, Any]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        yield depth, container, key
        if isinstance(value, (dict, list)):
            yield from _places(value, depth + 1)
