"""Fine-tune DistilBERT with Lightning and 8-bit AdamW.

    python examples/lightning_module.py                     # SST-2 and distilbert-base-cased, from the Hub
    python examples/lightning_module.py --offline           # tiny, from what is on the machine
    python examples/lightning_module.py --offline --resume  # go on from the last checkpoint in --out

Needs lightning and transformers, and `datasets` unless --offline. A resumed run ends with the same bits as one that
was never interrupted.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from classification import accuracy_and_f1, collate, load
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import fused8


class Classifier(lightning.LightningModule):
    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        self.results: list[tuple[Tensor, Tensor]] = []

    def configure_optimizers(self) -> dict:
        optimizer = fused8.AdamW8bit(fused8.param_groups(self, weight_decay=0.01), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.results.append((self.model(**batch).logits.argmax(-1), batch["labels"]))

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["rng"] = torch.get_rng_state()  # order of batches and dropout; Lightning does not save it

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        torch.set_rng_state(checkpoint["rng"])

    def on_validation_epoch_end(self) -> None:
        predicted, labels = (torch.cat(tensors) for tensors in zip(*self.results, strict=True))
        self.results.clear()
        self.log_dict(accuracy_and_f1(predicted, labels))


def main(argv: Sequence[str] | None = None, callbacks: Sequence[lightning.Callback] = ()) -> lightning.Trainer:
    parser = argparse.ArgumentParser(description="Fine-tune DistilBERT with Lightning and fused8.")
    parser.add_argument("--offline", action="store_true", help="a tiny model, texts from this machine")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("lightning_out"), help="where checkpoints go")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train-size", type=int, default=2000)
    args = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    model, train, evaluation = load(args.offline, args.train_size, eval_size=400)
    checkpoints = ModelCheckpoint(args.out, save_last=True, monitor="accuracy", mode="max")
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="auto",
        devices=1,
        callbacks=[checkpoints, *callbacks],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        Classifier(model.train(), lr=1e-3 if args.offline else 5e-5),
        DataLoader(train, 32, shuffle=True, collate_fn=collate),
        DataLoader(evaluation, 32, collate_fn=collate),
        ckpt_path=args.out / "last.ckpt" if args.resume else None,
    )
    print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})
    memory = fused8.memory_report(trainer.optimizers[0])
    print(f"optimizer state: {memory.state:,} bytes, {memory.state / memory.parameters:.3f} per parameter")
    return trainer


if __name__ == "__main__":
    main()
