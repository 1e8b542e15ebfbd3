"""What torch.optim promises, held by Adam8bit and AdamW8bit."""

import copy
import io
import logging
import math
import pickle
import sys

import pytest
import torch

import fused8
from fused8 import Adam8bit, AdamW8bit, backends
from fused8.codecs import CODECS

from .support import (
    DTYPES,
    assert_same_bits,
    assert_same_optimizers,
    hostile_gradient,
    make_parameters,
    parameters,
    set_gradients,
)

SHAPES = ((16, 256), (5, 300), (64,), ())


def stepped(steps=3, shapes=SHAPES, cls=AdamW8bit, **options):
    params = make_parameters(shapes)
    optimizer = cls(params, min_8bit_size=0, **options)
    for step in range(1, steps + 1):
        set_gradients(params, step)
        optimizer.step()
    return optimizer


def quadratic(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    return model, lambda: torch.nn.functional.mse_loss(model(x), y)


# -- against torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, torch_class",
    [
        (dict(weight_decay=0.5, lr=0.1), torch.optim.AdamW),
        (dict(weight_decay=0.5, lr=0.1, decoupled_weight_decay=False), torch.optim.Adam),
        (dict(amsgrad=True), torch.optim.AdamW),
        (dict(maximize=True, betas=(0.5, 0.9), eps=1e-3), torch.optim.AdamW),
    ],
)
def test_32bit_state_follows_torch(options, torch_class):
    """With state_bits 32 only rounding differs. Each of the ~10 FP32 operations of an update rounds by 2^-24; the
    update is at most a few lr, the parameter at most about 4: 30 steps stay within 30 * (10 * 5 lr + 4) * 2^-24."""
    ours, theirs = (make_parameters(((20, 300), (7,)))[:] for _ in range(2))
    lr = options.get("lr", 1e-3)
    a = Adam8bit([{"params": ours, "state_bits": 32}], **{"lr": lr} | options)
    options = {k: v for k, v in options.items() if k != "decoupled_weight_decay"}
    b = torch_class(theirs, **{"lr": lr, "weight_decay": 0.0} | options)
    for _ in range(30):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).abs().max() <= 30 * (50 * lr + 4) * 2**-24


@pytest.mark.parametrize("codec, bound", [("adaptive", 0.03), ("dynamic", 0.15), ("e4m3", 0.3)])
def test_trains_like_adamw(codec, bound):
    losses = []
    for cls, options in ((torch.optim.AdamW, {}), (AdamW8bit, dict(codec=codec, min_8bit_size=0))):
        model, loss_of = quadratic()
        optimizer = cls(model.parameters(), lr=1e-2, **options)
        first = loss_of().item()
        for _ in range(100):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.3 * first
    assert losses[1] == pytest.approx(losses[0], rel=bound)


# -- arguments --------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_peers():
    p = [torch.nn.Parameter(torch.zeros(2))]
    assert Adam8bit(p).defaults["weight_decay"] == 0.0
    group = AdamW8bit(p).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        1e-3,
        (0.9, 0.999),
        1e-8,
        1e-2,
    )
    assert group["decoupled_weight_decay"] and (group["codec"], group["block_size"]) == ("adaptive", 256)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lr=-1.0), "lr"),
        (dict(lr=math.inf), "lr"),
        (dict(lr=math.nan), "lr"),
        (dict(lr="1e-3"), "lr"),
        (dict(lr=torch.zeros(2)), "lr"),
        (dict(lr=torch.ones((), device="meta")), "CPU tensor unless capturable"),
        (dict(lr=10**5000), "a number that is too long to show"),
        (dict(betas=(0.9, 1.0)), "betas"),
        (dict(betas=(-0.1, 0.9)), "betas"),
        (dict(betas=(0.9, torch.tensor(1.5))), "betas"),
        (dict(betas=0.9), "betas"),
        (dict(eps=-1e-8), "eps"),
        (dict(eps=math.nan), "eps"),
        (dict(weight_decay=-1), "weight_decay"),
        (dict(codec="int8"), "codec"),
        (dict(block_size=100), "block_size"),
        (dict(min_8bit_size=-1), "min_8bit_size"),
        (dict(amsgrad="yes"), "amsgrad"),
        (dict(backend="cudnn"), "backend"),
    ],
)
def test_options_out_of_range(options, message):
    p = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=message):
        Adam8bit([p], **options)
    optimizer = Adam8bit([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "name, hint",
    [
        ("optim_bits", "state_bits"),
        ("args", "args"),
        ("is_paged", "paged"),
        ("percentile_clipping", "clip_grad_norm_"),
        ("block_wise", "block_size"),
        ("fused", "fused"),
        ("foreach", "fused"),
        ("no_such_thing", "no_such_thing"),
    ],
)
def test_arguments_of_other_optimizers_are_refused_by_name(name, hint):
    for cls in (Adam8bit, AdamW8bit):
        with pytest.raises(TypeError, match=hint):
            cls([torch.nn.Parameter(torch.zeros(2))], **{name: 32})


def test_adamw_does_not_take_decoupled_weight_decay():
    with pytest.raises(TypeError, match="always decouples"):
        AdamW8bit([torch.nn.Parameter(torch.zeros(2))], decoupled_weight_decay=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fnuz])
def test_parameters_of_other_dtypes_are_refused(dtype):
    good, bad = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3, 3).to(dtype))
    with pytest.raises(TypeError, match=r"parameter 1 of group 0 .*" + str(dtype).removeprefix("torch.")):
        AdamW8bit([good, bad])
    with pytest.raises(TypeError, match=r"parameter 0 of group 1 \(head.weight\)"):
        AdamW8bit([{"params": [("body", good)]}, {"params": [("head.weight", bad)]}])
    optimizer = AdamW8bit([good])
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1


def test_frozen_parameters_of_any_dtype_are_left_alone():
    packed = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW8bit([packed, p])
    p.grad = torch.ones(2)
    optimizer.step()
    assert packed not in optimizer.state and p in optimizer.state


def test_sparse_gradient_is_refused_before_anything_changes():
    embedding = torch.nn.Embedding(300, 16, sparse=True)
    dense = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = AdamW8bit([{"params": [dense]}, {"params": embedding.parameters()}])
    embedding(torch.tensor([1, 2])).sum().backward()
    dense.grad = torch.ones_like(dense)
    with pytest.raises(TypeError, match=r"parameter 0 of group 1.*sparse"):
        optimizer.step()
    assert not optimizer.state and torch.equal(dense, torch.ones(64, 64))


def test_parameters_without_memory_of_their_own_are_refused():
    for p, message in (
        (torch.zeros(3, 3).to_sparse(), "has layout torch.sparse_coo: fused8 updates dense parameters"),
        (torch.zeros(1, 3).expand(3, 3), "is an expanded tensor"),
    ):
        with pytest.raises(TypeError, match=f"parameter 0 of group 0 {message}"):
            AdamW8bit([torch.nn.Parameter(p)])


def test_state_that_was_moved_by_itself_is_refused_before_anything_changes():
    optimizer = stepped()
    before = copy.deepcopy(optimizer)
    p = parameters(optimizer)[1]
    kept = optimizer.state[p]["exp_avg"]
    optimizer.state[p]["exp_avg"] = kept.to("meta")
    set_gradients(parameters(optimizer), 4)
    with pytest.raises(RuntimeError, match="exp_avg of parameter 1 of group 0 is on meta and should be on cpu"):
        optimizer.step()
    optimizer.state[p]["exp_avg"] = kept
    assert_same_optimizers(optimizer, before, "after the error")


def test_a_step_counter_put_there_by_hand_counts():
    """As a number or a tensor; one at the limit is refused."""
    optimizer, twin = stepped(steps=3), stepped(steps=3)
    for i, state in enumerate(optimizer.state.values()):
        state["step"] = 3 if i % 2 else torch.tensor(3.0)
    for step in (4, 5):
        for other in (optimizer, twin):
            set_gradients(parameters(other), step)
            other.step()
    assert_same_optimizers(optimizer, twin, "counted on")
    optimizer.state[parameters(optimizer)[0]]["step"] = 2**24
    with pytest.raises(RuntimeError, match=r"2\^24"):
        optimizer.step()


def test_gradients_of_other_dtypes_are_refused_before_anything_changes():
    good, bad = make_parameters(((2, 2), (2, 2)))
    optimizer = AdamW8bit([good, bad])
    good.grad = torch.ones(2, 2)
    bad.grad_dtype = torch.float64
    bad.grad = torch.ones(2, 2, dtype=torch.float64)
    before = good.detach().clone()
    with pytest.raises(TypeError, match=r"the gradient of parameter 1 of group 0 has dtype torch.float64"):
        optimizer.step()
    assert not optimizer.state and torch.equal(good, before)


# -- any parameter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["adaptive", "dynamic", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_nothing(dtype, codec):
    """Transposed, channels_last and sliced parameters and expanded gradients give the values of contiguous ones, in
    place and with the strides kept."""
    base = torch.randn(300, 40)
    image = torch.randn(8, 16, 5, 5)
    makers = {
        "transposed": lambda: base.clone().to(dtype).t(),
        "channels_last": lambda: image.to(dtype).to(memory_format=torch.channels_last),
        "sliced": lambda: base.clone().to(dtype)[:, 3:37],
    }
    for name, make in makers.items():
        p = torch.nn.Parameter(make())
        q = torch.nn.Parameter(make().contiguous())
        assert not p.is_contiguous()
        strides, pointer = p.stride(), p.data_ptr()
        a, b = AdamW8bit([p], min_8bit_size=0, codec=codec), AdamW8bit([q], min_8bit_size=0, codec=codec)
        for step in range(1, 4):
            g = hostile_gradient(tuple(p.shape), step, dtype)
            if step == 2:
                g = g[:1].expand(p.shape)
            p.grad, q.grad = g, g.clone().contiguous()
            a.step()
            b.step()
            assert p.grad is g
        assert p.stride() == strides and p.data_ptr() == pointer
        assert_same_optimizers(a, b, name)
        assert all(t.is_contiguous() for t in a.state[p].values())


def test_a_parameter_that_views_another_tensor_updates_it():
    base = torch.randn(64, 32)
    before = base.clone()
    p = torch.nn.Parameter(base.t())
    p.grad = torch.ones_like(p)
    AdamW8bit([p]).step()
    assert bool((base < before).all())


def test_tied_parameters_are_stepped_once():
    p, q = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate"):
        a = AdamW8bit([p, p])
    b = AdamW8bit([q])
    for _ in range(2):
        p.grad = q.grad = torch.ones(64, 64)
        a.step()
        b.step()
    assert torch.equal(p, q) and a.state[p]["step"] == 2


def test_zero_gradients_from_zero_state_change_nothing():
    p = torch.nn.Parameter(torch.randn(64, 100))
    before = p.detach().clone()
    optimizer = AdamW8bit([p], lr=1e-2, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)


def test_nonfinite_gradients_count_as_zero_for_themselves_alone():
    p, q = (torch.nn.Parameter(torch.ones(16, 256)) for _ in range(2))
    a, b = AdamW8bit([p]), AdamW8bit([q])
    g = torch.randn(16, 256)
    for poison in (float("nan"), float("inf"), -float("inf"), 1e30):
        g[3, 5] = poison
        p.grad, q.grad = g.clone(), torch.where(g.isfinite() & (g.abs() < 1e19), g, 0.0)
        a.step()
        b.step()
    assert_same_optimizers(a, b, "poisoned")
    assert a.nonfinite_count() == 4 and b.nonfinite_count() == 0


def test_which_parameters_keep_32_bits():
    shapes = {
        (): 32,
        (64, 64): 8,
        (63, 64): 32,  # fewer than 4096 elements
        (4096,): 32,  # 1-D below 2^20
        (1 << 20,): 8,
        (1024, 7): 32,  # rows of fewer than 8
        (1024, 8): 8,
    }
    params = make_parameters(shapes)
    optimizer = AdamW8bit(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, (shape, width) in zip(params, shapes.items(), strict=True):
        state = optimizer.state[p]
        assert state["exp_avg"].element_size() * 8 == width, shape
        assert ("exp_avg_scale" in state) is (width == 8)


def test_state_bits_of_a_group():
    p, q = make_parameters(((64, 64), (64, 64)))
    optimizer = AdamW8bit([{"params": [p], "state_bits": 32}, {"params": [q]}])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert optimizer.state[q]["exp_avg"].dtype == torch.int8
    assert "state_bits" not in AdamW8bit([p]).defaults or AdamW8bit([p]).param_groups[0]["state_bits"] == 8


@pytest.mark.parametrize("codec", CODECS)
def test_amsgrad_never_lets_the_denominator_shrink(codec):
    """With silent gradients the largest second moment stays where it was (rounded to nearest, it does not drift)."""
    optimizer = stepped(amsgrad=True, steps=1, codec=codec)
    p = parameters(optimizer)[0]

    def largest():
        state = optimizer.state[p]
        return CODECS[codec].decode_sq(state["max_exp_avg_sq"], state["max_exp_avg_sq_scale"])

    values = [largest()]
    for _ in range(50):
        p.grad = torch.zeros_like(p)
        optimizer.step()
        values.append(largest())
    # The first silent step may still find an exp_avg_sq that the dither rounded up above it.
    assert bool((values[1] >= values[0]).all())
    assert all(torch.equal(value, values[1]) for value in values[2:])


# -- step, closures, hooks, schedulers --------------------------------------------------------------------------------


def test_closure_is_called_with_gradients_enabled_and_its_loss_returned():
    model, loss_of = quadratic()
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert optimizer.step() is None


def test_an_exception_in_a_closure_changes_nothing():
    optimizer = stepped()
    before = copy.deepcopy(optimizer)

    def closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert_same_optimizers(optimizer, before, "interrupted")


def test_step_hooks_and_version_counters():
    optimizer = stepped(steps=0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    params = parameters(optimizer)
    set_gradients(params, 1)
    versions = [p._version for p in params]
    optimizer.step()
    assert calls == ["pre", "post"]
    assert all(p._version > before for p, before in zip(params, versions, strict=True))


def test_parameters_without_gradients_are_left_alone():
    params = make_parameters(SHAPES)
    optimizer = AdamW8bit(params, min_8bit_size=0)
    optimizer.step()
    assert not optimizer.state
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert list(optimizer.state) == [params[1]]


def test_parameters_that_get_gradients_now_and_then_have_their_own_step():
    """Experts: two parameters that take turns step as two optimizers of one parameter each would."""
    params, twins = make_parameters(((16, 256), (16, 256))), make_parameters(((16, 256), (16, 256)))
    together = AdamW8bit(params)
    apart = [AdamW8bit([q]) for q in twins]
    for step in range(1, 12):
        for i in range(2):
            params[i].grad = twins[i].grad = None
            if step % (i + 2) == 0:
                params[i].grad = hostile_gradient((16, 256), step)
                twins[i].grad = params[i].grad.clone()
                apart[i].step()
        together.step()
    for i in range(2):
        assert_same_bits(params[i], twins[i], f"expert {i}")
        assert together.state[params[i]]["step"] == apart[i].state[twins[i]]["step"] == 11 // (i + 2)


def test_schedulers_move_lr_and_betas():
    params = make_parameters(((16, 256),))
    optimizer = AdamW8bit(params, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    twin = make_parameters(((16, 256),))
    other = AdamW8bit(twin)
    seen = set()
    for step in range(1, 20):
        set_gradients(params, step)
        set_gradients(twin, step)
        group = optimizer.param_groups[0]
        other.param_groups[0].update(lr=float(group["lr"]), betas=tuple(group["betas"]))
        seen.add((group["lr"], group["betas"]))
        optimizer.step()
        scheduler.step()
        other.step()
    assert len(seen) > 10 and len({betas for _, betas in seen}) > 10
    assert_same_optimizers(optimizer, other, "OneCycle")


def test_lr_as_a_tensor():
    a, b = stepped(lr=torch.tensor(0.01)), stepped(lr=torch.tensor(0.01).item())
    assert_same_optimizers(a, b, "tensor lr")
    scheduler = torch.optim.lr_scheduler.StepLR(a, step_size=1, gamma=0.5)
    set_gradients(parameters(a), 4)
    a.step()
    scheduler.step()
    assert isinstance(a.param_groups[0]["lr"], torch.Tensor)
    assert a.param_groups[0]["lr"].item() == pytest.approx(0.005)


def test_a_schedule_that_runs_off_is_refused_before_anything_changes():
    optimizer = stepped()
    before = copy.deepcopy(optimizer)
    optimizer.param_groups[0]["lr"] = math.inf
    set_gradients(parameters(optimizer), 5)
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert_same_optimizers(optimizer, before, "refused")


def test_capturable_computes_the_same_scalars():
    """On a CPU, where float64 pow is the same library's, the device path gives the same bits as the host path."""
    for lr in (1e-3, torch.tensor(1e-3)):
        a, b = stepped(steps=6, capturable=True, lr=lr), stepped(steps=6, lr=lr)
        assert_same_optimizers(a, b, "capturable")


@pytest.mark.parametrize(
    "option, value", [("codec", "dynamic"), ("block_size", 64), ("amsgrad", True), ("state_bits", 32)]
)
def test_formats_cannot_change_once_state_exists(option, value):
    optimizer = stepped()
    optimizer.param_groups[0][option] = value
    set_gradients(parameters(optimizer), 4)
    before = [p.detach().clone() for p in parameters(optimizer)]
    with pytest.raises(ValueError, match=f"cannot change {option}"):
        optimizer.step()
    for p, q in zip(parameters(optimizer), before, strict=True):
        assert torch.equal(p, q)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(stepped()))):
        other.param_groups[0][option] = value
        set_gradients(parameters(other), 4)
        if option in ("codec",) and other.param_groups[0] is not optimizer.param_groups[0]:
            other.param_groups[0][option] = "e4m3"
        with pytest.raises(ValueError, match=option if option == "codec" else "state|cannot change"):
            other.step()


def test_step_counter_stops_before_it_would_lie():
    optimizer = stepped(steps=1)
    for state in optimizer.state.values():
        state["step"].fill_(2**24 - 1)
    set_gradients(parameters(optimizer), 2)
    optimizer.step()
    before = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match=r"2\^24"):
        optimizer.step()
    assert_same_optimizers(optimizer, before, "at the limit")


def test_zero_grad_keeps_or_drops():
    optimizer = stepped()
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters(optimizer))
    set_gradients(parameters(optimizer), 9)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in parameters(optimizer))


# -- GradScaler -------------------------------------------------------------------------------------------------------


def test_grad_scaler_skips_overflow_and_unscales_inside_the_step():
    a, b = make_parameters(((16, 256), (40, 8))), make_parameters(((16, 256), (40, 8)))
    scaled, plain = AdamW8bit(a, min_8bit_size=0), AdamW8bit(b, min_8bit_size=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    scales = []
    for step in range(1, 8):
        overflow = step == 4
        for p, q in zip(a, b, strict=True):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            p.grad = scaler.scale(g)
            if overflow:
                p.grad[0, 0] = float("inf")
            q.grad = g
        scales.append(scaler.get_scale())
        scaler.step(scaled)
        scaler.update()
        if not overflow:
            plain.step()
    assert set(scales) == {2.0**8, 2.0**9}
    assert scaled.state[a[0]]["step"] == 6
    assert_same_optimizers(scaled, plain, "scaled")  # scales are powers of two: unscaling is exact


def test_grad_scaler_with_fp16_parameters():
    (p,) = make_parameters(((16, 256),), torch.float16)
    optimizer = AdamW8bit([p], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    before = p.detach().clone()
    p.grad = (scaler.scale(torch.ones(16, 256)) * 2.0**-4).half()
    scaler.step(optimizer)
    scaler.update()
    assert bool((p < before).all())
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)


# -- copies, pickles, compile -----------------------------------------------------------------------------------------


def test_deepcopy_and_pickle_go_on_alike_and_apart():
    original = stepped(amsgrad=True)
    buffer = io.BytesIO()
    torch.save(original, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(original),
        pickle.loads(pickle.dumps(original)),
        torch.load(buffer, weights_only=False),
    ]
    reference = copy.deepcopy(original)
    for optimizer in [original, *copies]:
        assert_same_optimizers(optimizer, reference, "before")
        set_gradients(parameters(optimizer), 4)
        optimizer.step()
    for other in copies:
        assert_same_optimizers(original, other, "after")
        assert other.nonfinite_count() >= 0


def test_a_replaced_state_tensor_is_noticed():
    """Some wrappers write optimizer.state[p] directly."""
    a, b = stepped(), stepped()
    for optimizer in (a, b):
        set_gradients(parameters(optimizer), 4)
    for p in parameters(a):
        a.state[p] = {name: tensor.clone() for name, tensor in a.state[p].items()}
    a.step()
    b.step()
    assert_same_optimizers(a, b, "replaced")
    p = parameters(a)[0]
    a.state[p]["exp_avg_scale"] = a.state[p]["exp_avg_scale"][:, :0]
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*exp_avg_scale"):
        a.step()


def test_compiled_training_step():
    model, loss_of = quadratic()
    optimizer = AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    @torch.compile(backend="eager")
    def train_step():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    for _ in range(12):
        losses.append(train_step().item())
        scheduler.step()
    assert losses[-1] < losses[0]


# -- backends ---------------------------------------------------------------------------------------------------------


def test_an_explicit_backend_that_cannot_serve_says_why():
    p = torch.nn.Parameter(torch.ones(2, 2, device="meta"))
    optimizer = AdamW8bit([p], backend="cpp")
    p.grad = torch.ones(2, 2, device="meta")
    with pytest.raises(RuntimeError, match=r"'cpp' cannot serve device 'meta'.*CPU"):
        optimizer.step()
    assert not optimizer.state


def test_triton_says_why_it_cannot_serve(monkeypatch):
    triton = pytest.importorskip("triton")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    why_not = backends.BACKENDS["triton"].unavailable
    assert why_not(torch.device("meta")) == "it serves CUDA and ROCm devices, not meta"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "only in Triton's interpreter" in why_not(cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "serves only the CPU" in why_not(gpu) and why_not(cpu) is None
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert why_not(cpu) == "it needs Triton 3.6 or later, this is 3.5.1"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert why_not(cpu).startswith("Triton cannot be imported")


def test_a_library_that_cannot_be_loaded_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "LIBRARY", tmp_path / "libfused8.so")
    load = backends.load_library.__wrapped__  # what it remembers is left alone
    assert load().startswith("the compiled library is missing (libfused8.so)")
    (tmp_path / "libfused8.so").write_text("no library")
    assert load().startswith("the compiled library could not be loaded: ")


@pytest.mark.parametrize("backend", ["cpp", "triton", "reference"])
def test_a_model_of_empty_parameters_is_stepped(backend):
    params = make_parameters(((0,), (3, 0)))
    optimizer = AdamW8bit(params, backend=backend)
    set_gradients(params, 1)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [1, 1]


def test_without_the_library_the_reference_serves_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(backends, "load_library", lambda: "the compiled library is missing")
    backends.select.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="fused8"):
            a = stepped()
        assert [r.message.count("compiled library is missing") for r in caplog.records] == [1]
        with pytest.raises(RuntimeError, match="missing"):
            stepped(backend="cpp", steps=1)
    finally:
        backends.select.cache_clear()
    monkeypatch.undo()
    assert_same_optimizers(a, stepped(), "reference")


def test_public_names():
    assert set(fused8.__all__) >= {"Adam8bit", "AdamW8bit"}
    assert issubclass(AdamW8bit, torch.optim.Optimizer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optim_bits": 32}, "param group 1 has optim_bits, which fused8 does not take.*state_bits: 32"),
        ({"weight_dcay": 0.1}, "param group 1 has weight_dcay, which is no option: did you mean weight_decay"),
        ({"state_bit": 32}, "did you mean state_bits"),
        ({"args": torch.ones(3)}, "param group 1 has args"),
    ],
)
def test_a_misspelt_option_of_a_group_is_refused(options, message):
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    with pytest.raises(TypeError, match=message):
        fused8.AdamW8bit([{"params": params[:1]}, {"params": params[1:2]} | options])
    optimizer = fused8.AdamW8bit([{"params": params[:1]}])
    with pytest.raises(TypeError, match="param group 1"):
        optimizer.add_param_group({"params": params[1:2]} | options)
    assert len(optimizer.param_groups) == 1


def test_groups_may_hold_what_is_not_ours():
    p = torch.nn.Parameter(torch.zeros(4))
    own = {"name": "head", "initial_lr": 0.1, "lr_scale": 0.5, "weight_decay_mult": 1.0, "layer": 3, 7: "seven"}
    optimizer = fused8.AdamW8bit([{"params": [p], **own}])
    assert own.items() <= optimizer.param_groups[0].items()
    theirs = torch.optim.AdamW([p], lr=0.25)
    torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=1.0, total_steps=10)
    fused8.AdamW8bit(theirs.param_groups)  # with foreach, fused, max_lr, max_momentum and so on
    fused8.AdamW8bit(torch.optim.AdamW([p], fused=True).param_groups)
    fused8.AdamW8bit(torch.optim.Rprop([p]).param_groups)  # etas
    fused8.AdamW8bit([{"params": [p], "betas": (0.9, 0.99), "beta3": None, "weight_decay": 0.1, "weight_decay2": 0.2}])


@pytest.mark.parametrize(
    "argument, message",
    [
        ("weigth_decay", "unexpected keyword argument 'weigth_decay'. Did you mean 'weight_decay'"),
        ("state_bits", "does not take state_bits: put `state_bits: 32` into a param group"),
        ("momentum", "unexpected keyword argument 'momentum'$"),
    ],
)
def test_an_argument_that_does_not_exist_says_what_to_do(argument, message):
    with pytest.raises(TypeError, match=message):
        fused8.AdamW8bit([torch.nn.Parameter(torch.zeros(4))], **{argument: 1})


@pytest.mark.parametrize(
    "name, value", [("lr", None), ("lr", "x"), ("betas", None), ("betas", (0.9, None)), ("eps", "x"), ("eps", None)]
)
def test_a_number_that_was_overwritten_by_none_is_named(name, value):
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = fused8.AdamW8bit([p])
    p.grad = torch.ones(4)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"param group 0: {name} must be"):
        optimizer.step()
    assert not p.any() and not optimizer.state


def test_a_parameter_that_was_resized_is_named():
    p = torch.nn.Parameter(torch.zeros(100, 100))
    optimizer = fused8.AdamW8bit([p])
    p.grad = torch.ones(100, 100)
    optimizer.step()
    p.data = torch.zeros(50, 50)
    p.grad = torch.ones(50, 50)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0 has shape \(100, 100\), and the parameter \(50, 50\)"
    ):
        optimizer.step()
