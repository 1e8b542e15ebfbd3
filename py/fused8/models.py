"""The tensors of a model: of a module, param groups, shapes, a configuration of transformers, or a file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .files import json_of, load_file, safetensors_header
from .optimizer import Adam8bit
from .sizes import held_bytes

Source: TypeAlias = "nn.Module | str | Path | Mapping[str, Any] | Iterable[Any] | Any"


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

    @property
    def in_dtype(self) -> torch.dtype:
        return self.dtype or torch.float32


def may_train(dtype: torch.dtype | None) -> bool:
    return dtype is None or (dtype.is_floating_point and dtype.itemsize >= 2)


def read_parts(
    source: Source, architecture: str | None, options: dict[str, Any]
) -> tuple[list[Part], Mapping[str, Any]]:
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
        trained = may_train(tensor.dtype) and not is_statistic(name)
        if isinstance(tensor, nn.Parameter):
            trained = tensor.requires_grad
        whole = hasattr(tensor, "to_local")  # of a DTensor, not only this process's share
        nbytes = tensor.numel() * tensor.dtype.itemsize if whole else held_bytes(tensor)
        parts.append(Part(name, tensor.dtype, tuple(tensor.shape), nbytes, trained))
    return parts


def is_statistic(name: str) -> bool:
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
        raise ModuleNotFoundError(f"{what} needs transformers: pip install 'fused8[hf]'") from None
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
        content = json_of(path, path.read_bytes())
        if "weight_map" in content:
            return _of_index(path, content["weight_map"])
        return _of_config_file(path, content, architecture)
    if architecture:
        raise ValueError(f"architecture goes with a configuration, and {path} is none")
    return _of_weights(path)


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
                trained=stored.dtype is not None and may_train(stored.dtype) and not is_statistic(stored.name),
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
