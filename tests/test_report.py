"""fused8.memory_report: what any optimizer holds, measured."""

import json

import pytest
import torch
from torch import nn

import fused8

from .memory_support import counted, parameters_of, step


def test_report_in_detail():
    model = nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80))
    optimizer = step(model, lr=3e-4, weight_decay=0.1)
    report = fused8.memory_report(optimizer)
    assert report.optimizer == "AdamW8bit" and report.steps == (1, 1)
    assert report.weights == report.gradients == 4 * (8000 + 3 * 80)
    assert report.by_name == {
        "exp_avg": 8000 + 4 * 240,
        "exp_avg_sq": 8000 + 4 * 240,
        "exp_avg_scale": 4 * 80,
        "exp_avg_sq_scale": 4 * 80,
        "step": 16,
    }
    first, second = report.groups
    assert (first.parameters, first.tensors, first.state) == (8000, 1, 16000 + 640 + 4)
    assert (second.parameters, second.tensors, second.state) == (240, 3, 3 * (640 + 4))
    assert first.options == dict(
        state_bits=8, codec="adaptive", block_size=256, amsgrad=False, weight_decay=0.01, lr=3e-4
    )
    assert report.state == first.state + second.state == sum(report.by_dtype.values()) == sum(report.by_name.values())
    assert (report.largest[0].name, report.largest[0].shape) == ("0.weight", (80, 100))
    json.dumps(report.to_dict())


def test_report_before_the_first_step():
    optimizer = fused8.AdamW8bit(fused8.param_groups(nn.Linear(100, 80)))
    report = fused8.memory_report(optimizer)
    assert (report.state, report.parameters, report.gradients, report.steps) == (0, 0, 0, None)
    assert [group.without_state for group in report.groups] == [1, 1]
    assert "have no state" in str(report)


def test_report_of_a_group_whose_names_are_of_other_parameters():
    """DeepSpeed puts one flat parameter in the place of a group's many, and leaves their names."""
    flat = nn.Parameter(torch.zeros(100))
    flat.grad = torch.zeros_like(flat)
    optimizer = fused8.AdamW8bit(fused8.param_groups(nn.Linear(9, 9)))
    optimizer.param_groups[0]["param_names"] = ["a", "b"]
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.step()
    report = fused8.memory_report(optimizer)
    assert (report.state, report.largest[0].name) == (804, "group 0, parameter 0")


def test_report_of_parameters_that_got_no_gradient():
    p, q = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(3))
    p.grad = torch.zeros_like(p)
    optimizer = fused8.AdamW8bit([p, q])
    optimizer.step()
    report = fused8.memory_report(optimizer)
    assert (report.groups[0].tensors, report.groups[0].without_state, report.parameters) == (1, 1, 4096)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.Adam(p, fused=True),
    ],
    ids=["SGD", "Adafactor", "RAdam", "fused Adam"],
)
def test_report_of_torch_optimizers(make):
    optimizer = step(parameters_of(torch.float32), make)
    assert fused8.memory_report(optimizer).state == counted(optimizer) > 0


def test_report_of_nested_and_unowned_state():
    p = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.LBFGS([p])
    optimizer.step(lambda: (p**2 + p).sum().backward() or (p**2 + p).sum())
    optimizer.state["shared"] = {"buffers": [torch.zeros(7), (torch.zeros(3, dtype=torch.int8), "text")]}
    report = fused8.memory_report(optimizer)
    assert report.groups[-1].number is None
    assert report.groups[-1].state == 7 * 4 + 3
    assert report.by_name["buffers"] == 31 and report.by_name["old_dirs"] >= 40


def test_shared_tensors_count_once():
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p, q], lr=0.1)
    shared = torch.zeros(100)
    optimizer.state[p]["map"] = optimizer.state[q]["map"] = shared
    assert fused8.memory_report(optimizer).state == 400


def test_tensor_subclasses_count_as_what_they_consist_of():
    from torch.testing._internal.two_tensor import TwoTensor

    p = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.state[p]["pair"] = TwoTensor(torch.zeros(8), torch.zeros(8))
    assert fused8.memory_report(optimizer).by_dtype == {"float32": 64}


def test_tensors_in_objects_are_counted():
    class Quantized:
        def __init__(self):
            self.codes, self.scales, self.block = torch.zeros(32, dtype=torch.int8), torch.zeros(1), 32

    p = nn.Parameter(torch.zeros(32))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.state[p]["exp_avg"] = Quantized()
    assert fused8.memory_report(optimizer).by_name == {"exp_avg": 36}


def test_text_of_both():
    model = nn.Sequential(nn.Linear(1000, 1000), nn.LayerNorm(1000))
    text = str(fused8.estimate_memory(model))
    assert "1,003,000 parameters" in text and "bitsandbytes" in text and "7.65" in text  # MiB of torch's AdamW
    text = str(fused8.memory_report(step(model)))
    assert "after 1 step" in text and "[1000, 1000]" in text
    assert all(line == line.rstrip() for line in text.splitlines())
