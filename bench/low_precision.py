"""What each way to store the weights does to the loss.  python -m bench.low_precision

The demo's GPT (examples/gpt.py, `tiny`: less than a million parameters), trained from the same weights on the same
batches with weights in FP32, BF16, BF16 with its options, and FP8, for several seeds, always by AdamW8bit. All is
computed in FP32 from the widened weights, so only the storage differs; gradients are in BF16 (FP8: in FP32) as they
would be in training. What chance alone does shows the spread of the FP32 runs over the seeds.

Writes low_precision.json and low_precision.png into --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import fused8

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # where scripts import one another
import fp8_weights
import gpt

SIZE = gpt.SIZES["tiny"]
SMOOTH = 50  # steps in a moving mean of the curves
FINAL = 100  # steps whose mean is the final training loss


class Storage(NamedTuple):
    name: str
    dtype: torch.dtype
    options: dict[str, Any]
    color: str


STORAGES = (
    Storage("FP32", torch.float32, {}, "#495057"),
    Storage("BF16", torch.bfloat16, {}, "#e03131"),
    Storage("BF16, stochastic rounding", torch.bfloat16, {"param_rounding": "stochastic"}, "#f08c00"),
    Storage("BF16, master_bits=24", torch.bfloat16, {"master_bits": 24}, "#1971c2"),
    Storage("BF16, master_bits=32", torch.bfloat16, {"master_bits": 32}, "#2f9e44"),
    Storage("FP8 e4m3 matrices", torch.float8_e4m3fn, {}, "#9c36b5"),
    Storage("FP8 e4m3 matrices, master_bits=16", torch.float8_e4m3fn, {"master_bits": 16}, "#0c8599"),
)


class Training(gpt.Run):
    """A run of the demo whose weights are computed with in FP32, however they are stored."""

    def loss(self, batch: Tensor) -> Tensor:
        wide = {
            name: p.float() if p.dtype.itemsize == 2 else p  # FP8 layers widen their weights themselves
            for name, p in self.model.named_parameters()
        }
        logits = torch.func.functional_call(self.model, wide, (batch[:, :-1],))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def bytes_per_parameter(self) -> float:
        """Of weights and optimizer state together, measured."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        state = sum(t.numel() * t.element_size() for own in self.optimizer.state.values() for t in own.values())
        return (weights + state) / sum(p.numel() for p in self.model.parameters())


def training(storage: Storage, args: argparse.Namespace) -> Training:
    torch.manual_seed(args.seed)
    model = gpt.GPT(*SIZE)
    if storage.dtype.itemsize == 1:
        fp8_weights.store_linear_weights_in_fp8(model, storage.dtype)
    else:
        model.to(storage.dtype)
    groups = fp8_weights.param_groups(model, args.lr, 0.1)
    return Training(model, fused8.AdamW8bit(groups, lr=args.lr, **storage.options), args.steps)


def measure(steps: int, seeds: int, batch: int, console: Console) -> dict[str, Any]:
    text, held_out = gpt.load_text(None)
    device = torch.device("cpu")
    runs: dict[str, list[dict[str, Any]]] = {storage.name: [] for storage in STORAGES}
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=seeds * len(STORAGES) * steps)
        for seed in range(seeds):
            args = argparse.Namespace(seed=seed, steps=steps, batch=batch, lr=1e-3, device=device)
            for storage in STORAGES:
                run = training(storage, args)
                for step in range(steps):
                    run.train_step(gpt.batch_at(step, text, args))
                    progress.update(bar, advance=1, description=f"{storage.name}, seed {seed}: {run.losses[-1]:.3f}")
                found = {
                    "losses": [round(loss, 5) for loss in run.losses],
                    "final_loss": statistics.fmean(run.losses[-FINAL:]),
                    "held_out_loss": run.held_out_loss(held_out, device),
                    "bytes_per_parameter": run.bytes_per_parameter(),
                }
                runs[storage.name].append(found)
    parameters = sum(p.numel() for p in gpt.GPT(*SIZE).parameters())
    return {"parameters": parameters, "steps": steps, "batch": batch, "torch": torch.__version__, "runs": runs}


def difference(results: dict[str, Any], name: str) -> list[float]:
    """Held-out loss less that of FP32 weights, per seed."""
    exact = results["runs"][STORAGES[0].name]
    return [a["held_out_loss"] - b["held_out_loss"] for a, b in zip(results["runs"][name], exact, strict=True)]


def print_table(results: dict[str, Any], console: Console) -> None:
    seeds = len(results["runs"][STORAGES[0].name])
    table = Table(title=f"{results['parameters']:,} parameters, {results['steps']} steps, {seeds} seeds")
    for column in ("weights in", "bytes/parameter", "held-out loss", "least - most", "difference from FP32, per seed"):
        table.add_column(column, justify="left" if column == "weights in" else "right")
    for name, runs in results["runs"].items():
        held_out = [run["held_out_loss"] for run in runs]
        cells = [f"{runs[0]['bytes_per_parameter']:.2f}", f"{statistics.fmean(held_out):.4f}"]
        cells += [f"{min(held_out):.4f} - {max(held_out):.4f}"]
        table.add_row(name, *cells, "  ".join(f"{x:+.4f}" for x in difference(results, name)))
    console.print(table)


def plot(results: dict[str, Any], file: Path) -> None:
    """Above the training loss, mean over the seeds; below its distance from the mean of FP32 and the FP32 spread."""

    def smoothed(losses: list[float]) -> Tensor:
        return torch.tensor(losses, dtype=torch.float64).unfold(0, SMOOTH, 1).mean(-1)

    style = {"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 8), layout="constrained")
        top, bottom = figure.subplots(2, sharex=True)
        curves = {name: torch.stack([smoothed(r["losses"]) for r in runs]) for name, runs in results["runs"].items()}
        exact = curves[STORAGES[0].name]
        steps = range(SMOOTH, results["steps"] + 1)
        middle = exact.mean(0)
        low, high = exact.min(0).values - middle, exact.max(0).values - middle
        bottom.fill_between(steps, low.tolist(), high.tolist(), color="#adb5bd", alpha=0.5, label="FP32, all seeds")
        for storage in STORAGES:
            mean = curves[storage.name].mean(0)
            top.plot(steps, mean.tolist(), color=storage.color, label=storage.name)
            if storage is not STORAGES[0]:
                bottom.plot(steps, (mean - middle).tolist(), color=storage.color, label=storage.name)
        top.set_ylabel(f"training loss, nats per byte\n(mean over seeds and {SMOOTH} steps)")
        top.set_yscale("log")
        top.legend()
        widest = 3 * float(torch.maximum(high.abs(), low.abs()).max())
        bottom.set(xlabel="step", ylabel="difference from FP32", ylim=(-widest, widest))
        bottom.legend(fontsize=8)
        figure.savefig(file, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.low_precision", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    console = Console()
    results = measure(options.steps, options.seeds, options.batch, console)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "low_precision.json").write_text(json.dumps(results) + "\n")
    plot(results, options.out / "low_precision.png")
    print_table(results, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
