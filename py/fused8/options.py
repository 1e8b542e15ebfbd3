"""The options of a param group: which there are, what each may be, and the numbers that the step takes from them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends
from .codecs import CODECS
from .state import BLOCK_SIZES, STATE_FORMAT
from .step_plan import Hyperparameters

# The defaults of the optimizers but for the numbers of Adam, which a file of another library has too.
DEFAULTS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
    "capturable": False,
    "codec": "adaptive",
    "block_size": 256,
    "min_8bit_size": 4096,
    "state_bits": 8,
    "param_rounding": None,
    "rounding_seed": 0,
    "master_bits": None,
    "max_grad_norm": None,
    "offload": None,
    "backend": None,
    "state_format": STATE_FORMAT,
}

# What other optimizers take and these do not, with what to do.
UNSUPPORTED = {
    "optim_bits": "for 32-bit state put `state_bits: 32` into a param group",
    "args": "it has no counterpart",
    "is_paged": "the state is a quarter of the size and is not paged",
    "percentile_clipping": "clip with torch.nn.utils.clip_grad_norm_",
    "block_wise": "state is always blockwise; `block_size` sets the block",
    "foreach": "every step is one fused launch per bucket of tensors",
    "fused": "every step is fused",
    "differentiable": "the step is not differentiable; use torch.optim",
}

# Of these, what may stand in a param group: torch writes it into its own, and it only asks for speed.
HARMLESS = ("foreach", "fused")

# Options that decide what a state tensor means: fixed once a group has state.
FROZEN_OPTIONS = ("codec", "block_size", "min_8bit_size", "state_bits", "amsgrad", "master_bits", "offload")
# Options that stay the optimizer's own when a state is loaded: the frozen ones that a file cannot change by itself,
# and those that belong to a machine.
OWN_OPTIONS = (
    "codec", "block_size", "min_8bit_size", "state_bits", "master_bits", "offload", "max_grad_norm", "backend"
)  # fmt: skip
# Options that decide how tensors are grouped and served.
PLAN_OPTIONS = (*FROZEN_OPTIONS, "maximize", "decoupled_weight_decay", "capturable", "param_rounding", "backend")


def parameters(groups: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    """The parameters of all groups."""
    return (p for group in groups for p in group["params"])


def select(group: Mapping[str, Any], names: tuple[str, ...]) -> tuple:
    return tuple(group[name] for name in names)


def parameter_name(group: Mapping[str, Any], number: int, i: int) -> str:
    names = group.get("param_names")
    return f"parameter {i} of group {number}" + (f" ({names[i]})" if names else "")


def describe_changes(number: int, before: tuple, now: tuple) -> str:
    changes = [
        f"{name} from {old!r} to {new!r}"
        for name, old, new in zip(FROZEN_OPTIONS, before, now, strict=True)
        if old != new
    ]
    return f"param group {number} has state and cannot change {', '.join(changes)}: make a new optimizer instead"


def meant(name: str, known: Iterable[str]) -> str | None:
    """Which of the known names a misspelt one may stand for. `weight_decay_mult` is a name of its own, and so are
    short ones, such as Rprop's `etas`."""
    of_a_length = [other for other in known if abs(len(other) - len(name)) <= 2 and len(name) > 5]
    return next(iter(difflib.get_close_matches(name, of_a_length, n=1, cutoff=0.8)), None)


def check_names(group: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    """Raise TypeError for an option that does not exist. Schedulers, wrappers and users keep entries of their own in
    groups, so a name counts as an option if other optimizers have it or if it looks like one of ours."""
    for name, value in group.items():
        if name in defaults or name == "params" or not isinstance(name, str):
            continue
        if name in UNSUPPORTED and name not in HARMLESS and value is not None and value is not False:
            raise TypeError(f"{where} has {name}, which fused8 does not take: {UNSUPPORTED[name]}")
        if (close := meant(name, defaults)) is not None and close not in group:
            raise TypeError(f"{where} has {name}, which is no option: did you mean {close}?")


def shown(value: Any) -> str:
    """A value in a message: on one line, and not long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of thousands of digits
        return "a number that is too long to show"
    return text if len(text) <= 100 else text[:97] + "..."


def check(group: Mapping[str, Any], where: str) -> None:
    """Raise ValueError or TypeError for an option that is out of range."""

    def require(good: bool, name: str, what: str) -> None:
        if not good:
            raise ValueError(f"{where}: {name} must be {what}, got {shown(group[name])}")

    lr = group["lr"]
    if isinstance(lr, Tensor):
        require(lr.numel() == 1, "lr", "a float or a tensor of one element")
        if lr.device.type != "cpu":
            require(group["capturable"], "lr", "a float or a CPU tensor unless capturable=True")
    else:
        require(_is_number(lr) and 0 <= lr < math.inf, "lr", "a finite number >= 0")
    betas = group["betas"]
    require(isinstance(betas, (tuple, list)) and len(betas) == 2, "betas", "two numbers")
    require(all(_is_number(beta) and 0 <= beta < 1 for beta in betas), "betas", "two numbers in [0, 1)")
    require(_is_number(group["eps"]) and 0 <= group["eps"] < math.inf, "eps", "a finite number >= 0")
    require(
        _is_number(group["weight_decay"]) and 0 <= group["weight_decay"] < math.inf,
        "weight_decay",
        "a finite number >= 0",
    )
    for name in ("amsgrad", "maximize", "decoupled_weight_decay", "capturable"):
        require(isinstance(group[name], bool), name, "True or False")
    codec, block_size = group["codec"], group["block_size"]
    require(isinstance(codec, str) and codec in CODECS, "codec", f"one of {', '.join(CODECS)}")
    require(isinstance(block_size, int) and block_size in BLOCK_SIZES, "block_size", f"one of {BLOCK_SIZES}")
    min_8bit_size = group["min_8bit_size"]
    require(isinstance(min_8bit_size, int) and min_8bit_size >= 0, "min_8bit_size", "an integer >= 0")
    state_bits, backend = group["state_bits"], group["backend"]
    require(isinstance(state_bits, int) and state_bits in (8, 32), "state_bits", "8 or 32")
    require(group["param_rounding"] in (None, "nearest", "stochastic"), "param_rounding", "None, nearest or stochastic")
    seed = group["rounding_seed"]
    require(isinstance(seed, int) and not isinstance(seed, bool), "rounding_seed", "an integer")
    require(group["master_bits"] in (None, 16, 24, 32), "master_bits", "None, 16, 24 or 32")
    limit = group["max_grad_norm"]
    valid = limit is None or (_is_number(limit) and not isinstance(limit, Tensor) and 0 < limit < math.inf)
    require(valid, "max_grad_norm", "None or a number > 0")
    require(group["offload"] in (None, "cpu"), "offload", "None or cpu")
    require(group["offload"] is None or not group["capturable"], "offload", "None with capturable=True")
    require(
        backend is None or (isinstance(backend, str) and backend in backends.BACKENDS),
        "backend",
        f"None or one of {', '.join(backends.BACKENDS)}",
    )


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1 and x.device.type == "cpu"
    if isinstance(x, int):
        return not isinstance(x, bool) and abs(x) < 2**1023  # beyond, a float cannot hold it
    return isinstance(x, float)


def _as_float(x: Any) -> float:
    """NaN, which is in no range, for what is no number."""
    try:
        return float(x)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several elements
        return math.nan


def hyperparameters(group: Mapping[str, Any], number: int) -> Hyperparameters:
    """The numbers of a group as they are now. Schedules, and whoever else writes into groups, may have run off."""
    lr = group["lr"]
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        lr = _as_float(lr)
        if not 0 <= lr < math.inf:
            raise ValueError(f"param group {number}: lr must be a finite number >= 0, got {shown(group['lr'])}")
    betas, seed = group["betas"], group["rounding_seed"]
    beta1, beta2 = map(_as_float, betas) if isinstance(betas, (tuple, list)) and len(betas) == 2 else (math.nan,) * 2
    eps, weight_decay = _as_float(group["eps"]), _as_float(group["weight_decay"])
    if not (
        0 <= beta1 < 1
        and 0 <= beta2 < 1
        and 0 <= eps < math.inf
        and 0 <= weight_decay < math.inf
        and isinstance(seed, int)
    ):
        check(group, f"param group {number}")
    return Hyperparameters(lr, beta1, beta2, eps, weight_decay, group["decoupled_weight_decay"], seed)


def rounds_stochastically(dtype: torch.dtype, group: Mapping[str, Any]) -> bool:
    if dtype == torch.float32:
        return False
    if group["param_rounding"] is None:
        return dtype.itemsize == 1 and group["master_bits"] is None
    return group["param_rounding"] == "stochastic"


def max_grad_norm(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The one limit of all groups: the norm is taken over all of them together."""
    limits = {group["max_grad_norm"] for group in groups}
    if len(limits) > 1:
        raise ValueError(f"max_grad_norm is one number for all param groups, got {sorted(map(str, limits))}")
    limit = limits.pop() if limits else None
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"max_grad_norm must be None or a number > 0, got {shown(limit)}")
    return limit
