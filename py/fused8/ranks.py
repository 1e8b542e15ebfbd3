"""What each rank holds under FSDP2, which cuts every parameter along dim 0 as torch.chunk does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .models import Part, is_statistic
from .sizes import mib
from .tables import Table


class RankKind(NamedTuple):
    """Ranks that hold the same amounts."""

    ranks: int
    parts: list[Part]
    """The local part of each parameter, in the model's order; it has no rows where none were left for these ranks."""


def kinds_of_ranks(parts: Sequence[Part], world_size: int) -> list[RankKind]:
    """The ranks of a cluster: hundreds of them are few kinds.

    A 0-dim parameter, which FSDP2 refuses to shard, and running statistics are whole on every rank.
    """
    kinds: dict[tuple[int | None, ...], int] = {}
    for rank in range(world_size):
        rows = tuple(_rows(part, rank, world_size) for part in parts)
        kinds[rows] = kinds.get(rows, 0) + 1
    return [
        RankKind(ranks, [_local(part, own) for part, own in zip(parts, rows, strict=True)])
        for rows, ranks in kinds.items()
    ]


def _rows(part: Part, rank: int, world_size: int) -> int | None:
    """How many rows a rank holds; None: the tensor is not sharded."""
    if not part.shape or is_statistic(part.name):
        return None
    rows = part.shape[0]
    chunk = -(-rows // world_size)
    return max(0, min(chunk, rows - rank * chunk))


def _local(part: Part, rows: int | None) -> Part:
    if rows is None:
        return part
    local = part._replace(shape=(rows, *part.shape[1:]))
    return local._replace(nbytes=part.nbytes * local.numel // part.numel if part.numel else 0)


@dataclass(frozen=True)
class Share:
    """Bytes on the rank that holds most, and on the average rank."""

    largest: int
    mean: float

    @classmethod
    def of(cls, kinds: Sequence[RankKind], sizes: Sequence[int]) -> Share:
        """From the bytes on a rank of each kind."""
        ranks = sum(kind.ranks for kind in kinds)
        total = sum(kind.ranks * size for kind, size in zip(kinds, sizes, strict=True))
        return cls(max(sizes), total / ranks)


@dataclass(frozen=True)
class OnRanks:
    """What training with one optimizer takes."""

    state: Share
    total: Share
    """With weights and gradients."""


@dataclass(frozen=True)
class RankMemory:
    """What each rank holds. Not in it: activations, and the layers that FSDP2 has gathered at the moment."""

    world_size: int
    weights: Share
    gradients: Share
    optimizers: dict[str, OnRanks | None]
    """fused8 and the others; None: it does not take sharded parameters, or does not have the option."""

    @property
    def state(self) -> Share:
        return self._fused8.state

    @property
    def total(self) -> Share:
        """Weights, gradients and state."""
        return self._fused8.total

    @property
    def _fused8(self) -> OnRanks:
        ours = self.optimizers["fused8"]
        assert ours is not None
        return ours

    def table(self) -> Table:
        def cells(share: Share) -> list[str]:
            return [f"{share.largest:,}", mib(share.largest), mib(share.mean)]

        rows = [[name, *cells(own), ""] for name, own in (("weights", self.weights), ("gradients", self.gradients))]
        rows += [
            [name, "cannot", "", "", ""] if own is None else [name, *cells(own.state), mib(own.total.largest)]
            for name, own in self.optimizers.items()
        ]
        return Table(
            f"Each of {self.world_size} ranks under FSDP2 (total: with weights and gradients)",
            ["", "bytes, largest rank", "MiB", "MiB, mean", "total MiB, largest rank"],
            rows,
        )
