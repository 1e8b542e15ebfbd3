"""The weights of a model in FP32 where the optimizer keeps more bits of them than the model does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import formats, options, sharding
from . import state as state_of

CHUNK_ELEMENTS = 1 << 20


def state_dict(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` with the parameters of the optimizer in FP32, the bits in `param_correction` included.

    A tied weight is one tensor under several names, as there.
    """
    ours = set(options.parameters(optimizer.param_groups))
    result: dict[str, Any] = {}
    masters: dict[Tensor, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            result[name] = value
        elif value in ours:
            if value not in masters:  # a tied weight has several names: one tensor for all, which a file holds once
                masters[value] = _in_float32(value, optimizer.state.get(value, {}).get("param_correction"))
            result[name] = masters[value]
        else:
            result[name] = value.detach()
    return result


def _in_float32(p: Tensor, correction: Tensor | None) -> Tensor:
    local = sharding.local(p.detach()).contiguous()
    master = torch.empty(local.shape, dtype=torch.float32, device=local.device)
    extra = None if correction is None else sharding.local(correction).to(local.device)
    for piece in _pieces(local):
        own = None if extra is None else extra.view(-1)[piece]
        master.view(-1)[piece] = formats.decode(local.view(-1)[piece], own)
    return sharding.placed_like(p, master, p.shape)


def _encoded(x: Tensor, p: Tensor, extra: int) -> tuple[Tensor, Tensor | None]:
    """A weight in the dtype of a parameter, and its correction if it has `extra` bits; on the device of `x`."""
    flat = x.reshape(-1)
    rounded = torch.empty(x.shape, dtype=p.dtype, device=x.device)
    correction = torch.empty(x.shape, dtype=formats.CORRECTION_DTYPES[extra], device=x.device) if extra else None
    for piece in _pieces(flat):
        own, rest = formats.encode(flat[piece].float(), p.dtype, extra)
        rounded.view(-1)[piece] = own
        if correction is not None and rest is not None:
            correction.view(-1)[piece] = rest
    return rounded, correction


def _pieces(x: Tensor) -> Iterator[slice]:
    """The conversions take 60 bytes per element for a while."""
    for start in range(0, x.numel(), CHUNK_ELEMENTS):
        yield slice(start, start + CHUNK_ELEMENTS)


@torch.no_grad()
def load_state_dict(optimizer: torch.optim.Optimizer, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Set the model's weights and the optimizer's `param_correction` from weights of any floating-point dtype.

    Raises:
        ValueError, TypeError: names, shapes or dtypes do not fit. Nothing is changed then.
    """
    own = model.state_dict(keep_vars=True)
    missing, unknown = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
    if missing or unknown:
        hint = ""
        if any(name.startswith(("module.", "_orig_mod.")) for name in (*missing, *unknown)):
            hint = ". One of the two is wrapped (DistributedDataParallel, torch.compile): take the model inside"
        raise ValueError(
            f"the weights do not fit the model: missing {missing or 'none'}, unknown {unknown or 'none'}{hint}"
        )
    groups = {
        p: (group, options.parameter_name(group, number, i))
        for number, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    updates, rest = [], dict(state_dict)
    for name, p in own.items():
        if not isinstance(p, Tensor):
            continue
        value = state_dict[name]
        if not isinstance(value, Tensor) or value.shape != p.shape:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise ValueError(f"the weight {name} has {what}, the model's has shape {tuple(p.shape)}")
        if p.is_floating_point() and not value.is_floating_point():
            raise TypeError(f"the weight {name} has dtype {value.dtype}, which is not floating point")
        if p not in groups or p.dtype not in formats.FORMATS:
            if sharding.is_dtensor(p):
                rest[name] = sharding.placed_like(p, _local_like(value, p), p.shape)
            continue
        group, parameter = groups[p]
        extra = state_of.correction_bits(p.dtype, group) if p.requires_grad else 0  # a frozen one has no state
        state = None
        if extra:
            state = dict(optimizer.state.get(p) or state_of.allocate(p, group))
            if message := state_of.structural_error(state, p, group):
                raise ValueError(f"the state of {parameter} {message}")
        x = _local_like(value, p).to(p.device)
        largest = torch.finfo(p.dtype).max
        if x.numel() and float(x.nan_to_num(0.0).abs().max()) > largest:
            raise ValueError(f"the weight {name} has values beyond {largest:g}, the largest number of {p.dtype}")
        rest[name] = p.detach()
        updates.append((p, state, _encoded(x, p, extra)))
    model.load_state_dict(rest)
    for p, state, (rounded, correction) in updates:
        sharding.local(p).copy_(rounded)
        if correction is not None and state is not None:
            sharding.local(state["param_correction"]).copy_(correction)
            optimizer.state[p] = state


def _local_like(value: Tensor, p: Tensor) -> Tensor:
    """The part of a weight, whole or sharded, that belongs to the local part of the parameter."""
    if not sharding.is_dtensor(p):
        return value.full_tensor() if sharding.is_dtensor(value) else value  # type: ignore[attr-defined]
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    if sharding.is_dtensor(value):
        return value.redistribute(mesh, placements).to_local()  # type: ignore[attr-defined]
    return distribute_tensor(value.to(p.device), mesh, placements, src_data_rank=None).to_local()
