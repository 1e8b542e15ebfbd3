"""Check a saved optimizer state against the optimizer that loads it, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import options
from . import state as state_of
from .codecs import CODECS


class Box:
    """Carries a tensor through torch's load_state_dict, which would cast it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def unbox(optimizer: torch.optim.Optimizer) -> None:
    for own in optimizer.state.values():
        for name, value in own.items():
            if isinstance(value, Box):
                own[name] = value.tensor


def checked_and_boxed(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check a state dict against the optimizer; a copy of it, each state tensor copied to its device and boxed."""
    for name in ("state", "param_groups"):
        if name not in state_dict:
            raise ValueError(f"this is no optimizer state: it has no {name!r}")
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved_groups):
        raise ValueError(f"the saved state has {len(saved_groups)} param groups, the optimizer {len(groups)}")
    result = state_dict | {"state": dict(state_dict["state"]), "param_groups": []}
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"param group {number} has {len(saved['params'])} parameters in the saved state and "
                f"{len(group['params'])} in the optimizer"
            )
        merged = optimizer.defaults | saved | {name: group[name] for name in options.OWN_OPTIONS}
        options.check(merged, f"param group {number} of the saved state")
        if merged["state_format"] != state_of.STATE_FORMAT:
            raise ValueError(f"the saved state has format {merged['state_format']}, which this version cannot read")
        result["param_groups"].append(merged)
        for i, (p, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            own = state_dict["state"].get(key)
            if own:
                name = options.parameter_name(group, number, i)
                result["state"][key] = _checked_state(own, p, merged, saved, name)
    return result


def _checked_state(
    own: Mapping[str, Any], p: Tensor, group: Mapping[str, Any], saved: Mapping[str, Any], name: str
) -> dict[str, Box]:
    if state_of.codec_of_parameter(p, group) in CODECS:
        for option in ("codec", "block_size"):
            if saved.get(option, group[option]) != group[option]:
                raise ValueError(
                    f"the saved state of {name} has {option} {saved[option]!r}, the optimizer {group[option]!r}: make "
                    f"the optimizer with {option}={saved[option]!r}. Nothing was loaded"
                )
    message = state_of.structural_error(own, p, group) or state_of.value_error(own, p, group)
    if message:
        raise ValueError(f"the saved state of {name} {message}. Nothing was loaded")
    boxes = {}
    for tensor_name, value in own.items():
        if tensor_name == "step":
            tensor = torch.as_tensor(value, dtype=torch.float32).reshape(())
            device = p.device if group["capturable"] else torch.device("cpu")
        else:
            tensor, device = value, p.device
        boxes[tensor_name] = Box(tensor.detach().to(device, copy=True).contiguous())
    return boxes
