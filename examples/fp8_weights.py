"""Train the demo's GPT with the weights of its linear layers stored in FP8: one byte each, and no copy in more bits.

    python examples/fp8_weights.py                 # about a minute on two CPU cores
    python examples/fp8_weights.py --master-bits 16
    python examples/fp8_weights.py --help

An FP8 weight is widened where it is used, computed with in BF16 (FP32 on a CPU, where BF16 products are slow), and its
gradient, which nothing rounds to FP8, is in the dtype of the computation. fused8 updates in FP32 and rounds the new
weight stochastically, so that updates far below the distance of two FP8 numbers still add up.

Needs fused8[demo].
"""

import argparse
import math
import statistics
import sys

import torch
import torch.nn.functional as F
from gpt import GPT, SIZES, batch_at, load_text, lr_factor
from torch import Tensor, nn

import fused8


class Widen(torch.autograd.Function):
    """FP8 -> a wider dtype. Autograd through `.to(dtype)` would round the gradient to FP8."""

    @staticmethod
    def forward(ctx, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class FP8Linear(nn.Module):
    """A linear layer whose weight is `unit` times an FP8 parameter [out, in].

    `unit` is a power of two near the standard deviation of the weight: FP8 has its finest steps, relative to a number,
    only above 2^-6 (e4m3) or 2^-14 (e5m2).
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.unit = 2.0 ** round(math.log2(linear.weight.std().item()))
        self.weight = nn.Parameter((linear.weight.detach() / self.unit).to(dtype))
        self.weight.grad_dtype = None  # of any dtype; else the gradient would have to be FP8
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return F.linear(x, Widen.apply(self.weight, dtype) * self.unit, self.bias)


def store_linear_weights_in_fp8(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace every nn.Linear of the model, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, FP8Linear(child, dtype))
    return model


def param_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict]:
    """Groups for fused8. In units of `unit` a weight takes steps of lr / unit, and decays as before."""
    scaled = {module.weight: module.unit for module in model.modules() if isinstance(module, FP8Linear)}
    groups = []
    for group in fused8.param_groups(model, weight_decay=weight_decay):
        for unit in sorted({scaled.get(p, 1.0) for p in group["params"]}):
            params = [p for p in group["params"] if scaled.get(p, 1.0) == unit]
            groups.append(group | {"params": params, "lr": lr / unit, "weight_decay": group["weight_decay"] * unit})
    return groups


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, args: argparse.Namespace) -> list[float]:
    """The loss of each step, in nats per byte."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args.steps))
    losses = []
    for step in range(args.steps):
        batch = batch_at(step, text, args)
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type != "cpu"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if args.verbose and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {statistics.fmean(losses[-20:]):.3f}", file=sys.stderr)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--dtype", choices=("float8_e4m3fn", "float8_e5m2"), default="float8_e4m3fn")
    parser.add_argument("--master-bits", type=int, choices=(16, 24), help="keep 8 or 16 bits more of each weight")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.verbose = True

    torch.manual_seed(args.seed)
    model = store_linear_weights_in_fp8(GPT(*SIZES[args.size]), getattr(torch, args.dtype)).to(args.device)
    optimizer = fused8.AdamW8bit(param_groups(model, args.lr, 0.1), lr=args.lr, master_bits=args.master_bits)
    losses = train(model, optimizer, load_text(None)[0], args)

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    state = sum(t.numel() * t.element_size() for own in optimizer.state.values() for t in own.values())
    count = sum(p.numel() for p in model.parameters())
    print(f"loss {statistics.fmean(losses[-20:]):.3f}; bytes per parameter: {weights / count:.2f} of weights, "
          f"{state / count:.2f} of optimizer state")  # fmt: skip


if __name__ == "__main__":
    main()
