"""Find the parameters that take part in a step, check them, and keep the plan of the last step while it holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import backends, offload, options, sharding
from . import state as state_of
from .formats import CORRECTION_DTYPES, FORMATS
from .step_plan import STEP_LIMIT, BucketKey, Entry, StepPlan

PARAM_DTYPES = (torch.float32, *FORMATS)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Planner:
    """Plans the steps of one optimizer, of all its parameters or of a single one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._reference = weakref.ref(optimizer)  # which owns this: its state should go with it, not with a cycle
        self._plans: dict[Tensor | None, tuple[list[tuple], StepPlan]] = {}
        self._places: dict[Tensor, tuple[int, int]] = {}  # of parameters: group number, position in it
        self._frozen: dict[int, tuple] = {}
        for number, group in enumerate(optimizer.param_groups):
            if any(optimizer.state.get(p) for p in group["params"]):
                self._frozen[number] = options.select(group, options.FROZEN_OPTIONS)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def plan(self, count_on_device: bool, only: Tensor | None = None) -> StepPlan:
        """The plan of the next step, of the one parameter `only` if it is given.

        `count_on_device` moves the step counters of parameters on an accelerator there.

        Raises:
            TypeError, ValueError, RuntimeError: before any state is changed.
        """
        current_options = [options.select(group, options.PLAN_OPTIONS) for group in self._groups(only)]
        known_options, plan = self._plans.get(only, (None, None))
        if plan is None or current_options != known_options or not self._holds(plan, count_on_device, only):
            plan = self._build(count_on_device, only)
            self._plans[only] = (current_options, plan)
        return plan

    def _participants(self, only: Tensor | None) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Group number, position, parameter and gradient of each parameter that has a gradient."""
        if only is not None:
            if only.grad is not None:
                yield *self.place(only), only, only.grad
            return
        for number, group in enumerate(self._optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    yield number, i, p, p.grad

    def place(self, p: Tensor) -> tuple[int, int]:
        """The group number of a parameter, and its position in the group."""
        groups = self._optimizer.param_groups
        number, i = self._places.get(p, (0, -1))
        if number >= len(groups) or not 0 <= i < len(groups[number]["params"]) or groups[number]["params"][i] is not p:
            self._places = {p: (n, i) for n, group in enumerate(groups) for i, p in enumerate(group["params"])}
            number, i = self._places[p]
        return number, i

    def _groups(self, only: Tensor | None) -> list[dict[str, Any]]:
        """The groups of all parameters, or of the one parameter."""
        groups = self._optimizer.param_groups
        return groups if only is None else [groups[self.place(only)[0]]]

    def _holds(self, plan: StepPlan, count_on_device: bool, only: Tensor | None) -> bool:
        if count_on_device and any(counters.packed.device.type == "cpu" for counters in plan.counters):
            on_cpu = (entry for entry in plan.entries if entry.state["step"].device.type == "cpu")
            if any(entry.p.device.type != "cpu" for entry in on_cpu):
                return False
        entries, n, i = plan.entries, len(plan.entries), 0
        state = self._optimizer.state
        for number, _, p, grad in self._participants(only):
            if i == n or not entries[i].holds(p, grad, number, state.get(p)):
                return False
            i += 1
        return i == n

    def _build(self, count_on_device: bool, only: Tensor | None) -> StepPlan:
        """Check everything, then allocate the state that is missing."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        for number, group in enumerate(groups):
            if only is None or number == self.place(only)[0]:
                options.check(group, f"param group {number}")
        entries: list[Entry] = []
        keys: list[BucketKey] = []
        frozen = dict(self._frozen)
        seen: set[Tensor] = set()
        for number, i, p, grad in self._participants(only):
            if p in seen:
                continue
            seen.add(p)
            group = groups[number]
            name = options.parameter_name(group, number, i)
            check_param(p, group, name)
            _check_grad(grad, p, name)
            current = options.select(group, options.FROZEN_OPTIONS)
            if frozen.setdefault(number, current) != current:
                raise ValueError(options.describe_changes(number, frozen[number], current))
            own = state.get(p) or {}
            if own:
                own = _checked_state(own, p, group, name)
            device = state_of.device_of(p, group)
            on_device = group["capturable"] or (device.type != "cpu" and count_on_device)
            on_device |= bool(own) and own["step"].device.type != "cpu"
            entry = Entry(p, grad, number, own)
            key = BucketKey(
                group["backend"],
                device,
                p.dtype,
                entry.grad_dtype,
                state_of.codec_of_parameter(p, group),
                group["block_size"],
                group["decoupled_weight_decay"],
                group["maximize"],
                group["amsgrad"],
                state_of.correction_bits(p.dtype, group),
                options.rounds_stochastically(p.dtype, group),
                on_device,
                None if group["offload"] is None else p.device,
                None if entry.contiguous or group["offload"] is not None else len(entries),
            )
            backends.select(key.device, key.backend)
            keys.append(key)
            entries.append(entry)
        for entry in entries:
            if not entry.state:
                entry.state = state_of.allocate(entry.p, groups[entry.group])
        plan = StepPlan(entries, keys)
        for entry in entries:
            state[entry.p] = entry.state
        self._frozen = frozen
        return plan


def _checked_state(own: dict[str, Any], p: Tensor, group: dict[str, Any], name: str) -> dict[str, Any]:
    if message := state_of.structural_error(own, p, group):
        first = own.get("exp_avg")
        if isinstance(first, Tensor) and first.shape != p.shape:
            message = f"has shape {tuple(first.shape)}, and the parameter {tuple(p.shape)}: make a new optimizer for it"
        elif "param_correction" in message or "dtype" in message:
            message += (
                ". If the model was converted to another dtype after the first step: take optimizer.master_state_dict "
                "before that, and make a new optimizer after it"
            )
        raise ValueError(f"the state of {name} {message}")
    if not isinstance(own["step"], Tensor):
        own = own | {"step": torch.tensor(float(own["step"]), device="cpu")}
    if own["step"].device.type == "cpu" and float(own["step"]) >= state_of.MAX_STEP:
        raise RuntimeError(STEP_LIMIT)
    device = state_of.device_of(p, group)
    for tensor_name, tensor in own.items():
        if tensor_name != "step" and tensor.device != device:
            raise RuntimeError(
                f"{tensor_name} of {name} is on {tensor.device} and should be on {device}: move the model before the "
                "first step, or load the state again after moving it"
            )
    return own


def check_param(p: Tensor, group: dict[str, Any], name: str) -> None:
    """Raise TypeError or ValueError if the parameter cannot be updated with the options of its group."""
    if p.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"{name} has dtype {p.dtype}: fused8 updates parameters of float32, bfloat16, float16, float8_e4m3fn and "
            "float8_e5m2. Convert it, or give it to an optimizer of torch.optim"
        )
    if p.layout is not torch.strided:
        raise TypeError(f"{name} has layout {p.layout}: fused8 updates dense parameters")
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        raise TypeError(f"{name} is an expanded tensor, whose elements share memory: make it contiguous()")
    if message := sharding.refusal(p) or (group["offload"] and offload.refusal(p)):
        raise TypeError(f"{name} {message}")
    if group["master_bits"] is not None and p.dtype != torch.float32:
        extra = group["master_bits"] - 8 * p.dtype.itemsize
        if extra not in CORRECTION_DTYPES:
            possible = [8 * p.dtype.itemsize + bits for bits in CORRECTION_DTYPES]
            raise ValueError(
                f"{name} has dtype {p.dtype}, which master_bits={group['master_bits']} does not fit: it can have "
                f"{' or '.join(map(str, possible))}"
            )


def _check_grad(grad: Tensor, p: Tensor, name: str) -> None:
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name} is sparse ({grad.layout}): fused8 takes dense gradients. Use sparse=False in the "
            "embedding, or torch.optim.SparseAdam for this parameter"
        )
    if grad.dtype not in GRAD_DTYPES and grad.dtype != p.dtype:
        raise TypeError(f"the gradient of {name} has dtype {grad.dtype}: fused8 takes float32, bfloat16 and float16")
