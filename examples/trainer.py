"""Fine-tune DistilBERT with the Trainer of transformers and 8-bit AdamW.

    python examples/trainer.py                              # SST-2 and distilbert-base-cased, from the Hub
    python examples/trainer.py --offline                    # tiny, from what is on the machine: a minute on a CPU
    python examples/trainer.py --offline --optimizer class  # the Trainer makes the optimizer
    python examples/trainer.py --offline --resume           # go on from the last checkpoint in --out

Needs fused8[hf], and `datasets` unless --offline. A run that was killed and resumed ends with the same bits as one
that was not.
"""

import argparse
from collections.abc import Sequence

import torch
from classification import accuracy_and_f1, collate, load
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments, set_seed

import fused8


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    return accuracy_and_f1(logits.argmax(-1), labels)


def main(argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    parser = argparse.ArgumentParser(description="Fine-tune DistilBERT with the Trainer and fused8.")
    parser.add_argument("--offline", action="store_true", help="a tiny model, texts from this machine")
    parser.add_argument("--optimizer", choices=["object", "class"], default="object")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--out", default="trainer_out", help="where checkpoints go")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train-size", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    args = parser.parse_args(argv)

    set_seed(0)
    model, train, evaluation = load(args.offline, args.train_size, eval_size=400)
    training = TrainingArguments(
        output_dir=args.out,
        learning_rate=1e-3 if args.offline else 5e-5,
        weight_decay=0.01,
        warmup_steps=20,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=32,
        eval_strategy="epoch",
        save_steps=args.save_every,
        save_total_limit=2,
        logging_steps=20,
        report_to="none",
    )

    if args.optimizer == "object":
        groups = fused8.param_groups(model, weight_decay=training.weight_decay)
        optimizer = {"optimizers": (fused8.AdamW8bit(groups, lr=training.learning_rate), None)}
    else:
        optimizer = {"optimizer_cls_and_kwargs": fused8.trainer_kwargs(training)}

    trainer = Trainer(
        model,
        training,
        data_collator=collate,
        train_dataset=train,
        eval_dataset=evaluation,
        compute_metrics=metrics,
        callbacks=[*callbacks],
        **optimizer,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    memory = fused8.memory_report(trainer.optimizer)
    print(f"optimizer state: {memory.state:,} bytes, {memory.state / memory.parameters:.3f} per parameter")
    return trainer


if __name__ == "__main__":
    main()
