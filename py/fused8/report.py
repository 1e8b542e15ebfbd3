"""How many bytes an optimizer holds, measured from its tensors or from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .convert import check_structure
from .files import load_file, optimizer_states, safetensors_header
from .sizes import dtype_name, held_bytes, mib, per_parameter, pieces
from .tables import Table, Tabular

LARGEST = 10  # parameters that a report names


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
class MemoryReport(Tabular):
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
            return [[name, f"{size:,}", mib(size), per_parameter(size, self.parameters)] for name, size in ordered]

        around = {
            name: size for name, size in (("weights", self.weights), ("gradients", self.gradients)) if size is not None
        }
        whole = {"weights, gradients and state": self.state + sum(around.values())} if around else {}
        without = sum(group.without_state for group in self.groups)
        note = f"; {without} parameters have no state (yet)" if without else ""
        if self.steps:
            fewest, most = self.steps
            some = f" (some after {fewest})" if fewest != most else ""
            note = f" after {most} {'step' if most == 1 else 'steps'}{some}{note}"
        tables = [
            Table(
                f"{self.optimizer}, state of {self.parameters:,} parameters{note}",
                header,
                rows(self.by_name) + rows({"state": self.state}) + rows(around) + rows(whole),
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
                        per_parameter(group.state, group.parameters),
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
        names = group.get("param_names") or []
        if len(names) != len(group["params"]):  # others put flat parameters into a group, as DeepSpeed does
            names = [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
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
    return MemoryReport(**report, weights=sum(map(held_bytes, unique)), gradients=sum(map(held_bytes, gradients)))


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
    found = {place: _report_of(content) for place, content in optimizer_states(load_file(path)).items()}
    if not found:
        raise ValueError(f"{path} holds no optimizer state (a dict with state and param_groups)")
    return found


class _Owned(NamedTuple):
    name: str
    shape: tuple[int, ...] | None
    state: Any


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
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path} holds no optimizer state: `fused8 estimate` reads weights") from None
    return {"state": state, "param_groups": groups}


def _report_of(content: Mapping[str, Any]) -> MemoryReport:
    try:
        check_structure(content)
    except TypeError as error:
        raise ValueError(str(error)) from None
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
                for dtype, nbytes in pieces(tensor):
                    size += nbytes
                    by_name[name] = by_name.get(name, 0) + nbytes
                    by_dtype[dtype_name(dtype)] = by_dtype.get(dtype_name(dtype), 0) + nbytes
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
        if step.numel() != 1 or step.device.type != "cpu" or step.is_complex():
            return None
        step = step.item()
    return int(step) if isinstance(step, (int, float)) and math.isfinite(step) else None


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


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
