"""Plan a step: which tensors share a launch, and the scalars that the launch reads. Knows no kernel.

A plan is built once and used while nothing changes: the parameters that have gradients, the dtypes, the state tensors.
Tensors that can share a launch form a bucket. Hyperparameters and step counts never split one: they stand in a table
with one row of scalars per distinct (param group, step), and each tensor names its row.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codecs import time_offset
from .formats import rounding_key, rounding_keys
from .sharding import is_dtensor, local, local_grad, shard_of
from .state import MAX_STEP

SMALLEST_EPS = 2.0**-64  # eps is raised to it, so that 0 / 0 cannot occur
STEP_LIMIT = "the optimizer has made 2^24 steps; a float32 step counter cannot count further"

# One FP32 row of scalars per distinct (param group, step). Every kernel reads the same columns. The columns
# from `time_offset` on hold the 32 bits of an integer, not a float value.
SCALAR_COLUMNS = (
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "eps",
    "step_size",
    "inv_bias_correction2_sqrt",
    "decay",
    "weight_decay",
    "time_offset",
    "rounding_key",
)
SCALAR_WIDTH = 16  # columns per row, the rest zero: 64 bytes, one cache line
FIRST_INTEGER_COLUMN = SCALAR_COLUMNS.index("time_offset")

# One int64 row per tensor: its row of scalars, and where its elements lie in the global parameter.
TABLE_COLUMNS = ("scalar_row", "row0", "col0", "global_inner")


class Hyperparameters(NamedTuple):
    """The numbers of a param group, in double precision. `lr` may be a 0-dim tensor on the device path."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    rounding_seed: int = 0


def scalar_row(h: Hyperparameters, step: int) -> list[float]:
    """The scalars of one (group, step) in float64; `step` is 1 at the first step. The last two are integers."""
    lr = float(h.lr)
    return [
        h.beta1,
        1 - h.beta1,
        h.beta2,
        1 - h.beta2,
        max(h.eps, SMALLEST_EPS),
        lr / (1 - h.beta1**step),
        1 / math.sqrt(1 - h.beta2**step),
        1 - lr * h.weight_decay if h.decoupled_weight_decay else 1.0,
        0.0 if h.decoupled_weight_decay else h.weight_decay,
        time_offset(step),
        rounding_key(h.rounding_seed, step),
    ]


def scalar_table(rows: Sequence[list[float]]) -> Tensor:
    """Rows of `scalar_row` -> float32 [rows, SCALAR_WIDTH], each scalar rounded once."""
    padding = [0] * (SCALAR_WIDTH - len(SCALAR_COLUMNS))
    data = bytearray()  # in a fifth of the time that operations of torch take
    for row in rows:
        data += array("f", row[:FIRST_INTEGER_COLUMN]).tobytes()
        data += array("I", [*row[FIRST_INTEGER_COLUMN:], *padding]).tobytes()
    return torch.frombuffer(data, dtype=torch.float32).view(len(rows), SCALAR_WIDTH)


@functools.lru_cache(maxsize=8)  # stepped in backward, all parameters of a step ask for the same
def _table_of(rows: tuple[tuple[Hyperparameters, int], ...]) -> Tensor:
    return scalar_table([scalar_row(h, step) for h, step in rows])


def fill_scalar_table(table: Tensor, h: Hyperparameters, step: Tensor) -> None:
    """Write the scalars of tensors of one group into `table` [n, SCALAR_WIDTH] without leaving the device.

    `step` (float32, [n]) counts from 1. Same formulas as `scalar_row`, in float64; a device's own pow may differ in
    the last bit of a double, which the rounding to FP32 nearly always hides.
    """
    steps = step.double()
    bias_correction1 = 1 - torch.pow(h.beta1, steps)
    bias_correction2 = 1 - torch.pow(h.beta2, steps)
    lr = h.lr.double() if isinstance(h.lr, Tensor) else torch.full_like(steps, h.lr)
    columns: dict[str, float | Tensor] = {
        "beta1": h.beta1,
        "one_minus_beta1": 1 - h.beta1,
        "beta2": h.beta2,
        "one_minus_beta2": 1 - h.beta2,
        "eps": max(h.eps, SMALLEST_EPS),
        "step_size": lr / bias_correction1,
        "inv_bias_correction2_sqrt": torch.ones_like(steps) / bias_correction2.sqrt(),
        "decay": 1 - lr * h.weight_decay if h.decoupled_weight_decay else 1.0,
        "weight_decay": 0.0 if h.decoupled_weight_decay else h.weight_decay,
    }
    for name, value in columns.items():
        column = table[:, SCALAR_COLUMNS.index(name)]
        column.copy_(value) if isinstance(value, Tensor) else column.fill_(value)
    whole_steps = step.to(torch.int64)
    offsets = (whole_steps * time_offset(1)) & 0xFFFFFFFF
    for i, column in enumerate((offsets, rounding_keys(h.rounding_seed, whole_steps))):
        table.view(torch.int32)[:, FIRST_INTEGER_COLUMN + i] = column.to(torch.int32)


def kernel_dtype(grad_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a gradient reaches the kernel. FP8 gradients are those of tools that make zeros like the
    parameter, to have a state made."""
    return torch.float32 if grad_dtype.itemsize == 1 else grad_dtype


class BucketKey(NamedTuple):
    """What tensors must have in common to be stepped by one launch."""

    backend: str | None
    device: torch.device
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    codec: str
    block_size: int
    decoupled_weight_decay: bool
    maximize: bool
    amsgrad: bool
    correction_bits: int
    stochastic_rounding: bool
    steps_on_device: bool
    offload_from: torch.device | None
    """The device of parameters whose state is on another one, `device`, where the step is made; otherwise None."""
    solo: int | None
    """The position of a tensor that needs a contiguous temporary, and so goes alone; otherwise None."""


class Entry:
    """One parameter that takes part in the step, with all that the plan relies on."""

    __slots__ = (
        "contiguous", "device", "dtype", "grad_dtype", "group", "is_dtensor", "p", "shape", "state", "tensor_ids",
        "tensors",
    )  # fmt: skip

    def __init__(self, p: Tensor, grad: Tensor, group: int, state: dict[str, Any]) -> None:
        self.p = p
        self.group = group
        self.shape, self.dtype, self.device = p.shape, p.dtype, p.device
        self.grad_dtype = kernel_dtype(grad.dtype)
        self.is_dtensor = is_dtensor(p)
        self.contiguous = self._is_contiguous(grad)
        self.state = state

    def _is_contiguous(self, grad: Tensor) -> bool:
        if self.is_dtensor:
            return local(self.p).is_contiguous() and local(grad).is_contiguous()
        return self.p.is_contiguous() and grad.is_contiguous()

    def rely_on_state(self) -> None:
        self.tensors = list(self.state.values())  # kept alive, so that their ids stay theirs
        self.tensor_ids = [id(tensor) for tensor in self.tensors]

    def holds(self, p: Tensor, grad: Tensor, group: int, state: dict[str, Any] | None) -> bool:
        """Whether nothing that the plan relies on has changed. State tensors may be replaced by anyone."""
        return (
            self.p is p
            and self.group == group
            and state is not None
            and [*map(id, state.values())] == self.tensor_ids
            and self.dtype is p.dtype
            and self.device == p.device
            and self.grad_dtype is kernel_dtype(grad.dtype)
            and not grad.is_sparse
            and self.contiguous
            is (self._is_contiguous(grad) if self.is_dtensor else p.is_contiguous() and grad.is_contiguous())
            and self.shape == p.shape
        )


class StepCounters:
    """The step counters of some entries in one tensor [n], of which each entry's `step` is a 0-dim view.

    `on_device` counters are never read: their scalars are computed where they are, one row per entry. The others are
    on the CPU and share a row per (group, step).
    """

    def __init__(self, entries: list[Entry], device: torch.device, on_device: bool) -> None:
        self.on_device = on_device
        self.groups = [entry.group for entry in entries]
        self.packed = torch.stack([entry.state["step"].detach().to(device) for entry in entries])
        for entry, view in zip(entries, self.packed.unbind(), strict=True):
            entry.state["step"] = view
        self._distinct_groups = list(dict.fromkeys(self.groups))
        if on_device:
            self._rows_if_uniform = list(range(len(entries)))
        else:
            self._rows_if_uniform = [self._distinct_groups.index(group) for group in self.groups]

    def scalars(self, hyperparameters: Mapping[int, Hyperparameters]) -> tuple[Tensor, list[int]]:
        """The scalar table of the next step, and the row of each entry in it (the same list while it can be).
        `hyperparameters` has those of each group by its number.

        Raises:
            RuntimeError: a counter that can be read without waiting for a device is at its limit.
        """
        steps = self.packed.tolist() if self.packed.device.type == "cpu" else [0.0]
        if max(steps) >= MAX_STEP:
            raise RuntimeError(STEP_LIMIT)
        if self.on_device:
            return self._scalars_on_device(hyperparameters), self._rows_if_uniform
        if len(set(steps)) == 1:
            keys = [(group, int(steps[0]) + 1) for group in self._distinct_groups]
            rows_of_entries = self._rows_if_uniform
        else:
            rows: dict[tuple[int, int], int] = {}
            rows_of_entries = [
                rows.setdefault((group, int(step) + 1), len(rows))
                for group, step in zip(self.groups, steps, strict=True)
            ]
            keys = list(rows)
        return _table_of(tuple((hyperparameters[group], step) for group, step in keys)), rows_of_entries

    def _scalars_on_device(self, hyperparameters: Mapping[int, Hyperparameters]) -> Tensor:
        table = torch.zeros(len(self.groups), SCALAR_WIDTH, dtype=torch.float32, device=self.packed.device)
        next_steps = self.packed + 1
        start = 0
        for group in self._distinct_groups:  # entries come group by group
            end = start + self.groups.count(group)
            fill_scalar_table(table[start:end], hyperparameters[group], next_steps[start:end])
            start = end
        return table

    def advance(self, found_inf: Tensor | None) -> None:
        self.packed.add_(self._increment(found_inf))

    def take_back(self, slots: Sequence[int], found_inf: Tensor | None) -> None:
        """Undo `advance` for some entries."""
        self.packed[list(slots)] -= self._increment(found_inf)

    def _increment(self, found_inf: Tensor | None) -> float | Tensor:
        return 1.0 if found_inf is None else (found_inf.to(self.packed.device).reshape(()) == 0).float()


class Bucket:
    """Tensors that one launch serves."""

    STATE_NAMES = (
        "exp_avg",
        "exp_avg_sq",
        "exp_avg_scale",
        "exp_avg_sq_scale",
        "max_exp_avg_sq",
        "max_exp_avg_sq_scale",
        "param_correction",
    )

    def __init__(self, key: BucketKey, entries: list[Entry], counters: StepCounters, slots: list[int]) -> None:
        self.key = key
        self.counters = counters
        self.slots = slots  # positions of the entries among the counters
        self.params = [entry.p for entry in entries]
        self.states = [
            [local(entry.state[name]) for entry in entries] if name in entries[0].state else []
            for name in self.STATE_NAMES
        ]
        self.cache: dict[str, Any] = {}  # what a backend keeps for this bucket
        self._any_dtensor = any(entry.is_dtensor for entry in entries)
        self._shards = [shard_of(p, key.block_size) for p in self.params]
        self._rows_of_entries: list[int] | None = None
        self._table = torch.empty(0, device="cpu")

    def local_params(self) -> list[Tensor]:
        return [local(p) for p in self.params] if self._any_dtensor else self.params

    def local_grads(self) -> list[Tensor]:
        grads: list[Any] = [local_grad(p) if self._any_dtensor else p.grad for p in self.params]
        if self.key.param_dtype.itemsize == 1:
            grads = [grad.to(kernel_dtype(grad.dtype)) for grad in grads]
        return grads

    def table(self, rows_of_entries: list[int]) -> Tensor:
        """The int64 table [tensors, TABLE_COLUMNS], on the CPU; the same object while the rows stay the same."""
        if rows_of_entries is not self._rows_of_entries:
            self._rows_of_entries = rows_of_entries
            rows = [rows_of_entries[slot] for slot in self.slots]
            places = [
                [row, shard.row0, shard.col0, shard.global_inner] for row, shard in zip(rows, self._shards, strict=True)
            ]
            table = torch.tensor(places, device="cpu")
            if not torch.equal(table, self._table):
                self._table = table
        return self._table


class StepPlan:
    """All of one step: the entries, their step counters and their buckets.

    `keys` has one BucketKey per entry. Building a plan packs the step counters of the entries, whose states then hold
    views of the packed tensor; the values stay.
    """

    def __init__(self, entries: list[Entry], keys: list[BucketKey]) -> None:
        self.entries = entries
        places = [(key.device if key.steps_on_device else torch.device("cpu"), key.steps_on_device) for key in keys]
        self.counters: list[StepCounters] = []
        counters_of: dict[int, tuple[StepCounters, int]] = {}
        for (device, on_device), positions in _positions(places).items():
            counters = StepCounters([entries[i] for i in positions], device, on_device)
            self.counters.append(counters)
            counters_of.update({i: (counters, slot) for slot, i in enumerate(positions)})
        for entry in entries:
            entry.rely_on_state()
        self.buckets = [
            Bucket(
                key,
                [entries[i] for i in positions],
                counters_of[positions[0]][0],
                [counters_of[i][1] for i in positions],
            )
            for key, positions in _positions(keys).items()
        ]

    def scalars(self, hyperparameters: Mapping[int, Hyperparameters]) -> list[tuple[Tensor, Tensor]]:
        """The scalar table and the tensor table of each bucket."""
        tables = {id(counters): counters.scalars(hyperparameters) for counters in self.counters}
        result = []
        for bucket in self.buckets:
            scalars, rows_of_entries = tables[id(bucket.counters)]
            result.append((scalars, bucket.table(rows_of_entries)))
        return result


def _positions(keys: Sequence[Any]) -> dict[Any, list[int]]:
    """Positions of each distinct key, in order of first appearance."""
    positions: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        positions.setdefault(key, []).append(i)
    return positions
