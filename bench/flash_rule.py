"""AdamW whose state is stored by the rule that FlashOptim publishes, in plain torch: a rule to compare with on a CPU.

Groups of 32 elements with FP16 scales. m: int8 of 2y / (1 + |y|), y = m / max |m|. v: uint8, linear in sqrt(v). The
update uses m and v before they are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

GROUP = 32
NAME = "FlashOptim's rule"
SMALLEST = 4096  # fewer elements, or one dimension: FP32 state, as fused8's


def _grouped(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups as rows, the last one filled up with zeros; and what to divide each by."""
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % GROUP)).view(-1, GROUP)
    return flat, flat.abs().amax(1, keepdim=True)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.where(scale > 0, scale, torch.ones_like(scale))


def encode_m(m: Tensor) -> tuple[Tensor, Tensor]:
    grouped, scale = _grouped(m)
    y = _scaled(grouped, scale)
    return (2 * y / (1 + y.abs()) * 127).round().to(torch.int8), scale.half()


def decode_m(codes: Tensor, scale: Tensor) -> Tensor:
    z = codes.float() / 127
    return z / (2 - z.abs()) * scale.float()


def encode_v(v: Tensor) -> tuple[Tensor, Tensor]:
    grouped, scale = _grouped(v.sqrt())
    return (_scaled(grouped, scale) * 255).round().to(torch.uint8), scale.half()


def decode_v(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.float() / 255 * scale.float()).square()


class FlashRule(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        smallest: int = SMALLEST,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, smallest=smallest))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        eight_bit = p.numel() >= group["smallest"] and p.dim() > 1
        if not state:
            state["step"] = 0
            state["exp_avg"] = state["exp_avg_sq"] = torch.zeros_like(p)
            if eight_bit:
                state["exp_avg"], state["exp_avg_scale"] = encode_m(p.new_zeros(p.shape))
                state["exp_avg_sq"], state["exp_avg_sq_scale"] = encode_v(p.new_zeros(p.shape))
        m, v = state["exp_avg"], state["exp_avg_sq"]
        if eight_bit:
            m = decode_m(m, state["exp_avg_scale"]).view(-1)[: p.numel()].view(p.shape)
            v = decode_v(v, state["exp_avg_sq_scale"]).view(-1)[: p.numel()].view(p.shape)
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
        state["step"] += 1
        corrections = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] / corrections[0] * m / ((v / corrections[1]).sqrt() + group["eps"]))
        if eight_bit:
            state["exp_avg"], state["exp_avg_scale"] = encode_m(m)
            state["exp_avg_sq"], state["exp_avg_sq_scale"] = encode_v(v)
        else:
            state["exp_avg"], state["exp_avg_sq"] = m, v
