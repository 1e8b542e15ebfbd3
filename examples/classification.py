"""The task that trainer.py, accelerate_loop.py and lightning_module.py share: DistilBERT tells two kinds of text apart.

Online: the sentences of GLUE's SST-2 and the weights of distilbert-base-cased, from the Hub (needs `datasets`).
Offline: code against prose, both cut from Python's standard library, bytes as tokens, and a DistilBERT of the same
architecture that is tiny and randomly initialized. It needs nothing that is not on the machine.
"""

import ast
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

LENGTH = 64  # tokens of a text, truncated or padded
CHECKPOINT = "distilbert-base-cased"


def load(offline: bool, train_size: int, eval_size: int) -> tuple[nn.Module, list[dict], list[dict]]:
    """The model, and the examples to train and to evaluate on: dicts of input_ids, attention_mask and labels."""
    if offline:
        texts, labels = stdlib_texts(train_size + eval_size)
        examples = [encode(text, label) for text, label in zip(texts, labels, strict=True)]
        return tiny_model(), examples[:train_size], examples[train_size:]

    from datasets import load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)

    def tokenized(split: str, size: int) -> list[dict]:
        rows = load_dataset("nyu-mll/glue", "sst2", split=split)
        rows = rows.select(range(min(size, len(rows))))
        batch = tokenizer(list(rows["sentence"]), truncation=True, max_length=LENGTH, padding="max_length")
        columns = ("input_ids", "attention_mask")
        return [{c: batch[c][i] for c in columns} | {"labels": rows[i]["label"]} for i in range(len(rows))]

    model = AutoModelForSequenceClassification.from_pretrained(CHECKPOINT, num_labels=2)
    return model, tokenized("train", train_size), tokenized("validation", eval_size)


def tiny_model() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=257, max_position_embeddings=LENGTH, dim=64, hidden_dim=128, n_layers=2, n_heads=2, num_labels=2
    )
    return DistilBertForSequenceClassification(config)


def encode(text: str, label: int) -> dict:
    """Bytes as tokens 1 to 256; 0 is padding."""
    ids = [byte + 1 for byte in text.encode()[:LENGTH]]
    padding = [0] * (LENGTH - len(ids))
    return {"input_ids": ids + padding, "attention_mask": [1] * len(ids) + padding, "labels": label}


def stdlib_texts(count: int) -> tuple[list[str], list[int]]:
    """Lines of code (0) and of docstrings (1) of Python's standard library, as many of each, shuffled reproducibly."""
    code: list[str] = []
    prose: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if min(len(code), len(prose)) >= count:
            break
        source = file.read_text(encoding="utf-8", errors="replace")
        docstrings = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                docstrings += (ast.get_docstring(node) or "").splitlines()
        lines = {line.strip() for line in docstrings}
        prose += [line for line in sorted(lines) if len(line) >= 30]
        code += [line.strip() for line in source.splitlines() if len(line.strip()) >= 30 and line.strip() not in lines]
    shuffle = random.Random(0).shuffle
    shuffle(code)
    shuffle(prose)
    half = (count + 1) // 2
    if min(len(code), len(prose)) < half:
        raise ValueError(f"the standard library has fewer than {count} texts")
    rows = [(text, 0) for text in code[:half]] + [(text, 1) for text in prose[: count - half]]
    shuffle(rows)
    return [text for text, _ in rows], [label for _, label in rows]


def collate(examples: list[dict]) -> dict[str, Tensor]:
    """Examples -> int64 tensors [batch, LENGTH], labels [batch]."""
    return {key: torch.tensor([example[key] for example in examples]) for key in examples[0]}


def accuracy_and_f1(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, and the F1 score of class 1."""
    hits = int(((predicted == 1) & (labels == 1)).sum())
    claimed_and_real = int((predicted == 1).sum()) + int((labels == 1).sum())
    return {
        "accuracy": (predicted == labels).double().mean().item(),
        "f1": 2 * hits / claimed_and_real if claimed_and_real else 0.0,
    }
