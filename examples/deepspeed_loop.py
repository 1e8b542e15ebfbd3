"""Train the GPT of gpt.py on several ranks with DeepSpeed's ZeRO and 8-bit AdamW; save, and resume.

    torchrun --nproc-per-node 2 examples/deepspeed_loop.py             # or with DeepSpeed's own launcher
    torchrun --nproc-per-node 2 examples/deepspeed_loop.py --resume
    python examples/deepspeed_loop.py --help

ZeRO gives the optimizer one flat FP32 tensor for each param group and rank. From 2^20 elements on its state has 8 bits,
in blocks of 256 elements of the flat tensor; below, and so for norms and biases, 32. Needs deepspeed and fused8[demo];
on CPUs set DS_ACCELERATOR=cpu.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, SIZES, batch_at, load_text

import fused8


def main() -> fused8.AdamW8bit:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default=str(Path(__file__).with_name("deepspeed_zero2.json")), help="of DeepSpeed")
    parser.add_argument("--steps", type=int, default=200, help="training steps in all (200)")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (small)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (0)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this file, not on the standard library")
    parser.add_argument("--out", type=Path, default="deepspeed_out", help="folder for the checkpoints (deepspeed_out)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="between checkpoints (100)")
    parser.add_argument(
        "--resume", nargs="?", const="latest", metavar="TAG", help="go on from a checkpoint, such as step-100"
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = GPT(*SIZES[args.size])
    groups = fused8.param_groups(model, weight_decay=0.1)
    for group in groups:
        del group["param_names"]  # ZeRO puts one flat parameter in the place of many, whose names would not fit it
    optimizer = fused8.AdamW8bit(groups, lr=args.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)
    args.device, args.batch = engine.device, engine.train_batch_size()
    text, _ = load_text(args.text)
    first = 0
    if args.resume:
        tag = None if args.resume == "latest" else args.resume
        _, client = engine.load_checkpoint(str(args.out), tag=tag)
        first = client["step"]
    for step in range(first, args.steps):
        own = batch_at(step, text, args).chunk(dist.get_world_size())[dist.get_rank()]
        loss = F.cross_entropy(engine(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item() / dist.get_world_size():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            engine.save_checkpoint(str(args.out), tag=f"step-{step + 1}", client_state={"step": step + 1})
    if dist.get_rank() == 0:
        memory = fused8.memory_report(optimizer)
        print(
            f"optimizer state on rank 0: {memory.state:,} bytes, {memory.state / memory.parameters:.3f} per parameter"
        )
    dist.destroy_process_group()
    return optimizer


if __name__ == "__main__":
    main()
