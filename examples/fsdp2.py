"""Train the GPT of gpt.py on several ranks with FSDP2 and 8-bit AdamW; save, and go on with any number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py                                 # on GPUs where there are any
    torchrun --nproc-per-node 3 examples/fsdp2.py --resume fsdp2_out/step-100     # from 2 ranks to 3
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 examples/fsdp2.py
    python examples/fsdp2.py --help

Every rank holds a part of the rows of each parameter, and of its gradient and 8-bit state. All ranks draw the same
batch and take their share of it, so that the number of ranks changes a loss in its last digits only. Needs
fused8[demo], and an --out that all ranks see.
"""

import argparse
import datetime
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from gpt import GPT, SIZES, batch_at, load_text, lr_factor
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fused8


def build(args: argparse.Namespace) -> tuple[nn.Module, fused8.AdamW8bit]:
    torch.manual_seed(args.seed)  # the same weights on every rank, of which each keeps its part
    model = GPT(*SIZES[args.size]).to(args.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # After sharding: the optimizer must hold the sharded parameters.
    groups = fused8.param_groups(model, weight_decay=0.1)
    return model, fused8.AdamW8bit(groups, lr=args.lr, max_grad_norm=1.0)


def train_step(model: nn.Module, optimizer: fused8.AdamW8bit, batch: Tensor) -> float:
    """One step on this rank's share of a batch; the mean loss of the whole batch."""
    own = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
    loss = F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten(), reduction="sum")
    loss = loss / batch[:, 1:].numel()
    (loss * dist.get_world_size()).backward()  # FSDP2 takes the mean of the ranks' gradients; this makes it their sum
    optimizer.step()  # clips by the norm of all ranks
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item()


def save(model: nn.Module, optimizer: fused8.AdamW8bit, step: int, folder: Path) -> None:
    """All ranks write into a temporary folder, which gets the checkpoint's name once it is complete."""
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    if dist.get_rank() == 0:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(model: nn.Module, optimizer: fused8.AdamW8bit, folder: Path) -> int:
    """Restore what any number of ranks saved; how many steps had been done."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return state["step"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog="start it with torchrun")
    parser.add_argument("--steps", type=int, default=200, help="training steps in all (200)")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (small)")
    parser.add_argument("--batch", type=int, default=24, help="windows of text per step, over all ranks (24)")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate (0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (0)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this file, not on the standard library")
    parser.add_argument("--out", type=Path, default="fsdp2_out", help="folder for the checkpoints (fsdp2_out)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="between checkpoints (100)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from this checkpoint")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds until a rank is hung (600)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    if args.batch < int(os.environ["WORLD_SIZE"]):
        parser.error(f"--batch {args.batch} is less than one window for each rank")
    if args.resume and not args.resume.is_dir():
        parser.error(f"--resume {args.resume}: there is no such folder")
    return args


def main() -> None:
    args = parse_arguments()
    args.device = torch.device("cpu")
    if torch.cuda.is_available():
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    # A rank that hangs must not keep the others, and what they cost, for ever.
    timeout = datetime.timedelta(seconds=args.timeout)
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo", timeout=timeout)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None

    text, _ = load_text(args.text)
    model, optimizer = build(args)
    first = load(model, optimizer, args.resume) if args.resume else 0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_factor(step, args.steps)
        loss = train_step(model, optimizer, batch_at(step, text, args))
        say(f"step {step + 1}  loss {loss:.6f}  gradient norm {optimizer.last_grad_norm:.4f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(model, optimizer, step + 1, args.out / f"step-{step + 1}")
    with torch.device("meta"):
        estimate = fused8.estimate_memory(GPT(*SIZES[args.size]), world_size=dist.get_world_size()).per_rank
    held = fused8.memory_report(optimizer).state
    say(f"optimizer state on rank 0: {held:,} bytes; the estimate for the largest rank: {estimate.state.largest:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
