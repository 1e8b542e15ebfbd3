"""Does training end where FP32 AdamW ends?  python -m bench.closed_loop

The demo's GPT (examples/gpt.py), smaller, trained from the same weights on the same batches by each optimizer, for
several seeds. The number is the difference of the final held-out loss from that of FP32 AdamW of the same seed. How
much of it is chance is shown by a second FP32 AdamW that differs only in the order of its operations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from examples import gpt

from . import flash_rule
from .contenders import BASELINE, CODECS, Contender, peers

SIZE = (2, 128)  # layers, width
CHANCE = "torch foreach"
WINDOWS = 256  # of held-out text
Row = dict[str, Any]


def contenders() -> list[Contender]:
    ours = tuple(f"fused8 {codec}" for codec in CODECS)
    chosen = {contender.name: contender for contender in peers()}
    rule = Contender(flash_rule.NAME, flash_rule.FlashRule)
    return [*(chosen[name] for name in (BASELINE, CHANCE, *ours)), rule, chosen["torchao 8-bit"]]


def final_loss(contender: Contender, args: argparse.Namespace, text: Tensor, held_out: Tensor) -> float:
    torch.manual_seed(args.seed)
    model = gpt.GPT(*SIZE)
    run = gpt.Run(model, contender.make(gpt.param_groups(model), lr=args.lr), args.steps)
    for step in range(args.steps):
        run.train_step(gpt.batch_at(step, text, args))
    with torch.no_grad():
        starts = torch.linspace(0, len(held_out) - gpt.CONTEXT - 1, WINDOWS, dtype=torch.float64).long()
        losses = [run.loss(gpt.windows(held_out, part, args.device)).item() for part in starts.split(64)]
    return statistics.fmean(losses)


def measure(
    chosen: Sequence[Contender], steps: int, seeds: int, batch: int = 16, advance: Callable[[str], None] = print
) -> dict[str, Any]:
    """One row per optimizer: its held-out loss per seed, and the difference from FP32's, the first one's."""
    text, held_out = gpt.load_text(None)
    rows: list[Row] = []
    for contender in chosen:
        row: Row = {"name": contender.name, "status": "measured"}
        rows.append(row)
        if reason := contender.missing():
            row.update(status="not available", reason=reason)
            continue
        row["held_out"] = []
        for seed in range(seeds):
            args = argparse.Namespace(seed=seed, steps=steps, batch=batch, lr=1e-3, device=torch.device("cpu"))
            row["held_out"].append(final_loss(contender, args, text, held_out))
            advance(f"{contender.name}, seed {seed}: {row['held_out'][-1]:.4f}")
        exact = rows[0]["held_out"]
        row["difference"] = [a - b for a, b in zip(row["held_out"], exact, strict=True)]
        absolute = [abs(x) for x in row["difference"]]
        row["mean_abs"] = statistics.fmean(absolute)
        row["stdev_abs"] = statistics.stdev(absolute) if seeds > 1 else 0.0
    parameters = sum(p.numel() for p in gpt.GPT(*SIZE).parameters())
    return {"parameters": parameters, "steps": steps, "seeds": seeds, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    from . import report, results

    parser = argparse.ArgumentParser(prog="python -m bench.closed_loop", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args(arguments)
    job = {"part": "closed_loop", "case": "held-out loss", **measure(contenders(), options.steps, options.seeds)}
    report.show({"machine": results.machine(), "jobs": [job]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
