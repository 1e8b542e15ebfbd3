"""How many bytes training takes, estimated before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import state as state_of
from .models import Part, Source, may_train, read_parts
from .peers import TAKE_NO_DTENSORS
from .peers import peers as peers_of
from .ranks import OnRanks, RankKind, RankMemory, Share, kinds_of_ranks
from .sizes import dtype_name, mib, per_parameter
from .tables import Table, Tabular


@dataclass(frozen=True)
class MemoryEstimate(Tabular):
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
    per_rank: RankMemory | None = None
    """What each rank holds, if a world size was given. All else is the whole model's."""

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
                ["optimizer", "state bytes", "MiB", "bytes/parameter", "total MiB", "total bytes/parameter"],
                [
                    [name, "does not have amsgrad", "", "", "", ""]
                    if size is None
                    else [
                        name,
                        f"{size:,}",
                        mib(size),
                        per_parameter(size, self.parameters),
                        mib(size + self.weights + self.gradients),
                        per_parameter(size + self.weights + self.gradients, self.parameters),
                    ]
                    for name, size in optimizers.items()
                ],
            ),
            *([self.per_rank.table()] if self.per_rank else []),
        ]


def estimate_memory(
    model_or_shapes: Source,
    *,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    architecture: str | None = None,
    world_size: int | None = None,
    **options: Any,
) -> MemoryEstimate:
    """The bytes that training with fused8 takes, exactly, before anything is allocated.

    The state is that of every trained parameter after its first step; one that never gets a gradient never gets a
    state. For a sharded model it is that of the whole model; `world_size` adds what each rank holds.

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
        world_size: how many ranks shard the model by FSDP2 (`fully_shard`): of HSDP the size of the sharding mesh
            dimension. The result's `per_rank` has the bytes of the largest and of the average rank. Where a parameter
            is kept in 8 bits is decided by its whole shape, except that 1-D ones are all kept in 32 bits.
        options: of `Adam8bit`: codec, block_size, min_8bit_size, amsgrad, master_bits.

    Raises:
        ValueError, OSError: a file is missing, truncated, or no model; an option is out of range.
        TypeError: `model_or_shapes` is of another type, or an option unknown.
        ModuleNotFoundError: a configuration is given and transformers is not installed.
    """
    if world_size is not None and not (isinstance(world_size, int) and world_size >= 1):
        raise ValueError(f"world_size must be a whole number from 1 on, got {world_size!r}")
    parts, defaults = read_parts(model_or_shapes, architecture, options)
    parts = [part if part.group else part._replace(group=defaults) for part in parts]
    if dtype is not None:
        parts = [
            part._replace(dtype=dtype, nbytes=part.numel * dtype.itemsize) if may_train(part.dtype) else part
            for part in parts
        ]
    trained = [part for part in parts if part.trained]
    sizes = dict.fromkeys(("codes", "scales", "state_32bit", "steps", "master_weights"), 0)
    by_dtype: dict[str, int] = {}
    for part in trained:
        for name, spec in _specs(part).items():
            size = math.prod(spec.shape) * spec.dtype.itemsize
            sizes[_kind_of(name, spec.dtype)] += size
            by_dtype[dtype_name(spec.dtype)] = by_dtype.get(dtype_name(spec.dtype), 0) + size
    amsgrad = any(_group(part)["amsgrad"] for part in trained)
    return MemoryEstimate(
        parameters=sum(part.numel for part in trained),
        frozen=sum(part.numel for part in parts if not part.trained),
        weights=sum(part.nbytes for part in parts),
        gradients=_gradients(parts, grad_dtype),
        **sizes,
        by_dtype=by_dtype,
        peers={name: peer(trained, amsgrad) for name, peer in peers_of(trained).items()},
        options={name: defaults[name] for name in _SHOWN_OPTIONS if defaults[name] is not None},
        per_rank=None if world_size is None else _per_rank(parts, grad_dtype, amsgrad, world_size),
    )


_SHOWN_OPTIONS = ("codec", "block_size", "min_8bit_size", "amsgrad", "master_bits")


def _group(part: Part) -> Mapping[str, Any]:
    assert part.group is not None
    return part.group


def _specs(part: Part, *, sharded: bool = False) -> dict[str, state_of.TensorSpec]:
    """The state of a (whole) parameter. Sharded, a 1-D parameter is one row that is cut."""
    return state_of.state_specs(part.shape, _group(part), not sharded or len(part.shape) != 1, part.in_dtype)


def _gradients(parts: Sequence[Part], grad_dtype: torch.dtype | None) -> int:
    return sum(part.numel * (grad_dtype or part.in_dtype).itemsize for part in parts if part.trained)


def _per_rank(parts: Sequence[Part], grad_dtype: torch.dtype | None, amsgrad: bool, world_size: int) -> RankMemory:
    kinds = kinds_of_ranks(parts, world_size)
    specs = [_specs(part, sharded=True) if part.trained else {} for part in parts]
    weights = [sum(part.nbytes for part in kind.parts) for kind in kinds]
    gradients = [_gradients(kind.parts, grad_dtype) for kind in kinds]

    def state(kind: RankKind) -> int:
        """Codes, scales and FP32 moments have their parameter's dim 0 and are cut as it is; `step` is a scalar."""
        return sum(
            math.prod((*local.shape[:1], *spec.shape[1:]) if spec.shape else ()) * spec.dtype.itemsize
            for local, own in zip(kind.parts, specs, strict=True)
            for spec in own.values()
        )

    def on_ranks(state: list[int]) -> OnRanks:
        total = [sum(sizes) for sizes in zip(weights, gradients, state, strict=True)]
        return OnRanks(Share.of(kinds, state), Share.of(kinds, total))

    optimizers: dict[str, OnRanks | None] = {"fused8": on_ranks([state(kind) for kind in kinds])}
    for name, peer in peers_of([part for part in parts if part.trained]).items():
        found = [peer([part for part in kind.parts if part.trained], amsgrad) for kind in kinds]
        known = [size for size in found if size is not None]
        refused = name in TAKE_NO_DTENSORS or len(known) < len(found)
        optimizers[name] = None if refused else on_ranks(known)
    return RankMemory(world_size, Share.of(kinds, weights), Share.of(kinds, gradients), optimizers)


def _kind_of(name: str, dtype: torch.dtype) -> str:
    if name == "step":
        return "steps"
    if name.endswith("_scale"):
        return "scales"
    if name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        return "codes" if dtype.itemsize == 1 else "state_32bit"
    return "master_weights"
