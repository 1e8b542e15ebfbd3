"""Load a saved optimizer state, of fused8 or of another library: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import convert, foreign, options
from . import state as state_of
from .foreign import FUSED8
from .sharding import local
from .sources import require_readable

CORRECTION = "param_correction"
_DECIDE_FORMAT = ("codec", "block_size", "master_bits")


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


class Load:
    """One call of load_state_dict: `prepare` is its hook before anything is changed, `report` what it converted."""

    def __init__(self) -> None:
        self.report = convert.Report()

    def prepare(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check a state dict against the optimizer; a copy of it in the optimizer's formats, each tensor in a box."""
        convert.check_structure(state_dict)
        groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
        if len(groups) != len(saved_groups):
            raise ValueError(
                f"the saved state has {len(saved_groups)} param groups, the optimizer {len(groups)}. Nothing was loaded"
            )
        self.report.origin = foreign.origin_of(state_dict)
        result = state_dict | {"state": dict(state_dict["state"]), "param_groups": []}
        for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
            if len(group["params"]) != len(saved["params"]):
                raise ValueError(
                    f"param group {number} has {len(saved['params'])} parameters in the saved state and "
                    f"{len(group['params'])} in the optimizer. Nothing was loaded"
                )
            where = f"param group {number} of the saved state"
            merged = self._merged(optimizer.defaults, group, saved)
            convert.check_group(merged, where)
            as_saved = merged | {name: saved[name] for name in _DECIDE_FORMAT if name in saved}
            convert.check_group(as_saved, where)
            result["param_groups"].append(merged)
            for i, (p, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
                existing = optimizer.state.get(p, {}).get(CORRECTION)
                if own := state_dict["state"].get(key):
                    try:
                        result["state"][key] = self._state(own, p, merged, as_saved, existing)
                    except ValueError as error:
                        name = options.parameter_name(group, number, i)
                        raise ValueError(f"the saved state of {name} {error}. Nothing was loaded") from None
                elif existing is not None and state_of.correction_bits(p.dtype, merged):  # the weight has it still
                    fresh = state_of.allocate(p, merged) | {CORRECTION: existing.clone()}
                    result["state"][key] = {name: Box(tensor) for name, tensor in fresh.items()}
            self._note_options(group, saved, merged)
        return result

    def _merged(
        self, defaults: Mapping[str, Any], group: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The options of a group after loading: what the file says, else what the optimizer has."""
        adapted = foreign.adapted_group(saved, self.report.origin, group)
        missing: Mapping[str, Any] = defaults
        if self.report.origin != FUSED8:  # a foreign file lacks many options: those set for this group stay
            missing = {name: group[name] for name in defaults}
        return {**missing, **adapted, **{name: group[name] for name in options.OWN_OPTIONS}}

    def _state(
        self,
        saved: Mapping[str, Any],
        p: Tensor,
        group: Mapping[str, Any],
        as_saved: Mapping[str, Any],
        existing: Tensor | None,
    ) -> dict[str, Box]:
        saved, correction = dict(saved), None
        if CORRECTION in saved:
            correction = saved.pop(CORRECTION)
            if isinstance(correction, Mapping) and not correction:
                correction = None  # so torch fills in what a flattened state does not have
        source = foreign.source_of(saved, p, {**as_saved, "master_bits": None})
        converted = convert.own_state(source, p, group, state_of.device_of(p, group))
        self.report.add(source, foreign.in_words(state_of.codec_of_parameter(p, group), group["block_size"]), converted)
        own = converted.tensors
        spec = state_of.specs_of_parameter(p, group).get(CORRECTION)
        if spec is not None:
            if correction is not None and as_saved["master_bits"] != group["master_bits"]:
                raise ValueError(
                    f"has {CORRECTION} for master_bits={as_saved['master_bits']}, and the optimizer has "
                    f"{group['master_bits']}"
                )
            kept = existing if correction is None else correction
            own[CORRECTION] = _checked_correction(kept, p, spec).to(state_of.device_of(p, group))
        elif p.dtype != torch.float32 and (correction is not None or as_saved["master_bits"] is not None):
            # torch.distributed.checkpoint reads only what this optimizer has: of the bits it leaves the option alone.
            self.report.lost["the extra mantissa bits of parameters, since the optimizer has no master_bits"] = None
        if group["capturable"]:
            own["step"] = own["step"].to(p.device)
        return {name: Box(tensor) for name, tensor in own.items()}

    def _note_options(self, group: Mapping[str, Any], saved: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
        """Take down what a foreign file changes, or leaves open, that a user may not expect."""
        if self.report.origin == FUSED8:
            return
        notes = self.report.notes
        decoupled = merged["decoupled_weight_decay"]
        kind = "decoupled" if decoupled else "added to the gradient (L2)"
        if merged["weight_decay"] and decoupled != group["decoupled_weight_decay"]:
            notes[f"Weight decay is {kind}, as in the file"] = None
        elif (
            merged["weight_decay"]
            and self.report.origin != foreign.BITSANDBYTES
            and "decoupled_weight_decay" not in saved
        ):
            notes[f"The file does not say whether its weight decay was decoupled; here it is {kind}"] = None
        for name in ("amsgrad", "maximize"):
            if merged[name] != group[name]:
                notes[f"{name} is {'on' if merged[name] else 'off'}, as in the file"] = None


def _checked_correction(correction: Any, p: Tensor, spec: state_of.TensorSpec) -> Tensor:
    """The saved extra mantissa bits of a parameter, copied; none were saved: the parameter is exact as it is."""
    if correction is None:
        return torch.zeros_like(p, dtype=spec.dtype, memory_format=torch.contiguous_format)
    if isinstance(correction, Tensor):
        require_readable(CORRECTION, local(correction))
    if not isinstance(correction, Tensor) or correction.dtype != spec.dtype or tuple(correction.shape) != spec.shape:
        found = f"{correction.dtype}, {tuple(correction.shape)}" if isinstance(correction, Tensor) else type(correction)
        raise ValueError(
            f"has {CORRECTION} of {found}, expected {spec.dtype}, {spec.shape}: it belongs to a parameter of another "
            "dtype, or to other master_bits (int8 are 8 bits more than the parameter has, int16 are 16)"
        )
    return correction.detach().to(p.device, copy=True).contiguous()
