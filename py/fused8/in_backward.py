"""Step each parameter as soon as its gradient is ready, so that the gradients of a model never exist all at once."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from .optimizer import Adam8bit


class StepInBackward:
    """What `step_in_backward` returns: `remove()` goes back to ordinary steps."""

    def __init__(self, optimizer: Adam8bit) -> None:
        self._optimizer = optimizer
        self._stepped: set[Tensor] = set()
        # Offloaded parameters are stepped by one thread of the CPU while backward goes on.
        self._worker = ThreadPoolExecutor(1, "fused8") if optimizer._offloads() else None
        self._pending: list[Future[None]] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        ]

    def _ready(self, p: Tensor) -> None:
        if p in self._stepped:
            raise RuntimeError(
                "a parameter got a second gradient before optimizer.step(): with step_in_backward gradients cannot be "
                "accumulated over several backward passes. Call optimizer.step() after each, or step as usual"
            )
        step = self._optimizer._prepare(None, None, only=p)
        if self._worker is not None and any(step.fetched):
            self._pending.append(self._worker.submit(self._optimizer._execute, step))
        else:
            self._optimizer._execute(step)
        self._stepped.add(p)
        p.grad = None

    def _join(self) -> None:
        """Wait for the steps of the worker; raise the first error."""
        pending, self._pending = self._pending, []
        wait(pending)
        self._optimizer._offload.finish()
        for future in pending:
            future.result()

    def finish_step(self) -> None:
        if hasattr(self._optimizer, "grad_scale") or hasattr(self._optimizer, "found_inf"):
            raise RuntimeError("step_in_backward cannot be used with GradScaler, which decides after backward")
        self._stepped.clear()
        self._join()

    def remove(self) -> None:
        """Take the hooks off. `optimizer.step()` steps all parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._join()
        if self._worker is not None:
            self._worker.shutdown()
        self._optimizer._in_backward = None


def step_in_backward(optimizer: Adam8bit) -> StepInBackward:
    """Update each parameter in backward, when its gradient is complete, and free the gradient at once.

    `optimizer.step()` still belongs after each backward: it updates nothing, but marks the end of the step (schedulers
    expect it). The result is that of ordinary steps, bit for bit. With `offload="cpu"` the CPU steps parameters in a
    thread of its own while backward goes on, and `optimizer.step()` waits for it.

    Returns:
        A handle whose `remove()` undoes it.

    Raises:
        ValueError: the optimizer clips by the global norm, which is not known before backward ends, or is already
            stepping in backward.
        RuntimeError: from backward, when a parameter gets two gradients without an `optimizer.step()` in between.
    """
    if optimizer._in_backward is not None:
        raise ValueError("this optimizer already steps in backward")
    if any(group["max_grad_norm"] is not None for group in optimizer.param_groups):
        raise ValueError("step_in_backward cannot clip by max_grad_norm: the global norm is not known in backward")
    handle = StepInBackward(optimizer)
    optimizer._in_backward = handle
    return handle
