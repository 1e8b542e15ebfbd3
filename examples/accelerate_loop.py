"""Fine-tune DistilBERT in a loop of your own with Accelerate and 8-bit AdamW.

    accelerate launch examples/accelerate_loop.py                  # SST-2 and distilbert-base-cased, from the Hub
    python examples/accelerate_loop.py --offline                   # tiny, from what is on the machine
    python examples/accelerate_loop.py --offline --precision bf16  # mixed precision: FP32 weights, bf16 arithmetic
    python examples/accelerate_loop.py --offline --resume          # go on from the state in --out
    accelerate launch --config_file examples/accelerate_fsdp2.yaml examples/accelerate_loop.py  # sharded, on 2 GPUs

Needs fused8[hf], and `datasets` unless --offline. The state is saved after every epoch, and a resumed run ends with
the same bits as one that was never interrupted.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from classification import accuracy_and_f1, collate, load
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import fused8

BATCH = 32


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    model.eval()
    predicted, labels = [], []
    for batch in loader:
        logits = model(**batch).logits
        for own, gathered in ((logits.argmax(-1), predicted), (batch["labels"], labels)):
            gathered.append(accelerator.gather_for_metrics(own).cpu())
    return accuracy_and_f1(torch.cat(predicted), torch.cat(labels))


def main(argv: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    parser = argparse.ArgumentParser(description="Fine-tune DistilBERT with Accelerate and fused8.")
    parser.add_argument("--offline", action="store_true", help="a tiny model, texts from this machine")
    parser.add_argument("--precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    parser.add_argument("--out", type=Path, default=Path("accelerate_out"), help="where the state goes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-after", type=int, metavar="EPOCHS", help="stop early, as if interrupted")
    parser.add_argument("--train-size", type=int, default=2000)
    args = parser.parse_args(argv)

    set_seed(0)
    # The order of the texts follows from the epoch: without this, that of several processes is lost when resuming.
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(mixed_precision=args.precision, dataloader_config=order)
    model, train, evaluation = load(args.offline, args.train_size, eval_size=400)
    groups = fused8.param_groups(model, weight_decay=0.01)
    optimizer = fused8.AdamW8bit(groups, lr=1e-3 if args.offline else 5e-5)
    train_loader = DataLoader(train, BATCH, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(evaluation, BATCH, collate_fn=collate)
    steps = args.epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    first_epoch = 0
    if args.resume:
        accelerator.load_state(args.out / "state")
        first_epoch = int((args.out / "epoch").read_text())
    for epoch in range(first_epoch, args.stop_after or args.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {evaluate(accelerator, model, eval_loader)}")
        accelerator.save_state(args.out / "state")
        (args.out / "epoch").write_text(str(epoch + 1))
    memory = fused8.memory_report(optimizer)
    accelerator.print(f"optimizer state: {memory.state:,} bytes, {memory.state / memory.parameters:.3f} per parameter")
    return accelerator.unwrap_model(model), optimizer.optimizer


if __name__ == "__main__":
    main()
