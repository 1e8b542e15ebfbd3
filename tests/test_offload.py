"""State in CPU memory: the same bits as without, whatever the order in which copies really happen.

There is no accelerator here. The device is played by CPU memory, and its copies by `Late`, which makes each one at the
last moment that is allowed: what does not wait for a copy then works on old data.
"""

import copy

import pytest
import torch

import fused8
from fused8 import AdamW8bit, offload

from .support import assert_same_bits, assert_same_optimizers, make_parameters, parameters, set_gradients

SHAPES = ((16, 256), (5, 300), (64,), (), (2, 3, 40))


class Late:
    """A device whose copies are made when somebody waits for them, and not before."""

    def __init__(self, device):
        self.down = self.up = 0
        self.sent = []
        devices.append(self)

    def fetch(self, grad, to):
        self.down += grad.numel() * grad.element_size()
        grad = grad.clone()  # in the order of the device's stream: as it is now
        to.fill_(float("nan"))

        def wait():
            for sent in self.sent:  # copies are made in order
                sent()
            self.sent.clear()
            to.copy_(grad)

        return wait

    def send(self, weight, to):
        self.up += weight.numel() * weight.element_size()
        # Here a device would write without the version counter, which the call of copy_ has moved.
        torch.autograd.graph.increment_version([to])
        self.sent.append(lambda: to.data.copy_(weight))

    def finish(self):
        with torch.no_grad():
            for sent in self.sent:
                sent()
        self.sent.clear()


devices: list[Late] = []


@pytest.fixture(autouse=True)
def late(monkeypatch):
    monkeypatch.setitem(offload.TRANSFERS, "cpu", Late)
    monkeypatch.setattr(offload, "PIECE_BYTES", 1 << 12)  # several pieces
    devices.clear()


def pair(dtype=torch.float32, **options):
    """Two equal optimizers, the first of which offloads."""
    options = {"min_8bit_size": 0, "lr": 1e-2} | options
    return (AdamW8bit(make_parameters(SHAPES, dtype), **options, offload=place) for place in ("cpu", None))


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {}),
        (torch.float32, dict(codec="dynamic", amsgrad=True, block_size=64)),
        (torch.float32, dict(state_bits=32)),
        (torch.bfloat16, dict(master_bits=24)),
        (torch.bfloat16, dict(master_bits=32, max_grad_norm=1.0)),
        (torch.float16, dict(param_rounding="stochastic")),
        (torch.bfloat16, dict(backend="reference")),
    ],
)
def test_offloaded_steps_have_the_same_bits(dtype, options):
    state_bits = options.pop("state_bits", 8)
    ours, truth = pair(dtype, **options)
    for optimizer in (ours, truth):
        optimizer.param_groups[0]["state_bits"] = state_bits
    for step in range(1, 5):
        for optimizer in (ours, truth):
            set_gradients(parameters(optimizer), step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_same_optimizers(ours, truth, str(options))
    assert ours.nonfinite_count() == truth.nonfinite_count() > 0


def test_a_step_moves_each_gradient_down_and_each_weight_up():
    ours, _ = pair(torch.bfloat16, master_bits=32)
    for step in (1, 2, 3):
        set_gradients(parameters(ours), step)
        ours.step()
    (device,) = devices
    weights = 2 * sum(p.numel() for p in parameters(ours))
    assert device.down == 3 * weights + weights and device.up == 3 * weights  # the weights come down once, at first


def test_other_strides_than_contiguous():
    ours, truth = (
        AdamW8bit([torch.nn.Parameter(torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).t())], offload=o)
        for o in ("cpu", None)
    )
    for step in range(3):
        for optimizer in (ours, truth):
            (p,) = parameters(optimizer)
            p.grad = torch.randn(48, 64, generator=torch.Generator().manual_seed(step)).t().contiguous().t()
            optimizer.step()
    assert_same_optimizers(ours, truth, "transposed")


def test_a_weight_that_somebody_else_writes_is_taken_over():
    ours, truth = pair()
    for step in range(1, 4):
        for optimizer in (ours, truth):
            set_gradients(parameters(optimizer), step)
            optimizer.step()
            with torch.no_grad():
                parameters(optimizer)[0].mul_(1.5)
    assert_same_optimizers(ours, truth, "written")


def test_saved_and_resumed_and_copied():
    ours, truth = pair(torch.bfloat16, master_bits=24)
    for optimizer in (ours, truth):
        set_gradients(parameters(optimizer), 1)
        optimizer.step()
    copied = copy.deepcopy(ours)
    fresh, _ = pair(torch.bfloat16, master_bits=24)
    with torch.no_grad():
        for p, q in zip(parameters(fresh), parameters(truth), strict=True):
            p.copy_(q)
    fresh.load_state_dict(truth.state_dict())  # from one that does not offload
    assert fresh.param_groups[0]["offload"] == "cpu"
    for optimizer in (ours, truth, copied, fresh):
        set_gradients(parameters(optimizer), 2)
        optimizer.step()
    for optimizer in (ours, copied, fresh):
        assert_same_optimizers(optimizer, truth, "resumed")


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(6)))


def test_the_cpu_steps_during_backward():
    """Also where some groups are offloaded and others are not."""
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    optimizers = []
    for place, in_backward in ((None, False), ("cpu", True), ("cpu", False)):
        model = network()
        groups = [{"params": model[:3].parameters(), "offload": place}, {"params": model[3:].parameters()}]
        optimizer = AdamW8bit(groups, lr=1e-2, min_8bit_size=0)
        handle = fused8.step_in_backward(optimizer) if in_backward else None
        for _ in range(5):
            model(x).square().mean().backward()
            if in_backward:
                assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
            model(x).square().mean().backward()
            optimizer.step()
        else:
            model(x).square().mean().backward()
            optimizer.step()
        optimizers.append(optimizer)
    for optimizer in optimizers[1:]:
        assert_same_optimizers(optimizer, optimizers[0], "in backward")


def test_an_error_of_the_worker_is_raised_by_step(monkeypatch):
    model = network()
    optimizer = AdamW8bit(model.parameters(), offload="cpu")
    handle = fused8.step_in_backward(optimizer)
    monkeypatch.setattr(fused8.ops, "adam_step", lambda *args, **kwargs: 1 / 0)
    model(torch.randn(2, 96)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    monkeypatch.undo()
    model(torch.randn(2, 96)).sum().backward()
    optimizer.step()
    handle.remove()


def test_grad_scaler():
    ours, truth = pair()
    for optimizer in (ours, truth):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in (1, 2, 3):
            for p in parameters(optimizer):
                p.grad = 4 * torch.ones_like(p)
            if step == 2:
                parameters(optimizer)[0].grad[0, 0] = float("inf")
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[parameters(optimizer)[0]]["step"] == 2
    assert_same_optimizers(ours, truth, "scaled")


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(
        TypeError, match=r"parameter 0 of group 0 is on meta: state is offloaded from cuda and cpu only"
    ):
        AdamW8bit([torch.nn.Parameter(torch.empty(4, 4, device="meta"))], offload="cpu")
    with pytest.raises(ValueError, match="offload must be None or cpu, got 'disk'"):
        AdamW8bit(make_parameters([(2, 2)]), offload="disk")
    with pytest.raises(ValueError, match="capturable"):
        AdamW8bit(make_parameters([(2, 2)]), offload="cpu", capturable=True)
    optimizer = AdamW8bit(make_parameters([(2, 2)]))
    set_gradients(parameters(optimizer), 1)
    optimizer.step()
    optimizer.param_groups[0]["offload"] = "cpu"
    with pytest.raises(ValueError, match="cannot change offload"):
        optimizer.step()


def test_parameters_in_cpu_memory_are_copied_too(monkeypatch):
    """Pointless but right: what a program that also runs on a GPU does here."""
    monkeypatch.setitem(offload.TRANSFERS, "cpu", offload.HostTransfer)
    ours, truth = pair()
    for step in (1, 2):
        for optimizer in (ours, truth):
            set_gradients(parameters(optimizer), step)
            optimizer.step()
    assert_same_optimizers(ours, truth, "in CPU memory")
    assert_same_bits(parameters(ours)[0].detach(), parameters(truth)[0].detach(), "weight")
