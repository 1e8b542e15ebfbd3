"""Train one small GPT twice, with torch.optim.AdamW and with fused8.AdamW8bit, and compare the two.

    python examples/gpt.py                         # about three minutes on two CPU cores
    python examples/gpt.py --size tiny --steps 60  # a glimpse in seconds
    python examples/gpt.py --text my_book.txt      # on a text of your own
    python examples/gpt.py --help                  # the other options

The text is the source code of Python's standard library, which is on every machine; every tenth file is held out.
Both runs start from the same weights and take turns on the same batches, so that losses and step times compare.
Half-way each writes a checkpoint. It is resumed later in fresh objects, followed for some steps and compared, bit for
bit, with the run that was not interrupted. The results are printed as a table and written to --out as gpt.json and
gpt.png. Everything is computed in FP32. Needs rich and matplotlib besides torch and fused8.
"""

import argparse
import json
import math
import os
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn, track
from rich.table import Table
from torch import Tensor, nn

import fused8

ADAMW, ADAMW8BIT = "AdamW", "AdamW8bit"
SIZES = {"tiny": (1, 256), "small": (4, 256), "base": (6, 384)}  # layers, width
CONTEXT = 64  # bytes of text in a window
HEAD_WIDTH = 64
RESUMED_STEPS = 20  # how long a resumed run is followed
FINAL_STEPS = 50  # whose mean is the final training loss


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding; x is [batch, heads, length, HEAD_WIDTH]."""
    frequency = 1000.0 ** -torch.linspace(0, 1, HEAD_WIDTH // 2, device=x.device)
    angle = torch.arange(x.shape[2], device=x.device)[:, None] * frequency
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class GPT(nn.Module):
    """A GPT over bytes: tokens [batch, length] to logits [batch, length, 256]."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def param_groups(model: nn.Module) -> list[dict]:
    """Matrices are decayed; biases and norms are not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def lr_factor(step: int, steps: int) -> float:
    """A linear warmup over the first twentieth of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


class Run:
    """One model in training, and what was measured on the way."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int):
        self.model, self.optimizer = model, optimizer
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps))
        self.losses: list[float] = []
        self.optimizer_ms: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross entropy, in nats per byte."""
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def train_step(self, batch: Tensor) -> None:
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        began = now(batch.device)
        self.optimizer.step()
        self.optimizer_ms.append(1e3 * (now(batch.device) - began))
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def save(self, file: Path, step: int) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        torch.save({"step": step} | {key: part.state_dict() for key, part in parts.items()}, file)

    def load(self, file: Path) -> int:
        """Restore everything from a checkpoint; the step to go on with."""
        checkpoint = torch.load(file, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.schedule.load_state_dict(checkpoint["schedule"])
        return checkpoint["step"]

    def snapshot(self) -> dict[str, bytes]:
        """The bits of all parameters and of every tensor of the optimizer's state."""
        tensors = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            tensors |= {f"{name}/{key}": value for key, value in self.optimizer.state[p].items()}
        return {name: tensor.cpu().numpy().tobytes() for name, tensor in tensors.items()}

    @torch.no_grad()
    def held_out_loss(self, text: Tensor, device: torch.device) -> float:
        """The mean loss over 1024 windows (fewer if it is short), evenly spread over the held-out text."""
        count = len(text) - CONTEXT
        starts = torch.linspace(0, count - 1, min(1024, count), dtype=torch.float64).long()
        return statistics.fmean(self.loss(windows(text, part, device)).item() for part in starts.split(64))


def build_run(name: str, args: argparse.Namespace, seed: int) -> Run:
    torch.manual_seed(seed)
    model = GPT(*SIZES[args.size]).to(args.device)
    groups = param_groups(model)
    if name == ADAMW8BIT:
        return Run(model, fused8.AdamW8bit(groups, lr=args.lr, codec=args.codec), args.steps)
    return Run(model, torch.optim.AdamW(groups, lr=args.lr, fused=True), args.steps)


def now(device: torch.device) -> float:
    """The time in seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def load_text(file: Path | None) -> list[Tensor]:
    """The bytes to train on and the held-out ones: of `file` its last tenth, else every tenth file of the library."""
    if file is not None:
        text = file.read_bytes()
        cut = len(text) * 9 // 10
        parts = [text[:cut], text[cut:]]
    else:
        library = Path(sysconfig.get_path("stdlib"))
        left_out = {"test", "tests", "idlelib", "encodings", "site-packages", "dist-packages"}
        paths = sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py"))
        texts = [(library / path).read_bytes() for path in paths if left_out.isdisjoint(path.split("/"))]
        parts = [b"".join(text for index, text in enumerate(texts) if index % 10 != 9), b"".join(texts[9::10])]
    if min(map(len, parts)) <= CONTEXT:
        raise ValueError(f"the text is too short: {sum(map(len, parts))} bytes, of {10 * (CONTEXT + 1)} at least")
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


def windows(text: Tensor, starts: Tensor, device: torch.device) -> Tensor:
    return text[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(device)


def batch_at(step: int, text: Tensor, args: argparse.Namespace) -> Tensor:
    """The batch of one step. It follows from the seed and the step alone, so a resumed run sees the same batches."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    return windows(text, torch.randint(len(text) - CONTEXT, (args.batch,), generator=generator), args.device)


def train(args: argparse.Namespace, text: Tensor, folder: Path, console: Console) -> tuple[dict, dict]:
    """Both runs, trained, with a checkpoint of each in `folder`; and their snapshots at the step to compare."""
    runs = {name: build_run(name, args, args.seed) for name in (ADAMW, ADAMW8BIT)}
    snapshots = {}
    columns = "Training", BarColumn(10), MofNCompleteColumn(), "{task.description} ms/step ETA", TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=args.steps)
        began = time.perf_counter()
        for step in range(args.steps):
            batch = batch_at(step, text, args)
            for name, run in runs.items():
                if step == args.steps // 2:
                    run.save(folder / name, step)
                run.train_step(batch)
                if step + 1 == compared_step(args):
                    snapshots[name] = run.snapshot()
            losses = " ".join(f"{name} {run.losses[-1]:.3f}" for name, run in runs.items())
            ms = 1e3 * (time.perf_counter() - began) / (step + 1) / len(runs)
            progress.update(bar, advance=1, description=f"{losses} {ms:.0f}")
            if not console.is_terminal and (step + 1) % 50 == 0:  # a log has no bar
                progress.print(f"step {step + 1}: {losses}, {ms:.0f} ms per step")
    return runs, snapshots


def resume(name: str, args: argparse.Namespace, text: Tensor, folder: Path, console: Console) -> dict[str, bytes]:
    """The snapshot, at the same step, of a run that was resumed from the checkpoint."""
    run = build_run(name, args, args.seed + 1)  # other weights: the right ones can only come from the checkpoint
    first = run.load(folder / name)
    for step in track(range(first, compared_step(args)), f"Resuming {name}", console=console):
        run.train_step(batch_at(step, text, args))
    return run.snapshot()


def compared_step(args: argparse.Namespace) -> int:
    return min(args.steps // 2 + RESUMED_STEPS, args.steps)


def measure(run: Run, held_out: Tensor, device: torch.device) -> dict:
    """The numbers of the table. The size of the state is taken from the tensors that lie in memory."""
    sizes = {p: sum(t.numel() * t.element_size() for t in state.values()) for p, state in run.optimizer.state.items()}
    quantized = [p for p, state in run.optimizer.state.items() if state["exp_avg"].element_size() == 1]
    numbers = {
        "training_loss": statistics.fmean(run.losses[-FINAL_STEPS:]),
        "held_out_loss": run.held_out_loss(held_out, device),
        "optimizer_ms": statistics.median(run.optimizer_ms),
        "state_bytes": sum(sizes.values()),
        "bytes_per_parameter": sum(sizes.values()) / sum(p.numel() for p in sizes),
    }
    if quantized:
        count = sum(p.numel() for p in quantized)
        numbers["bytes_per_quantized_parameter"] = sum(sizes[p] for p in quantized) / count
    return numbers


def print_table(results: dict, console: Console) -> None:
    theirs, ours = results["runs"][ADAMW], results["runs"][ADAMW8BIT]
    table = Table(title=f"A GPT of {results['parameters']:,} parameters after {results['steps']} steps")
    for column in ("", ADAMW, ADAMW8BIT, "difference"):
        table.add_column(column, justify="right" if column else "left")
    for label, key, form in (
        ("training loss, nats per byte", "training_loss", ".4f"),
        ("held-out loss, nats per byte", "held_out_loss", ".4f"),
        ("optimizer state, bytes", "state_bytes", ",d"),
        ("  per parameter", "bytes_per_parameter", ".3f"),
        ("  per quantized parameter", "bytes_per_quantized_parameter", ".3f"),
        ("optimizer step, ms", "optimizer_ms", ".2f"),
    ):
        cells = [format(run[key], form) if key in run else "" for run in (theirs, ours)]
        table.add_row(label, *cells, f"{100 * (ours[key] / theirs[key] - 1):+.2f} %" if key in theirs else "")
    table.add_row("resumes bit for bit", *("yes" if run["resume_is_exact"] else "NO" for run in (theirs, ours)), "")
    console.print(table)


def plot(results: dict, file: Path) -> None:
    matplotlib.rcParams.update({"font.size": 13, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    steps = range(1, results["steps"] + 1)
    smooth = {}
    for name, color, width in ((ADAMW, "#9aa0a6", 6), (ADAMW8BIT, "#d9480f", 2)):
        run = results["runs"][name]
        smooth[name] = [statistics.fmean(run["losses"][max(0, step - 11) : step + 10]) for step in steps]
        label = f"{name}: held-out {run['held_out_loss']:.3f}, {run['bytes_per_parameter']:.2f} B of state/parameter"
        top.plot(steps, run["losses"], color=color, alpha=0.3, linewidth=0.8)
        top.plot(steps, smooth[name], color=color, linewidth=width, label=label)
    top.set_ylabel("training loss (nats per byte)")
    top.legend()
    gap = [100 * (ours / theirs - 1) for theirs, ours in zip(smooth[ADAMW], smooth[ADAMW8BIT], strict=True)]
    limit = 1.1 * max(1.0, *map(abs, gap))
    bottom.plot(steps, gap, color="#d9480f", linewidth=2)
    bottom.set(xlabel="step", ylabel="8-bit vs.\nAdamW (%)", ylim=(-limit, limit))
    figure.savefig(file, dpi=150)


def parse_arguments() -> tuple[argparse.Namespace, list[Tensor]]:
    """The options and the text they name. What is wrong with them is said in one line; the exit code is then 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("--steps", type=int, default=500, help="training steps of each run (500)")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (small)")
    parser.add_argument("--codec", choices=("adaptive", "dynamic", "e4m3"), default="adaptive", help="state format")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this file, not on the standard library")
    parser.add_argument("--out", type=Path, default="demo_out", help="folder for gpt.json and gpt.png (demo_out)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if available")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate (0.001)")
    parser.add_argument("--batch", type=int, default=16, help=f"windows of {CONTEXT} bytes per step (16)")
    args = parser.parse_args()
    for name in ("steps", "lr", "batch"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} must be positive, not {getattr(args, name)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        return args, load_text(args.text)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def main() -> None:
    args, (text, held_out) = parse_arguments()
    # A GPT's backward pass on a GPU is not reproducible without these; the optimizer's step is in any case.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    began = time.perf_counter()
    console = Console()
    console.print(f"{args.steps} steps on {len(text):,} bytes of text, two runs in turn, on {args.device}")
    with tempfile.TemporaryDirectory() as folder:
        runs, snapshots = train(args, text, Path(folder), console)
        exact = {name: resume(name, args, text, Path(folder), console) == snapshots[name] for name in runs}
    results = vars(args) | {
        "parameters": sum(p.numel() for p in runs[ADAMW].model.parameters()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "runs": {
            name: measure(run, held_out, args.device) | {"resume_is_exact": exact[name], "losses": run.losses}
            for name, run in runs.items()
        },
    }
    print_table(results, console)
    plot(results, args.out / "gpt.png")
    (args.out / "gpt.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
    console.print(f"{time.perf_counter() - began:.0f} s; gpt.png and gpt.json are in {args.out}")


if __name__ == "__main__":
    main()
