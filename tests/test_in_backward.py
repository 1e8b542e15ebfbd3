"""Stepping each parameter in backward: the same bits, and handles that come, go and meet others."""

import copy

import pytest
import torch

import fused8
from fused8 import AdamW8bit

from .support import assert_same_optimizers


def tied_model():
    torch.manual_seed(3)
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(50, 64),
            "a": torch.nn.Linear(64, 64),
            "b": torch.nn.Linear(64, 64, dtype=torch.float32),
            "head": torch.nn.Linear(64, 50, bias=False),
        }
    )
    model["head"].weight = model["embedding"].weight
    tokens = torch.randint(0, 50, (8, 16))

    def loss():
        x = torch.utils.checkpoint.checkpoint(model["a"], model["embedding"](tokens), use_reentrant=False)
        return torch.nn.functional.cross_entropy(model["head"](model["b"](x.relu())).flatten(0, 1), tokens.flatten())

    return model, loss


def test_stepping_in_backward_gives_the_same_bits():
    optimizers = []
    for in_backward in (False, True):
        model, loss_of = tied_model()
        optimizer = AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        handle = fused8.step_in_backward(optimizer) if in_backward else None
        for _ in range(6):
            loss_of().backward()
            assert all(p.grad is None for p in model.parameters()) is in_backward
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if handle is not None:
            handle.remove()
            loss_of().backward()
            assert all(p.grad is not None for p in model.parameters())
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_optimizers(*optimizers, "in backward")


def test_gradients_never_exist_all_at_once():
    """What is alive of gradients at any time is at most two layers' worth, although there are 20 layers."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(20)))
    optimizer = AdamW8bit(model.parameters())
    fused8.step_in_backward(optimizer)
    alive, peak = 0, 0

    def count(p):
        nonlocal peak
        peak = max(peak, sum(q.grad.numel() * 4 for q in model.parameters() if q.grad is not None))

    for p in model.parameters():
        p.register_hook(lambda grad: count(grad))
    model(torch.randn(4, 128)).square().mean().backward()
    count(None)
    optimizer.step()
    assert peak <= 2 * 128 * 128 * 4 and alive == 0
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


def test_accumulating_gradients_in_backward_is_refused():
    model, loss_of = tied_model()
    optimizer = AdamW8bit(model.parameters())
    fused8.step_in_backward(optimizer)
    loss_of().backward()
    with pytest.raises(RuntimeError, match="cannot be accumulated"):
        loss_of().backward()
    with pytest.raises(ValueError, match="already"):
        fused8.step_in_backward(optimizer)
    with pytest.raises(ValueError, match="max_grad_norm"):
        fused8.step_in_backward(AdamW8bit(model.parameters(), max_grad_norm=1.0))


# -- handles of step_in_backward --------------------------------------------------------------------------------------


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def backward(model):
    model(torch.ones(2, 8)).square().sum().backward()


def test_gradients_that_no_hook_has_seen_are_stepped_by_step():
    """Of a group that was added later, of a parameter that was frozen, and set by hand."""
    model = small_model()
    model[0].bias.requires_grad_(False)
    optimizer = AdamW8bit(model[0].parameters(), lr=0.1)
    fused8.step_in_backward(optimizer)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model[0].bias.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    backward(model)
    assert model[0].weight.grad is None and model[1].weight.grad is not None
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    with torch.no_grad():
        model[0].weight.grad = torch.ones(8, 8)
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 2


def test_a_handle_does_not_outlive_its_optimizer():
    """Making optimizer and handle anew, as in a notebook, leaves no old hooks that take the gradients."""
    model = small_model()
    first = AdamW8bit(model.parameters(), lr=0.1)
    fused8.step_in_backward(first)
    del first
    second = AdamW8bit(model.parameters(), lr=0.1)
    fused8.step_in_backward(second)
    backward(model)
    second.step()
    assert all(second.state[p]["step"] == 1 for p in model.parameters())
    third = AdamW8bit(model.parameters(), lr=0.1)  # while the second one lives
    with pytest.raises(ValueError, match="another optimizer"):
        fused8.step_in_backward(third)


def test_removing_an_old_handle_leaves_a_newer_one_alone():
    model = small_model()
    optimizer = AdamW8bit(model.parameters())
    old = fused8.step_in_backward(optimizer)
    old.remove()
    fused8.step_in_backward(optimizer)
    old.remove()
    for _ in range(2):
        backward(model)
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in model.parameters())


def test_a_backward_that_did_not_end_is_forgotten_by_zero_grad():
    model = small_model()
    optimizer = AdamW8bit(model.parameters())
    fused8.step_in_backward(optimizer)
    hook = model[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    hook.remove()
    with pytest.raises(RuntimeError, match="zero_grad"):
        backward(model)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_grad_scaler_with_a_handle_is_an_error_that_can_be_left():
    model = small_model()
    optimizer = AdamW8bit(model.parameters())
    handle = fused8.step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    with pytest.raises((RuntimeError, AssertionError), match=r"remove\(\)|inf checks"):
        scaler.step(optimizer)
    handle.remove()
    backward(model)
    optimizer.step()


def test_grad_scaler_where_nothing_has_a_gradient():
    optimizer = AdamW8bit(small_model().parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    optimizer.found_inf = 0  # as GradScaler sets it then
    optimizer.step()
    assert not optimizer.state


def test_a_limit_of_the_norm_that_comes_after_the_handle_is_refused():
    model = small_model()
    optimizer = AdamW8bit(model.parameters())
    fused8.step_in_backward(optimizer)
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        backward(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_step_in_backward_looks_at_one_parameter_only(monkeypatch):
    """Not at all of them for each: the work per parameter does not grow with their number."""
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(4)) for _ in range(300))
    optimizer = AdamW8bit(model.parameters())
    fused8.step_in_backward(optimizer)
    sum((p * p).sum() for p in model).backward()
    optimizer.step()
    looked = 0
    real = fused8.options.hyperparameters

    def counting(group, number):
        nonlocal looked
        looked += 1
        return real(group, number)

    monkeypatch.setattr(fused8.options, "hyperparameters", counting)
    monkeypatch.setattr(optimizer._planner, "_build", lambda *_: pytest.fail("a new plan"))
    sum((p * p).sum() for p in model).backward()
    assert looked == 300


def test_stepping_in_backward_under_ddp_is_refused_before_anything_changes():
    """DDP averages gradients after they are complete: each rank would step with its own."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(small_model())
        optimizer = AdamW8bit(model.parameters())
        handle = fused8.step_in_backward(optimizer)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*fully_shard"):
            backward(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        handle.remove()
        optimizer.zero_grad()
        del model
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrong", [torch.optim.AdamW([torch.zeros(1)]), torch.nn.Linear(1, 1)])
def test_only_our_optimizers_step_in_backward(wrong):
    with pytest.raises(TypeError, match="step_in_backward takes an Adam8bit or AdamW8bit"):
        fused8.step_in_backward(wrong)
