"""examples/fp8_weights.py: weights of one byte learn as FP32 ones do."""

import argparse
import importlib
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

import fused8

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 60


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("fp8_weights")
    module.text = module.load_text(None)[0]
    return module


def final_loss(example, dtype, **options):
    """The mean loss of the last 10 steps, and the model."""
    torch.manual_seed(0)
    model = example.GPT(1, 64)
    if dtype is not None:
        example.store_linear_weights_in_fp8(model, dtype)
    optimizer = fused8.AdamW8bit(example.param_groups(model, 2e-3, 0.1), lr=2e-3, **options)
    args = argparse.Namespace(steps=STEPS, batch=4, seed=0, device=torch.device("cpu"), verbose=False)
    losses = example.train(model, optimizer, example.text, args)
    return statistics.fmean(losses[-10:]), model


def test_fp8_weights_learn(example):
    """Within 5 % of FP32 weights: rounding noise of relative size 2^-4 is there in each weight, but not in their mean.
    Rounded to nearest most updates are lost, and the loss shows it."""
    exact, _ = final_loss(example, None)
    for dtype, options in (
        (torch.float8_e4m3fn, {}),
        (torch.float8_e4m3fn, {"master_bits": 16}),
        (torch.float8_e5m2, {}),
    ):
        loss, model = final_loss(example, dtype, **options)
        linear = [module for module in model.modules() if isinstance(module, example.FP8Linear)]
        assert len(linear) == 5 and not any(isinstance(module, nn.Linear) for module in model.modules())
        assert all(module.weight.dtype == dtype for module in linear)
        assert loss < exact * 1.05, (dtype, options, loss, exact)
    nearest, _ = final_loss(example, torch.float8_e4m3fn, param_rounding="nearest")
    assert nearest > loss


def test_gradients_of_fp8_weights_are_not_rounded(example):
    torch.manual_seed(0)
    linear = nn.Linear(16, 8, bias=False)
    layer = example.FP8Linear(linear, torch.float8_e4m3fn)
    x = torch.randn(4, 16)
    layer(x).square().sum().backward()
    weight = (layer.weight.detach().float() * layer.unit).requires_grad_()
    (x @ weight.t()).square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.allclose(layer.weight.grad, weight.grad * layer.unit, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
