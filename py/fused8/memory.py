"""How many bytes an optimizer takes: estimated before it exists, and measured from its tensors.

All numbers are bytes; text shows MiB (2^20 bytes). Counted is what the tensors hold. An allocator adds its own
rounding: torch's on CUDA rounds every tensor up to 512 bytes.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import state as state_of
from .optimizer import Adam8bit

MIB = 2**20
LARGEST = 10  # parameters that a report names

Source: TypeAlias = "nn.Module | str | Path | Mapping[str, Any] | Iterable[Any] | Any"


# -- tables -----------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table as text. Columns are flush right, except the first and those in `left`."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()

    def is_left(self, column: int) -> bool:
        return column == 0 or self.header[column] in self.left

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def text(line: Sequence[str]) -> str:
            cells = (
                cell.ljust(width) if self.is_left(i) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            return "  ".join(cells).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, "", text(self.header), rule, *map(text, self.rows)])


class _Tabular:
    def tables(self) -> list[Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))


def mib(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / MIB:,.2f}"


def _per_parameter(size: int, parameters: int) -> str:
    return f"{size / parameters:.3f}" if parameters else ""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the estimate -----------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A tensor of a model, as far as memory goes."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    nbytes: int
    trained: bool
    group: Mapping[str, Any] | None = None
    """The param group it is in; None: the defaults."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class MemoryEstimate(_Tabular):
    """What training takes, in bytes. `print` shows it as tables."""

    parameters: int
    """Elements that are trained."""
    frozen: int
    """Elements that are not: they have neither a gradient nor a state."""
    weights: int
    """All parameters, trained and frozen."""
    gradients: int
    codes: int
    """8-bit codes of the moments."""
    scales: int
    """Scales of the blocks."""
    state_32bit: int
    """FP32 moments of the parameters that are kept in 32 bits."""
    steps: int
    """Step counters."""
    master_weights: int
    """What the state keeps of a parameter beyond its own precision."""
    by_dtype: dict[str, int]
    """The state by dtype."""
    peers: dict[str, int | None]
    """The state of other optimizers for the same parameters; None where one does not have the option."""
    options: dict[str, Any]
    """The options of the optimizer that decide its state."""

    @property
    def state(self) -> int:
        """The optimizer's whole state."""
        return self.codes + self.scales + self.state_32bit + self.steps + self.master_weights

    @property
    def total(self) -> int:
        """Weights, gradients and state. Activations are not in it."""
        return self.weights + self.gradients + self.state

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"state": self.state, "total": self.total}

    def tables(self) -> list[Table]:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "state: codes": self.codes,
            "state: scales": self.scales,
            "state: 32-bit": self.state_32bit,
            "state: step counters": self.steps,
            "state: master weights": self.master_weights,
        }
        rows = [[name, f"{size:,}", mib(size)] for name, size in parts.items() if size]
        rows.append(["total", f"{self.total:,}", mib(self.total)])
        frozen = f" and {self.frozen:,} that are not trained" if self.frozen else ""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        optimizers: dict[str, int | None] = {"fused8": self.state, **self.peers}
        return [
            Table(f"{self.parameters:,} parameters{frozen}; {options}", ["", "bytes", "MiB"], rows),
            Table(
                "Beside other optimizers (total: with weights and gradients)",
                ["optimizer", "state bytes", "MiB", "bytes/parameter", "total MiB"],
                [
                    [name, "does not have amsgrad", "", "", ""]
                    if size is None
                    else [
                        name,
                        f"{size:,}",
                        mib(size),
                        _per_parameter(size, self.parameters),
                        mib(size + self.weights + self.gradients),
                    ]
                    for name, size in optimizers.items()
                ],
            ),
        ]


def estimate_memory(
    model_or_shapes: Source,
    *,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    architecture: str | None = None,
    **options: Any,
) -> MemoryEstimate:
    """The bytes that training with fused8 takes, exactly, before anything is allocated.

    The state is that of every trained parameter after its first step; one that never gets a gradient never gets a
    state. For a sharded model it is that of the whole model.

    Args:
        model_or_shapes: what is to be trained:

            - a torch.nn.Module, also on the meta device;
            - param groups, as of `fused8.param_groups(model)`: options in a group are respected;
            - shapes, (name, shape) pairs, tensors, (name, tensor) pairs, or a dict from names to shapes or tensors;
            - a configuration of transformers, which is built on the meta device;
            - a path: `.safetensors`, an index of shards (`*.index.json`), `config.json`, a model saved by torch.save
              (`.pt`, `.pth`, `.bin`, `.ckpt`: a state dict, also within "model" or "state_dict"), or a directory that
              has one of these. Of a safetensors file only the header is read; others are mapped into memory, not read.

            Parameters count if they require a gradient; of tensors, shapes and files all that have 16 bits or more and
            are floating point, except the running statistics of batch normalization. Tied ones count once.
        dtype: of the weights instead of what they have. Shapes without a dtype are float32.
        grad_dtype: of the gradients instead of the parameter's.
        architecture: the class of transformers to build of a configuration ("DistilBertForSequenceClassification");
            None takes the first of its `architectures`, or AutoModel.
        options: of `Adam8bit`: codec, block_size, min_8bit_size, amsgrad.

    Raises:
        ValueError, OSError: a file is missing, truncated, or no model; an option is out of range.
        TypeError: `model_or_shapes` is of another type, or an option unknown.
        ModuleNotFoundError: a configuration is given and transformers is not installed.
    """
    parts, defaults = _read(model_or_shapes, architecture, options)
    if dtype is not None:
        parts = [
            part._replace(dtype=dtype, nbytes=part.numel * dtype.itemsize) if _may_train(part.dtype) else part
            for part in parts
        ]
    trained = [part for part in parts if part.trained]
    sizes = dict.fromkeys(("codes", "scales", "state_32bit", "steps", "master_weights"), 0)
    by_dtype: dict[str, int] = {}
    for part in trained:
        for name, spec in state_of.state_specs(part.shape, part.group or defaults).items():
            size = math.prod(spec.shape) * spec.dtype.itemsize
            sizes[_kind_of(name, spec.dtype)] += size
            by_dtype[_name_of(spec.dtype)] = by_dtype.get(_name_of(spec.dtype), 0) + size
    amsgrad = any((part.group or defaults)["amsgrad"] for part in trained)
    return MemoryEstimate(
        parameters=sum(part.numel for part in trained),
        frozen=sum(part.numel for part in parts if not part.trained),
        weights=sum(part.nbytes for part in parts),
        gradients=sum(part.numel * (grad_dtype or _dtype(part)).itemsize for part in trained),
        **sizes,
        by_dtype=by_dtype,
        peers={name: peer(trained, amsgrad) for name, peer in _peers(trained).items()},
        options={name: defaults[name] for name in ("codec", "block_size", "min_8bit_size", "amsgrad")},
    )


def _kind_of(name: str, dtype: torch.dtype) -> str:
    if name == "step":
        return "steps"
    if name.endswith("_scale"):
        return "scales"
    if name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        return "codes" if dtype.itemsize == 1 else "state_32bit"
    return "master_weights"


def _dtype(part: Part) -> torch.dtype:
    return part.dtype or torch.float32


def _may_train(dtype: torch.dtype | None) -> bool:
    return dtype is None or (dtype.is_floating_point and dtype.itemsize >= 2)


# -- other optimizers -------------------------------------------------------------------------------------------------

# From their released sources; a test compares those that run on a CPU with what they allocate.
Peer: TypeAlias = Callable[[Sequence[Part], bool], "int | None"]


def _torch_fp32(parts: Sequence[Part], amsgrad: bool) -> int:
    """torch.optim.AdamW with FP32 parameters: two FP32 moments (three with amsgrad) and a float32 `step`."""
    return sum((3 if amsgrad else 2) * 4 * part.numel + 4 for part in parts)


def _torch_masters(parts: Sequence[Part], amsgrad: bool) -> int:
    """The usual mixed precision: as above, and an FP32 copy of every 16-bit parameter."""
    return _torch_fp32(parts, amsgrad) + sum(4 * part.numel for part in parts if _dtype(part).itemsize == 2)


def _torch_low_precision(parts: Sequence[Part], amsgrad: bool) -> int:
    """torch.optim.AdamW as it is: the moments have the parameter's dtype."""
    return sum((3 if amsgrad else 2) * _dtype(part).itemsize * part.numel + 4 for part in parts)


def _bitsandbytes(parts: Sequence[Part], amsgrad: bool) -> int | None:
    """bitsandbytes 0.50 Adam8bit, AdamW8bit: two codes, two float32 absmax per 256 elements of the flattened
    parameter; below 4096 elements two FP32 moments. Two maps of 256 float32 for all. `step` is a Python number."""
    if amsgrad:
        return None
    large = [part.numel for part in parts if part.numel >= 4096]
    small = [part.numel for part in parts if part.numel < 4096]
    maps = 2 * 256 * 4 if large else 0
    return sum(2 * n + 8 * -(-n // 256) for n in large) + 8 * sum(small) + maps


def _torchao(parts: Sequence[Part], amsgrad: bool) -> int:
    """torchao 0.18 AdamW8bit: a code and a float32 scale per 256 elements for each moment, and for each of these
    tensors a map of 256 float32; moments in the parameter's dtype below 4096 elements and where 256 does not divide
    their number. A float32 `step`."""
    moments = 3 if amsgrad else 2
    total = 0
    for part in parts:
        n = part.numel
        if n >= 4096 and n % 256 == 0:
            total += moments * (n + 4 * (n // 256) + 256 * 4) + 4
        else:
            total += moments * n * _dtype(part).itemsize + 4
    return total


def _flashoptim(parts: Sequence[Part], amsgrad: bool) -> int | None:
    """flashoptim 0.1 FlashAdamW: a code and a float16 scale per 32 elements for each moment, of every parameter; for
    16-bit parameters a correction of 8 bits, which makes them 24-bit master weights. An int64 `step`."""
    if amsgrad:
        return None
    total = 0
    for part in parts:
        correction = part.numel if _dtype(part).itemsize == 2 else 0
        total += 2 * (part.numel + 2 * -(-part.numel // 32)) + correction + 8
    return total


def _peers(parts: Sequence[Part]) -> dict[str, Peer]:
    low_precision = any(_dtype(part).itemsize == 2 for part in parts)
    return {
        "torch AdamW, FP32 state": _torch_fp32,
        **({"torch AdamW, FP32 state and master weights": _torch_masters} if low_precision else {}),
        **({"torch AdamW, state in the weights' dtype": _torch_low_precision} if low_precision else {}),
        "bitsandbytes AdamW8bit": _bitsandbytes,
        "torchao AdamW8bit": _torchao,
        f"FlashAdamW{', with 24-bit master weights' if low_precision else ''}": _flashoptim,
    }


# -- what can be estimated --------------------------------------------------------------------------------------------


def _read(source: Source, architecture: str | None, options: dict[str, Any]) -> tuple[list[Part], Mapping[str, Any]]:
    """The tensors of a source, and the group options of those that have none of their own."""
    # The optimizer checks its options itself, and says what is wrong with them.
    defaults = Adam8bit([torch.empty(0, device="meta")], **options).defaults
    if isinstance(source, nn.Module):
        return _of_tensors(source.named_parameters()), defaults
    if isinstance(source, (str, Path)):
        return _of_path(Path(source), architecture), defaults
    if _is_config(source):
        return _of_config(source, architecture), defaults
    if isinstance(source, Mapping):
        return _of_named(source.items()), defaults
    if not isinstance(source, Iterable):
        raise TypeError(
            "estimate_memory takes a module, param groups, shapes, tensors, a configuration of transformers or a path, "
            f"got {type(source).__name__}"
        )
    items: list[Any] = list(source)
    if items and all(isinstance(item, Mapping) and "params" in item for item in items):
        groups = Adam8bit([dict(item) for item in items], **options).param_groups
        parts = []
        for group in groups:
            names = group.get("param_names") or [""] * len(group["params"])
            tensors = _of_tensors(zip(names, group["params"], strict=True))
            parts += [part._replace(group=group) for part in tensors]
        return parts, defaults
    named = [
        item if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) else (str(i), item)
        for i, item in enumerate(items)
    ]
    return _of_named(named), defaults


def _of_named(named: Iterable[tuple[str, Any]]) -> list[Part]:
    tensors: list[tuple[str, Tensor]] = []
    parts = []
    for name, item in named:
        if isinstance(item, Tensor):
            tensors.append((name, item))
            continue
        if not isinstance(item, Sequence) or isinstance(item, str):
            raise TypeError(
                f"{name!r}: expected a shape or a tensor, got {item!r}. One shape goes into a list: [(3, 4)]"
            )
        shape = tuple(item)
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{name!r}: a shape has whole numbers from 0 on, got {shape}")
        parts.append(Part(name, None, shape, 4 * math.prod(shape), trained=True))
    return parts + _of_tensors(tensors)


def _of_tensors(named: Iterable[tuple[str, Tensor]]) -> list[Part]:
    """Tensors that are the same object, or the same storage seen in the same way, count once."""
    parts = []
    seen = set()
    for name, tensor in named:
        storage = None if tensor.is_meta or is_traceable_wrapper_subclass(tensor) else tensor.untyped_storage()
        place: Any = id(tensor)
        if storage is not None and storage.data_ptr():
            place = (storage.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
        if place in seen:
            continue
        seen.add(place)
        trained = _may_train(tensor.dtype) and not _is_statistic(name)
        if isinstance(tensor, nn.Parameter):
            trained = tensor.requires_grad
        whole = hasattr(tensor, "to_local")  # of a DTensor, not only this process's share
        nbytes = tensor.numel() * tensor.dtype.itemsize if whole else _nbytes(tensor)
        parts.append(Part(name, tensor.dtype, tuple(tensor.shape), nbytes, trained))
    return parts


def _is_statistic(name: str) -> bool:
    """Running statistics of batch normalization stand beside the parameters in a state dict."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _is_config(source: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(source, transformers.PretrainedConfig)


def _of_config(config: Any, architecture: str | None) -> list[Part]:
    transformers = _transformers("a configuration")
    name = architecture or next(iter(config.architectures or ()), "AutoModel")
    cls: Any = getattr(transformers, name, None)
    if not hasattr(cls, "from_config") and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"transformers has no model class {name!r}: give another as architecture")
    with torch.device("meta"):
        model = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
    model.tie_weights()
    parts = _of_tensors(model.named_parameters())
    dtype = config.dtype if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if dtype is None:
        return parts
    return [part._replace(dtype=dtype, nbytes=part.numel * dtype.itemsize) for part in parts]


def _transformers(what: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{what} needs transformers: pip install fused8[hf]") from None
    return transformers


# Looked for in a directory, in this order.
_MODEL_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "config.json",
)


def _of_path(path: Path, architecture: str | None) -> list[Part]:
    if path.is_dir():
        names = ["config.json"] if architecture else _MODEL_FILES
        found = next((path / name for name in names if (path / name).exists()), None)
        if found is None:
            raise FileNotFoundError(f"{path} has none of {', '.join(names)}")
        path = found
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == ".json":
        content = _json_of(path, path.read_bytes())
        if "weight_map" in content:
            return _of_index(path, content["weight_map"])
        return _of_config_file(path, content, architecture)
    if architecture:
        raise ValueError(f"architecture goes with a configuration, and {path} is none")
    return _of_weights(path)


def _json_of(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:  # also covers what is no UTF-8
        raise ValueError(f"{path}: the JSON in it is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the JSON in it is no object")
    return content


def _of_config_file(path: Path, content: dict[str, Any], architecture: str | None) -> list[Part]:
    if "model_type" not in content:
        raise ValueError(f"{path} is neither an index of weights (weight_map) nor a configuration (model_type)")
    transformers = _transformers(str(path))
    return _of_config(transformers.AutoConfig.from_pretrained(path, trust_remote_code=False), architecture)


def _of_index(path: Path, weight_map: Any) -> list[Part]:
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{path}: weight_map is no map from tensors to files")
    parts = []
    for shard in sorted(set(weight_map.values())):
        file = path.parent / shard
        if Path(shard).name != shard or not file.exists():
            raise FileNotFoundError(f"{path} names {shard}, which is not beside it")
        wanted = {name for name, where in weight_map.items() if where == shard}
        found = [part for part in _of_weights(file) if part.name in wanted]
        if missing := wanted - {part.name for part in found}:
            raise ValueError(f"{path}: {file.name} lacks {', '.join(sorted(missing)[:3])}")
        parts += found
    return parts


def _of_weights(path: Path) -> list[Part]:
    if path.suffix == ".safetensors":
        return [
            Part(
                *stored,
                trained=stored.dtype is not None and _may_train(stored.dtype) and not _is_statistic(stored.name),
            )
            for stored in safetensors_header(path)[0]
        ]
    content = load_file(path)
    for key in ("state_dict", "model", "model_state_dict", "module"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if isinstance(content, Mapping) and "param_groups" in content:
        raise ValueError(f"{path} holds the state of an optimizer, not a model: `fused8 report` reads it")
    tensors = (
        {name: value for name, value in content.items() if isinstance(value, Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not tensors:
        raise ValueError(f"{path} holds no state dict of a model")
    return _of_named((str(name), tensor) for name, tensor in tensors.items())


# -- files ------------------------------------------------------------------------------------------------------------

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
        header = _json_of(path, file.read(length))
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


# -- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterMemory:
    name: str
    shape: tuple[int, ...]
    state: int


@dataclass(frozen=True)
class GroupMemory:
    """A param group; `number` None gathers state that belongs to no parameter."""

    number: int | None
    parameters: int
    """Elements of its parameters that have a state."""
    tensors: int
    """Parameters that have a state."""
    without_state: int
    """Parameters that have none (yet)."""
    state: int
    by_dtype: dict[str, int]
    options: dict[str, Any]


@dataclass(frozen=True)
class MemoryReport(_Tabular):
    """What an optimizer holds, in bytes. `print` shows it as tables."""

    optimizer: str
    parameters: int
    """Elements of the parameters that have a state."""
    weights: int | None
    """All parameters of its groups; None if it was read from a file."""
    gradients: int | None
    """The gradients there are at the moment."""
    state: int
    """The whole state: the sum of numel * element_size over its tensors. A tensor that several parameters share counts
    once, and a tensor subclass as what it consists of."""
    groups: list[GroupMemory]
    by_dtype: dict[str, int]
    by_name: dict[str, int]
    """The state by the names it has there (`exp_avg`, `step`)."""
    largest: list[ParameterMemory]
    """The parameters with the largest state."""
    steps: tuple[int, int] | None
    """The fewest and the most steps of a parameter; None where there is no `step`, or where it is not on the CPU and
    reading it would wait for a device."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def tables(self) -> list[Table]:
        header = ["", "bytes", "MiB", "bytes/parameter"]

        def rows(sizes: Mapping[str, int]) -> list[list[str]]:
            ordered = sorted(sizes.items(), key=lambda item: -item[1])
            return [[name, f"{size:,}", mib(size), _per_parameter(size, self.parameters)] for name, size in ordered]

        around = {
            name: size for name, size in (("weights", self.weights), ("gradients", self.gradients)) if size is not None
        }
        without = sum(group.without_state for group in self.groups)
        note = f"; {without} parameters have no state (yet)" if without else ""
        if self.steps:
            fewest, most = self.steps
            note = f" after {most} steps{f' (some after {fewest})' if fewest != most else ''}" + note
        tables = [
            Table(
                f"{self.optimizer}, state of {self.parameters:,} parameters{note}",
                header,
                rows(self.by_name) + rows({"state": self.state}) + rows(around),
            ),
            Table("State by dtype", header, rows(self.by_dtype)),
            Table(
                "Param groups",
                ["group", "tensors", "parameters", "state bytes", "MiB", "bytes/parameter", "options"],
                [
                    [
                        "none" if group.number is None else str(group.number),
                        str(group.tensors),
                        f"{group.parameters:,}",
                        f"{group.state:,}",
                        mib(group.state),
                        _per_parameter(group.state, group.parameters),
                        ", ".join(f"{name} {value}" for name, value in group.options.items() if value is not False),
                    ]
                    for group in self.groups
                ],
                left=["options"],
            ),
            Table(
                "Largest states",
                ["parameter", "shape", "state bytes", "MiB"],
                [[p.name, str(list(p.shape)), f"{p.state:,}", mib(p.state)] for p in self.largest],
            ),
        ]
        return [table for table in tables if table.rows]


def memory_report(optimizer: torch.optim.Optimizer) -> MemoryReport:
    """What the state of an optimizer takes at this moment, measured from its tensors.

    For any optimizer of torch, or wrapper of one that has `state` and `param_groups`. On a sharded (DTensor) state it
    counts what this process holds. Before the first step there is no state.
    """
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    owned: list[list[_Owned]] = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
        owned.append(
            [
                _Owned(name, tuple(p.shape), optimizer.state.get(p))
                for name, p in zip(names, group["params"], strict=True)
            ]
        )
    known = set(params)
    others = [value for key, value in optimizer.state.items() if not (isinstance(key, Tensor) and key in known)]
    report = _measure(type(getattr(optimizer, "optimizer", optimizer)).__name__, groups, owned, others)
    unique = {id(p): p for p in params}.values()
    gradients = [p.grad for p in unique if p.grad is not None]
    return MemoryReport(**report, weights=sum(map(_nbytes, unique)), gradients=sum(map(_nbytes, gradients)))


def checkpoint_reports(path: Path) -> dict[str, MemoryReport]:
    """The optimizer states in a file, wherever they stand in it: place in the file -> report.

    Found in files of torch.save are state dicts of optimizers by themselves (the Trainer's optimizer.pt), under a key
    ("optimizer") and in lists (Lightning's "optimizer_states"). A safetensors file holds one, as tensors named
    `state.<key>.<name>` and `param_groups` as JSON in its metadata; only its header is read.

    Raises:
        ValueError, OSError: the file is missing, damaged, holds code, or has no optimizer state.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give a file in it, such as optimizer.pt")
    if path.suffix == ".safetensors":
        return {"": _report_of(_safetensors_state(path))}
    found = {place: _report_of(content) for place, content in _optimizer_states(load_file(path), "", depth=4)}
    if not found:
        raise ValueError(f"{path} holds no optimizer state (a dict with state and param_groups)")
    return found


class _Owned(NamedTuple):
    name: str
    shape: tuple[int, ...] | None
    state: Any


def _optimizer_states(content: Any, place: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(content, Mapping):
        if isinstance(content.get("state"), Mapping) and isinstance(content.get("param_groups"), Sequence):
            yield place, content
            return
        items: Iterable[tuple[Any, Any]] = content.items()
        names: Callable[[Any], str] = lambda key: f"{place}.{key}" if place else str(key)  # noqa: E731
    elif isinstance(content, (list, tuple)):
        items, names = enumerate(content), lambda key: f"{place}[{key}]"
    else:
        return
    if depth:
        for key, value in items:
            yield from _optimizer_states(value, names(key), depth - 1)


def _safetensors_state(path: Path) -> dict[str, Any]:
    """The optimizer state in a safetensors file, its tensors on the meta device."""
    tensors, metadata = safetensors_header(path)
    state: dict[str, dict[str, Tensor]] = {}
    try:
        groups = json.loads(metadata["param_groups"])
        groups = [group | {"params": [str(key) for key in group["params"]]} for group in groups]
        for stored in tensors:
            key, _, name = stored.name.removeprefix("state.").rpartition(".")
            state.setdefault(key, {})[name] = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} holds no optimizer state: `fused8 estimate` reads weights") from None
    return {"state": state, "param_groups": groups}


def _report_of(content: Mapping[str, Any]) -> MemoryReport:
    groups, state = content["param_groups"], content["state"]
    owned = []
    keys: set[Any] = set()
    for group in groups:
        names = group.get("param_names") or [f"parameter {key}" for key in group["params"]]
        owned.append([_Owned(n, None, state.get(key)) for n, key in zip(names, group["params"], strict=True)])
        keys.update(group["params"])
    others = [value for key, value in state.items() if key not in keys]
    report = _measure(_kind_of_file(groups, state), groups, owned, others)
    return MemoryReport(**report, weights=None, gradients=None)


def _kind_of_file(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> str:
    """Which optimizer wrote a state dict, by the names it uses."""
    names = {name for own in state.values() if isinstance(own, Mapping) for name in own}
    if any("state_format" in group for group in groups):
        return "fused8"
    if names & {"state1", "__bnb_optimizer_quant_state__"}:
        return "bitsandbytes"
    if any("::" in str(name) for name in names):
        return "flashoptim"
    if {"exp_avg", "exp_avg_sq"} <= names:
        return "Adam of torch or alike"
    return "optimizer"


_SHOWN_OPTIONS = ("state_bits", "codec", "block_size", "amsgrad", "weight_decay", "lr")


def _measure(
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    owned: Sequence[Sequence[_Owned]],
    others: Sequence[Any],
) -> dict[str, Any]:
    """The fields of a MemoryReport that come from state alone."""
    seen: set[int] = set()
    by_name: dict[str, int] = {}
    reports: list[GroupMemory] = []
    all_parameters: list[ParameterMemory] = []
    steps: list[int] = []

    def measure(number: int | None, options: Mapping[str, Any], members: Sequence[_Owned]) -> None:
        by_dtype: dict[str, int] = {}
        parameters, states = 0, []
        for member in members:
            if not member.state:
                continue
            size, shape = 0, member.shape
            if (step := _step_of(member.state)) is not None:
                steps.append(step)
            for name, tensor in _tensors(member.state, ""):
                if member.shape is None and (shape is None or tensor.numel() > math.prod(shape)):
                    shape = tuple(tensor.shape)  # a file does not say the parameter's
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                for dtype, nbytes in _pieces(tensor):
                    size += nbytes
                    by_name[name] = by_name.get(name, 0) + nbytes
                    by_dtype[_name_of(dtype)] = by_dtype.get(_name_of(dtype), 0) + nbytes
            shape = shape or ()
            parameters += math.prod(shape) if number is not None else 0
            states.append(ParameterMemory(member.name, shape, size))
        all_parameters.extend(states)
        reports.append(
            GroupMemory(
                number,
                parameters,
                len(states),
                len(members) - len(states),
                sum(own.state for own in states),
                by_dtype,
                {name: _plain(options[name]) for name in _SHOWN_OPTIONS if name in options},
            )
        )

    for number, (group, members) in enumerate(zip(groups, owned, strict=True)):
        measure(number, group, members)
    if others:
        measure(None, {}, [_Owned("no parameter", None, other) for other in others])
    by_dtype: dict[str, int] = {}
    for report in reports:
        for name, size in report.by_dtype.items():
            by_dtype[name] = by_dtype.get(name, 0) + size
    return dict(
        optimizer=optimizer,
        parameters=sum(report.parameters for report in reports),
        state=sum(report.state for report in reports),
        groups=reports,
        by_dtype=by_dtype,
        by_name=by_name,
        largest=sorted(all_parameters, key=lambda own: -own.state)[:LARGEST],
        steps=(min(steps), max(steps)) if steps else None,
    )


def _step_of(state: Any) -> int | None:
    step = state.get("step") if isinstance(state, Mapping) else None
    if isinstance(step, Tensor):
        return int(step) if step.numel() == 1 and step.device.type == "cpu" else None
    return step if isinstance(step, int) else None


def _tensors(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state, however deep, each with the innermost name that it has there."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, str(key))
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value, name)
    elif hasattr(state, "__dict__"):  # an object that holds tensors, as flashoptim's
        yield from ((name, value) for value in vars(state).values() if isinstance(value, Tensor))


def _pieces(tensor: Tensor) -> Iterator[tuple[torch.dtype, int]]:
    """Dtype and bytes of the plain tensors that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _pieces(getattr(tensor, name))
    else:
        yield tensor.dtype, tensor.numel() * tensor.element_size()


def _nbytes(tensor: Tensor) -> int:
    return sum(size for _, size in _pieces(tensor))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
