"""Step each parameter as soon as its gradient is ready, so that the gradients of a model never exist all at once."""

from __future__ import annotations

from torch import Tensor

from .optimizer import Adam8bit


class StepInBackward:
    """What `step_in_backward` returns: `remove()` goes back to ordinary steps."""

    def __init__(self, optimizer: Adam8bit) -> None:
        self._optimizer = optimizer
        self._stepped: set[Tensor] = set()
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
        self._optimizer._step(None, None, only=p)
        self._stepped.add(p)
        p.grad = None

    def finish_step(self) -> None:
        if hasattr(self._optimizer, "grad_scale") or hasattr(self._optimizer, "found_inf"):
            raise RuntimeError("step_in_backward cannot be used with GradScaler, which decides after backward")
        self._stepped.clear()

    def remove(self) -> None:
        """Take the hooks off. `optimizer.step()` steps all parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._optimizer._in_backward = None


def step_in_backward(optimizer: Adam8bit) -> StepInBackward:
    """Update each parameter in backward, when its gradient is complete, and free the gradient at once.

    `optimizer.step()` still belongs after each backward: it updates nothing, but marks the end of the step (schedulers
    expect it). The result is that of ordinary steps, bit for bit.

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
