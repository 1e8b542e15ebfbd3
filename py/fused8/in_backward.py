"""Step each parameter as soon as its gradient is ready, so that the gradients of a model never exist all at once."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from .optimizer import Adam8bit
from .options import parameters


class StepInBackward:
    """What `step_in_backward` returns: `remove()` goes back to ordinary steps. It does not keep the optimizer alive."""

    def __init__(self, optimizer: Adam8bit) -> None:
        self._optimizer_reference = weakref.ref(optimizer)
        self._stepped: set[Tensor] = set()
        self._checked_for_ddp = False
        # Offloaded parameters are stepped by one thread of the CPU while backward goes on.
        self._worker: tuple[int, ThreadPoolExecutor] | None = None
        self._pending: list[Future[None]] = []
        # The parameters keep their hooks: these must not keep the optimizer.
        ready = _weakly(self)
        self._hooks = [
            p.register_post_accumulate_grad_hook(ready) for p in parameters(optimizer.param_groups) if p.requires_grad
        ]

    def optimizer(self) -> Adam8bit | None:
        """The optimizer, if it is still there and stepped in backward by this handle."""
        optimizer = self._optimizer_reference()
        return optimizer if optimizer is not None and optimizer._in_backward is self else None

    def ready(self, p: Tensor) -> None:
        """The gradient of a parameter is complete."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        if not self._checked_for_ddp:
            _refuse_ddp(optimizer)
            self._checked_for_ddp = True
        if p in self._stepped:
            raise RuntimeError(
                "a parameter got a second gradient before optimizer.step(): with step_in_backward gradients cannot be "
                "accumulated over several backward passes. Call optimizer.step() after each, or step as usual. After "
                "a backward that did not end, optimizer.zero_grad() begins anew"
            )
        step = optimizer._prepare(None, None, only=p)
        if any(step.fetched):
            # Who still needs the old weight in this backward must not get another one.
            torch.autograd.graph.increment_version([p])
            self._pending.append(self._thread().submit(optimizer._execute, step))
        else:
            optimizer._execute(step)
        self._stepped.add(p)
        p.grad = None

    def _thread(self) -> ThreadPoolExecutor:
        if self._worker is None or self._worker[0] != os.getpid():  # a fork has no threads
            self._worker = (os.getpid(), ThreadPoolExecutor(1, "fused8"))
            self._pending = []
        return self._worker[1]

    def join(self) -> None:
        """Wait for the steps of the thread; raise the first error."""
        pending, self._pending = self._pending, []
        optimizer = self._optimizer_reference()
        if pending and optimizer is not None:
            wait(pending)
            optimizer._offload.finish()
            for future in pending:
                future.result()

    def forget(self) -> None:
        """Whatever has been stepped, the next backward is a new one."""
        self._stepped.clear()
        self.join()

    def finish_step(self, optimizer: Adam8bit) -> None:
        """The end of the step. Gradients that no hook has seen are stepped as usual: those set by hand, and those of
        parameters that were frozen or not there when the handle was made."""
        self.forget()
        if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
            for name in ("grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)  # GradScaler would have taken them off
            raise RuntimeError(
                "step_in_backward cannot be used with GradScaler, which decides after backward: backward has stepped "
                "with scaled gradients. Take the handle off with remove(), or train without loss scaling"
            )
        optimizer._step(None, None)

    def remove(self) -> None:
        """Take the hooks off. `optimizer.step()` steps all parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        optimizer = self.optimizer()
        try:
            self.join()
        finally:
            if optimizer is not None:
                optimizer._in_backward = None
            if self._worker is not None:
                self._worker[1].shutdown(wait=False)
                self._worker = None


def _weakly(handle: StepInBackward) -> Callable[[Tensor], None]:
    reference = weakref.ref(handle)

    def ready(p: Tensor) -> None:
        if (handle := reference()) is not None:
            handle.ready(p)

    return ready


def _refuse_ddp(optimizer: Adam8bit) -> None:
    """Raise if DistributedDataParallel, which averages gradients only after they are complete, has a parameter."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.nn.parallel import DistributedDataParallel

    ours = set(parameters(optimizer.param_groups))
    for module in gc.get_objects():
        if issubclass(type(module), DistributedDataParallel) and any(p in ours for p in module.parameters()):
            raise RuntimeError(
                "step_in_backward cannot be used with DistributedDataParallel: a parameter would be stepped before its "
                "gradient is averaged over the ranks. Shard with fully_shard (FSDP2), or call remove() on the handle"
            )


def step_in_backward(optimizer: Adam8bit) -> StepInBackward:
    """Update each parameter in backward, when its gradient is complete, and free the gradient at once.

    `optimizer.step()` still belongs after each backward: it waits for the rest, steps what has a gradient that no
    backward brought, and marks the end of the step (schedulers expect it). The result is that of ordinary steps, bit
    for bit. With `offload="cpu"` the CPU steps parameters in a thread of its own while backward goes on. Gradients are
    gone after backward: torch.nn.utils.clip_grad_norm_ finds none to clip. Not for DistributedDataParallel, whose
    ranks would not see each other's gradients; FSDP2 works.

    Returns:
        A handle whose `remove()` undoes it.

    Raises:
        TypeError: it is no optimizer of fused8.
        ValueError: the optimizer clips by the global norm, which is not known before backward ends; it, or another
            optimizer of some of its parameters, already steps in backward.
        RuntimeError: from backward, when a parameter gets two gradients without an `optimizer.step()` in between, or
            under DistributedDataParallel; from `step()` with GradScaler.
    """
    if not isinstance(optimizer, Adam8bit):
        raise TypeError(f"step_in_backward takes an Adam8bit or AdamW8bit, got {type(optimizer).__name__}")
    if optimizer._in_backward is not None:
        raise ValueError("this optimizer already steps in backward")
    if any(group["max_grad_norm"] is not None for group in optimizer.param_groups):
        raise ValueError("step_in_backward cannot clip by max_grad_norm: the global norm is not known in backward")
    if _steps_elsewhere(optimizer):
        gc.collect()  # what is gone but for a cycle, such as that of a scheduler
        if _steps_elsewhere(optimizer):
            raise ValueError("another optimizer steps some of these parameters in backward: remove() its handle first")
    handle = StepInBackward(optimizer)
    optimizer._in_backward = handle
    _handles.add(handle)
    return handle


_handles: weakref.WeakSet[StepInBackward] = weakref.WeakSet()


def _steps_elsewhere(optimizer: Adam8bit) -> bool:
    ours = set(parameters(optimizer.param_groups))
    others = [handle.optimizer() for handle in _handles]
    return any(p in ours for other in others if other for p in parameters(other.param_groups))
