"""State in CPU memory for parameters on an accelerator: gradients come down, the CPU steps, new weights go up.

Of each such parameter the host keeps the state and a copy of the weight, so that a step moves each gradient and each
new weight once: in bfloat16 2 bytes down and 2 bytes up per parameter. What crosses the bus is pinned; the state, which
never does, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .sharding import is_dtensor

HOST = torch.device("cpu")
PIECE_BYTES = 1 << 25  # of gradients that the CPU steps in one call, while those after them come and those before go


class Transfer(Protocol):
    """Copies between one device and the host. All but `wait` return at once."""

    def fetch(self, source: Tensor, to: Tensor) -> Callable[[], None]:
        """Begin to copy a gradient (or, once, a weight) to the host, as it will be when the device has done what it was
        given. The result waits for the copy."""

    def send(self, weight: Tensor, to: Tensor) -> None:
        """Begin to copy a weight to the device, after all copies that were begun before."""

    def finish(self) -> None:
        """Let whatever the device is given from now on come after all copies."""


class CudaTransfer:
    """On a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def fetch(self, source: Tensor, to: Tensor) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            return self._stream.record_event().synchronize

    def send(self, weight: Tensor, to: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(weight, non_blocking=True)

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class HostTransfer:
    """For parameters that are in CPU memory already."""

    def __init__(self, device: torch.device) -> None:
        pass

    def fetch(self, source: Tensor, to: Tensor) -> Callable[[], None]:
        to.copy_(source)
        return lambda: None

    def send(self, weight: Tensor, to: Tensor) -> None:
        to.copy_(weight)

    def finish(self) -> None:
        pass


TRANSFERS: dict[str, Callable[[torch.device], Transfer]] = {"cuda": CudaTransfer, "cpu": HostTransfer}


def refusal(p: Tensor) -> str | None:
    """Why the state of a parameter cannot be offloaded, or None."""
    if is_dtensor(p):
        return (
            "is a DTensor, whose state is where its shard is: to offload both, give fully_shard "
            "offload_policy=CPUOffloadPolicy() and leave out offload"
        )
    if p.device.type not in TRANSFERS:
        return f"is on {p.device}: state is offloaded from {' and '.join(TRANSFERS)} only"
    return None


class HostCopy:
    """The copy of one weight on the host, and the buffer that its gradients come into."""

    def __init__(self, p: Tensor) -> None:
        self.weight = _empty(p.shape, p.dtype, p.device)
        self._grad: Tensor | None = None
        self._known: tuple[int, int] | None = None

    def is_stale(self, p: Tensor) -> bool:
        """Whether anybody but the optimizer has written or replaced the weight on the device."""
        return self._known != (p._version, p.data_ptr())

    def is_sent(self, p: Tensor) -> None:
        self._known = (p._version, p.data_ptr())

    def grad_buffer(self, grad: Tensor) -> Tensor:
        if self._grad is None or self._grad.dtype != grad.dtype:
            self._grad = _empty(grad.shape, grad.dtype, grad.device)
        return self._grad


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


class Fetched:
    """Gradients of some parameters of one device, on their way to the host."""

    def __init__(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], hosts: Sequence[HostCopy], transfer: Transfer
    ) -> None:
        self.params, self.hosts, self.transfer = params, hosts, transfer
        self.grads = [host.grad_buffer(grad) for grad, host in zip(grads, hosts, strict=True)]
        self.waits = [transfer.fetch(grad, to) for grad, to in zip(grads, self.grads, strict=True)]
        self.stale = [
            transfer.fetch(p.detach(), host.weight) for p, host in zip(params, hosts, strict=True) if host.is_stale(p)
        ]

    def pieces(self) -> Iterator[slice]:
        start = size = 0
        for i, grad in enumerate(self.grads):
            size += grad.numel() * grad.element_size()
            if size >= PIECE_BYTES or i + 1 == len(self.grads):
                yield slice(start, i + 1)
                start, size = i + 1, 0

    def step(self, run: Callable[[slice, list[Tensor], list[Tensor]], Any]) -> None:
        """Call `run` with the weights and gradients of each piece as soon as they are there; send what it leaves."""
        for wait in self.stale:
            wait()
        for piece in self.pieces():
            for wait in self.waits[piece]:
                wait()
            run(piece, [host.weight for host in self.hosts[piece]], self.grads[piece])
            for p, host in zip(self.params[piece], self.hosts[piece], strict=True):
                self.transfer.send(host.weight, p)

    def are_sent(self) -> None:
        for p, host in zip(self.params, self.hosts, strict=True):
            host.is_sent(p)


class Offload:
    """The host side of all offloaded parameters of one optimizer."""

    def __init__(self) -> None:
        self._hosts: dict[Tensor, HostCopy] = {}
        self._transfers: dict[torch.device, Transfer] = {}

    def fetch(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Fetched:
        """Begin to bring the gradients of parameters of one device to the host."""
        device = params[0].device
        if device not in self._transfers:
            self._transfers[device] = TRANSFERS[device.type](device)
        hosts = []
        for p in params:
            host = self._hosts.get(p)
            if host is None or host.weight.shape != p.shape or host.weight.dtype != p.dtype:
                host = self._hosts[p] = HostCopy(p)
            hosts.append(host)
        return Fetched(params, grads, hosts, self._transfers[device])

    def finish(self) -> None:
        for transfer in self._transfers.values():
            transfer.finish()
