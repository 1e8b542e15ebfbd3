"""Files with optimizer state: read and written without running code from them, converted, replaced in one piece.

Files of torch.save may hold the state anywhere: by itself (the Trainer's optimizer.pt), under a key, in a list
(Lightning's `optimizer_states`). Whatever else they hold is kept as it is.

A safetensors file holds one optimizer state: the tensors as `state.<key>.<name>`, the names that torch's distributed
checkpoints use, and the param groups as JSON under `param_groups` in its metadata.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import convert, foreign
from .files import DEPTH, load_file, optimizer_states

SAFETENSORS = ".safetensors"
TARGETS: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": convert.to_torch_state_dict,
    "fused8": convert.to_fused8_state_dict,
    "bitsandbytes": convert.to_bitsandbytes_state_dict,
}


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> dict[str, convert.Report]:
    """Convert every optimizer state in a file and write it, with all else that the file holds, to another.

    The target is replaced at once, when everything has been written, or not at all. It may be the source.

    Args:
        source, target: files of torch.save, or of safetensors if they are so named.
        to: "torch", "fused8" or "bitsandbytes".
        progress: called with the number of elements that are done, and how many there are.
        options: for "fused8" `codec` and `block_size`.

    Returns:
        What was converted: the place in the file ("optimizer_states[0]"; "" for the whole file) -> report.

    Raises:
        ValueError, TypeError: the source is damaged, holds code, or no Adam state of a known format.
        OSError: it cannot be read, or the target cannot be written.
    """
    source, target = Path(source), Path(target)
    content = read(source)
    places = optimizer_states(content)
    if not places:
        raise ValueError(f"{source} holds no optimizer state (a dict with 'state' and 'param_groups')")
    total = sum(_elements(state_dict) for state_dict in places.values())
    done = 0

    def advance(elements: int) -> None:
        nonlocal done
        done += elements
        if progress:
            progress(done, total)

    reports = {}
    for place, state_dict in places.items():
        reports[place] = convert.Report()
        try:
            converted = TARGETS[to](state_dict, report=reports[place], progress=advance, **options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{place}: {error}" if place else str(error)) from None
        content = _replaced(content, state_dict, converted)
    write(target, content)
    return reports


def read(path: Path) -> Any:
    """What a file of torch.save or safetensors holds, on the CPU. No code in it is run.

    Raises:
        ValueError: it is damaged, or holds other things than tensors and plain containers.
        OSError: it cannot be read.
    """
    if path.suffix == SAFETENSORS:
        return load_safetensors(path)
    try:
        return load_file(path)
    except ValueError:
        if not _names_torchao(path):
            raise
    try:
        import torchao.optim  # noqa: F401  makes its tensors known to torch.load
    except ImportError:
        raise ValueError(f"{path} holds tensors of torchao: pip install torchao to read it") from None
    return load_file(path)


def _names_torchao(path: Path) -> bool:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged file, or one from before torch 1.6
        return False
    return bool(names) and all(name.startswith("torchao.optim.") for name in names)


def write(path: Path, content: Any) -> None:
    """Write a file of torch.save or safetensors, which then replaces what was there.

    Raises:
        ValueError, TypeError: a safetensors file cannot hold this.
        OSError, RuntimeError: the file cannot be written.
    """
    if path.suffix != SAFETENSORS:
        _replace(path, lambda temporary: torch.save(content, temporary))
    elif list(optimizer_states(content)) == [""]:
        save_safetensors(content, path)
    else:
        raise ValueError(f"{path}: a safetensors file can hold an optimizer state only, and this one is part of more")


def save_safetensors(state_dict: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Save an optimizer state dict as safetensors; the file appears, or is replaced, at once.

    Numbers among the state (the `step` of bitsandbytes) become 0-dim tensors, and the nested state of bitsandbytes
    becomes flat. Needs the package safetensors.

    Raises:
        TypeError, ValueError: this is no optimizer state dict, or holds what safetensors cannot.
    """
    safetensors = _safetensors()
    convert.check_structure(state_dict)
    if extra := state_dict.keys() - {"state", "param_groups"}:
        raise ValueError(f"safetensors cannot hold the entries {', '.join(sorted(map(str, extra)))} of the state dict")
    tensors: dict[str, Tensor] = {}
    storages = set()
    for key, state in state_dict["state"].items():
        for name, value in foreign.flattened(state).items():
            full_name = f"state.{key}.{name}"
            if "." in str(name):
                raise ValueError(f"safetensors cannot hold {full_name}: the name of a state must have no dot")
            if isinstance(value, (int, float)):
                value = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
            if type(value) not in (Tensor, torch.nn.Parameter):
                raise TypeError(f"safetensors cannot hold {full_name} of type {type(value).__name__}")
            value = value.detach().contiguous()
            storage = value.untyped_storage()
            if storage.data_ptr() in storages or storage.nbytes() != value.nbytes:
                value = value.clone()  # a file holds no shared memory
            storages.add(value.untyped_storage().data_ptr())
            tensors[full_name] = value
    try:
        groups = json.dumps([_plain(group) for group in state_dict["param_groups"]], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"safetensors cannot hold an option of the param groups: {error}") from None
    metadata = {"format": "pt", "param_groups": groups}
    _replace(Path(path), lambda temporary: safetensors.torch.save_file(tensors, temporary, metadata=metadata))


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise ModuleNotFoundError("files of safetensors need that package: pip install safetensors") from None
    return safetensors


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The optimizer state dict that `save_safetensors` has written, on the CPU. Needs the package safetensors.

    Raises:
        ValueError: the file is damaged, or holds something else.
        OSError: it cannot be read.
    """
    safetensors = _safetensors()
    with open(path, "rb"):  # a missing file is an OSError that names it
        pass
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} could not be read: {error}") from None
    if "param_groups" not in metadata:
        raise ValueError(f"{path} holds no optimizer state: its metadata has no param_groups")
    try:
        groups = json.loads(metadata["param_groups"])
        for group in groups:
            if isinstance(group.get("betas"), list):
                group["betas"] = tuple(group["betas"])
        keys = {str(key): key for group in groups for key in group["params"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path}: the param_groups in its metadata are damaged") from None
    states: dict[Any, dict[str, Any]] = {}
    for full_name, tensor in tensors.items():
        prefix, _, rest = full_name.partition(".")
        key, _, name = rest.rpartition(".")
        if prefix != "state" or not key:
            raise ValueError(f"{path} holds {full_name}, which is no optimizer state")
        is_number = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
        states.setdefault(keys.get(key, key), {})[name] = tensor.item() if is_number else tensor
    return {"state": states, "param_groups": groups}


def _plain(x: Any) -> Any:
    """Options as JSON has them: numbers for tensors, lists for tuples."""
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 else x


def _replace(path: Path, write_to: Callable[[str], None]) -> None:
    """Have a file written beside `path`, and rename it to `path` once it is on the disk."""
    path = path.resolve()  # a link stays a link
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} does not exist")
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    try:
        write_to(temporary)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- optimizer states within a file -----------------------------------------------------------------------------------


def _replaced(content: Any, old: Any, new: Any, depth: int = DEPTH) -> Any:
    """A copy of nested containers with one object in them replaced; containers without it stay the same objects."""
    if content is old:
        return new
    if not depth:
        return content
    if isinstance(content, Mapping):
        items = {key: _replaced(value, old, new, depth - 1) for key, value in content.items()}
        if all(items[key] is value for key, value in content.items()):
            return content
        result = copy.copy(content)
        result.update(items)  # type: ignore[attr-defined]
        return result
    if isinstance(content, (list, tuple)):
        values = [_replaced(value, old, new, depth - 1) for value in content]
        return content if all(a is b for a, b in zip(values, content, strict=True)) else type(content)(values)
    return content


def _elements(state_dict: Mapping[str, Any]) -> int:
    """About how many elements the parameters have; what is malformed is found later."""
    total = 0
    for state in state_dict["state"].values():
        if isinstance(state, Mapping):
            try:
                total += foreign.example(state).numel()
            except ValueError:
                continue
    return total
