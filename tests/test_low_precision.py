"""Parameters of 16 and 8 bits: stochastic rounding, extra mantissa bits, FP8; clipping."""

import copy
import math
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fused8
from fused8 import AdamW8bit

from .support import (
    assert_same_bits,
    assert_same_optimizers,
    bits,
    make_parameters,
    parameters,
    set_gradients,
    through_file,
)

SHAPES = ((16, 256), (5, 300), (64,), ())
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def stepped(dtype, steps=10, grad_dtype=torch.float32, shapes=SHAPES, **options):
    params = make_parameters(shapes, dtype)
    optimizer = AdamW8bit(params, **{"min_8bit_size": 0, "lr": 1e-3} | options)
    return advance(optimizer, 1, steps, grad_dtype)


def advance(optimizer, first, last, grad_dtype=torch.float32):
    for step in range(first, last + 1):
        set_gradients(parameters(optimizer), step, grad_dtype)
        optimizer.step()
    return optimizer


# -- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_add_up_only_when_rounded_stochastically(dtype):
    """400 steps of 1/64 of a code: to nearest nothing moves; stochastically the mean moves as it should. The mean of
    n elements after k steps has a standard error of at most sqrt(k / n) / 2 codes."""
    code = torch.finfo(dtype).eps
    n, k = 64 * 256, 400
    moved = {}
    for rounding in ("nearest", "stochastic"):
        p = torch.nn.Parameter(torch.full((64, 256), 1.5, dtype=dtype))
        optimizer = AdamW8bit([p], lr=code / 64, weight_decay=0.0, param_rounding=rounding)
        for _ in range(k):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[rounding] = (1.5 - p.double().mean().item()) / code
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(k / 64, abs=5 * 0.5 * math.sqrt(k / n) + 0.01)


def test_weight_decay_is_part_of_what_is_rounded():
    """Decay alone, far below one code per step, shrinks a stochastically rounded parameter."""
    p = torch.nn.Parameter(torch.full((64, 256), 1.5, dtype=torch.bfloat16))
    optimizer = AdamW8bit([p], lr=1e-3, weight_decay=0.1, param_rounding="stochastic")
    for _ in range(500):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert p.double().mean().item() == pytest.approx(1.5 * (1 - 1e-4) ** 500, abs=1e-3)


def test_rounding_is_reproducible_and_seeded():
    options = dict(param_rounding="stochastic")
    a = stepped(torch.bfloat16, **options)
    assert_same_optimizers(a, stepped(torch.bfloat16, **options), "again")
    b = stepped(torch.bfloat16, rounding_seed=1, **options)
    assert not torch.equal(parameters(a)[0], parameters(b)[0])
    with pytest.raises(ValueError, match="param_rounding"):
        AdamW8bit(make_parameters([(2,)]), param_rounding="up")


def test_rounding_does_not_touch_fp32():
    assert_same_optimizers(
        stepped(torch.float32, param_rounding="stochastic"), stepped(torch.float32), "FP32 has nothing to round"
    )


# -- extra mantissa bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["adaptive", "dynamic", "e4m3"])
def test_bfloat16_with_32_bits_is_fp32_bit_for_bit(codec):
    """The same gradients give an FP32 parameter and a BF16 parameter with 16 more bits the same values."""
    start = [p.detach().bfloat16().float() for p in make_parameters(SHAPES)]
    full = AdamW8bit([torch.nn.Parameter(p.clone()) for p in start], min_8bit_size=0, codec=codec)
    split = AdamW8bit([torch.nn.Parameter(p.bfloat16()) for p in start], min_8bit_size=0, codec=codec, master_bits=32)
    advance(full, 1, 10)
    advance(split, 1, 10)
    for p, q in zip(parameters(full), parameters(split), strict=True):
        master = fused8.formats.decode(q.detach(), split.state[q]["param_correction"])
        assert_same_bits(master, p.detach(), codec)
        assert_same_bits(split.state[q]["exp_avg"], full.state[p]["exp_avg"], codec)


@pytest.mark.parametrize("dtype, master_bits", [(torch.bfloat16, 24), (torch.float16, 24), (torch.float16, 32)])
def test_extra_bits_follow_fp32(dtype, master_bits):
    """Each step rounds the parameter once, by at most half of the last extra bit: 200 steps stay within 100 of them
    (and what the changed parameters change by themselves is nothing: the gradients are given)."""
    start = make_parameters([(16, 256)])[0].detach().clamp(-2, 2).to(dtype).float()
    full, split = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.to(dtype))
    a = AdamW8bit([full], lr=1e-4, weight_decay=0.0)
    b = AdamW8bit([split], lr=1e-4, weight_decay=0.0, master_bits=master_bits)
    split.grad_dtype = None
    for _ in range(200):
        full.grad = torch.randn(16, 256)
        split.grad = full.grad.clone()
        a.step()
        b.step()
    master = fused8.formats.decode(split.detach(), b.state[split]["param_correction"])
    last_bit = torch.finfo(dtype).eps * 2.0 ** (16 - master_bits) * 4  # numbers up to 4
    assert (master - full).abs().max() <= 100 * last_bit + 200 * 2.0**-23
    assert (split.float() - full).abs().max() <= torch.finfo(dtype).eps * 2 + 100 * last_bit


def test_extra_bits_are_saved_and_resumed():
    for options in (dict(master_bits=24), dict(master_bits=32), dict(master_bits=24, param_rounding="stochastic")):
        a = stepped(torch.bfloat16, steps=4, **options)
        b = AdamW8bit(make_parameters(SHAPES, torch.bfloat16), min_8bit_size=0, **options)
        with torch.no_grad():
            for p, q in zip(parameters(a), parameters(b), strict=True):
                q.copy_(p)
        b.load_state_dict(copy.deepcopy(a.state_dict()))
        assert_same_optimizers(advance(a, 5, 8), advance(b, 5, 8), str(options))


def test_a_file_with_extra_bits_is_not_converted_without_them():
    saved = stepped(torch.bfloat16, steps=1, master_bits=24).state_dict()
    for convert in (fused8.convert.to_torch_state_dict, fused8.convert.to_bitsandbytes_state_dict):
        with pytest.raises(ValueError, match="master_bits"):
            convert(saved)
    plain = AdamW8bit(make_parameters(SHAPES, torch.bfloat16), min_8bit_size=0)
    with pytest.warns(UserWarning, match="extra mantissa bits"):
        plain.load_state_dict(saved)


def through_distributed_checkpoint(saver, loader, flatten, tmp_path):
    """The state of one optimizer into another; each is (model, optimizer)."""
    options, folder = StateDictOptions(flatten_optimizer_state_dict=flatten), tempfile.mkdtemp(dir=tmp_path)
    saver[1].zero_grad()  # torch makes the state of an optimizer only if there are no gradients
    dcp.save({"optimizer": get_optimizer_state_dict(*saver, options=options)}, checkpoint_id=folder)
    saved = {"optimizer": get_optimizer_state_dict(*loader, options=options)}
    dcp.load(saved, checkpoint_id=folder)
    set_optimizer_state_dict(*loader, saved["optimizer"], options=options)


def linear(master_bits, dtype=torch.bfloat16):
    model = torch.nn.Linear(256, 64, dtype=dtype)
    return model, AdamW8bit(model.parameters(), lr=1e-3, master_bits=master_bits)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("flatten", [False, True])
def test_extra_bits_in_a_distributed_checkpoint(flatten, tmp_path):
    """It is read into the tensors that the loading optimizer has: without `param_correction`, or of other bits."""
    saver, loader = linear(24), linear(24)
    advance(saver[1], 1, 3)
    through_distributed_checkpoint(saver, loader, flatten, tmp_path)
    loader[0].load_state_dict(saver[0].state_dict())
    assert_same_optimizers(saver[1], loader[1], "the same bits")
    with pytest.warns(UserWarning, match="state of fused8: as it was. Lost: the extra mantissa bits"):
        through_distributed_checkpoint(saver, linear(None), flatten, tmp_path)
    with pytest.raises(ValueError, match="param_correction for master_bits=24, and the optimizer has 32"):
        through_distributed_checkpoint(saver, linear(32), flatten, tmp_path)
    advance(loader[1], 4, 4)
    through_distributed_checkpoint(loader, saver, flatten, tmp_path)  # a file of one that was loaded, and the reverse
    through_distributed_checkpoint(linear(24), loader, flatten, tmp_path)


def test_extra_bits_of_fp8_are_not_those_of_bfloat16():
    """int8 continues FP8 to 16 bits and BF16 to 24."""
    with pytest.raises(ValueError, match="for master_bits=16, and the optimizer has 24"):
        stepped(torch.bfloat16, steps=1, master_bits=24).load_state_dict(
            stepped(FP8[0], steps=1, master_bits=16).state_dict()
        )


def low_precision_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(30, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 30))
    model[2].weight = model[0].weight
    return model.to(dtype)


@pytest.mark.parametrize("master_bits", [None, 24, 32])
def test_master_weights_go_through_a_file(master_bits):
    """In FP32 with buffers and tied weights, and back into a fresh optimizer: the same bits, weight by weight."""
    model, other = low_precision_model(), low_precision_model()
    a, b = (AdamW8bit(m.parameters(), lr=1e-3, master_bits=master_bits) for m in (model, other))
    for step in range(1, 4):
        set_gradients(model.parameters(), step)
        a.step()
    weights = a.master_state_dict(model)
    assert weights["0.weight"] is weights["2.weight"]  # tied
    weights = through_file(weights)
    assert weights["0.weight"].data_ptr() == weights["2.weight"].data_ptr()
    assert weights.keys() == model.state_dict().keys()
    for name, p in model.named_parameters():
        assert weights[name].dtype == torch.float32
        correction = a.state[p].get("param_correction")
        assert (correction is None) == (master_bits is None)
        assert_same_bits(weights[name], fused8.formats.decode(p.detach(), correction), name)
    assert weights["1.running_mean"].dtype == torch.bfloat16
    b.load_master_state_dict(other, weights)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach(), "weight")
        if master_bits is not None:
            assert_same_bits(a.state[p]["param_correction"], b.state[q]["param_correction"], "correction")
    set_gradients(other.parameters(), 1)
    b.step()


def test_fp32_weights_keep_what_bfloat16_would_lose():
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    optimizer = AdamW8bit(model.parameters(), master_bits=32)
    weights = {"weight": torch.randn(64, 64)}
    optimizer.load_master_state_dict(model, weights)
    assert_same_bits(optimizer.master_state_dict(model)["weight"], weights["weight"], "32 bits")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop("1.weight"), r"missing \['1.weight'\]"),
        (lambda w: w.update(extra=torch.zeros(1)), r"unknown \['extra'\]"),
        (
            lambda w: [w.update({f"module.{name}": w.pop(name)}) for name in [*w]],
            "One of the two is wrapped .DistributedDataParallel",
        ),
        (lambda w: w.update({"2.bias": torch.zeros(31)}), r"2.bias has shape \(31,\).*\(30,\)"),
        (lambda w: w.update({"2.bias": torch.zeros(30, dtype=torch.int32)}), "2.bias has dtype torch.int32"),
        (lambda w: w.update({"2.bias": None}), "2.bias has type NoneType"),
    ],
)
def test_master_weights_that_do_not_fit_change_nothing(change, message):
    model = low_precision_model()
    optimizer = AdamW8bit(model.parameters(), master_bits=24)
    weights = {name: torch.ones_like(value) for name, value in optimizer.master_state_dict(model).items()}
    change(weights)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_master_state_dict(model, weights)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_master_weights_need_a_whole_state():
    model = low_precision_model()
    optimizer = AdamW8bit(model.parameters(), master_bits=24)
    set_gradients(model.parameters(), 1)
    optimizer.step()
    weights, before = optimizer.master_state_dict(model), copy.deepcopy(model.state_dict())
    del optimizer.state[model[2].bias]["param_correction"]
    with pytest.raises(ValueError, match=r"the state of parameter 3 of group 0 .*param_correction"):
        optimizer.load_master_state_dict(model, {name: torch.ones_like(value) for name, value in weights.items()})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_master_weights_keep_what_a_module_saves_beside_its_tensors():
    class Counting(torch.nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    model, other = Counting(8, 8, dtype=torch.bfloat16), Counting(8, 8, dtype=torch.bfloat16)
    model.calls = 7
    a, b = (AdamW8bit(m.parameters(), master_bits=32) for m in (model, other))
    b.load_master_state_dict(other, a.master_state_dict(model))
    assert other.calls == 7 and torch.equal(other.weight, model.weight)


def test_master_bits_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*24 or 32"):
        AdamW8bit(make_parameters([(2, 2)], torch.bfloat16), master_bits=16)
    with pytest.raises(ValueError, match="16 or 24"):
        AdamW8bit(make_parameters([(2, 2)], torch.float8_e4m3fn), master_bits=32)
    with pytest.raises(ValueError, match="master_bits"):
        AdamW8bit(make_parameters([(2, 2)]), master_bits=8)
    optimizer = stepped(torch.bfloat16, steps=1)
    optimizer.param_groups[0]["master_bits"] = 24
    set_gradients(parameters(optimizer), 2)
    with pytest.raises(ValueError, match="cannot change master_bits"):
        optimizer.step()


def test_memory_of_extra_bits():
    (p,) = make_parameters([(64, 256)], torch.bfloat16)
    for master_bits, per_parameter in ((None, 2), (24, 3), (32, 4)):
        optimizer = AdamW8bit([p], master_bits=master_bits)
        p.grad = torch.ones_like(p)
        optimizer.step()
        codes = [t for name, t in optimizer.state[p].items() if not name.endswith("_scale") and name != "step"]
        assert sum(t.numel() * t.element_size() for t in codes) == per_parameter * p.numel()


# -- FP8 parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(param_rounding="nearest"), dict(master_bits=16), dict(master_bits=24)])
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_parameters_move_towards_a_target(dtype, options):
    """A regression to a target by its own gradient: far below one code per step, so only unbiased rounding or extra
    bits get there; rounded to nearest the parameter stays where it was."""
    target = torch.full((16, 256), 1.3)
    p = torch.nn.Parameter(torch.full((16, 256), 1.0).to(dtype))
    p.grad_dtype = None
    optimizer = AdamW8bit([p], lr=4e-3, weight_decay=0.0, **options)
    for _ in range(300):
        p.grad = p.detach().float() - target
        optimizer.step()
    error = (p.detach().float() - target).mean().abs().item()
    if options.get("param_rounding") == "nearest":
        assert bool((p.detach().float() == 1.0).all())
    else:
        assert error < torch.finfo(dtype).eps / 2


# -- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_equals_clip_grad_norm(max_norm):
    """The factor is one FP32 number either way; the norms may differ in the last bits (the order of summation), and
    each gradient element is rounded once more in clip_grad_norm_. An update moves by lr * O(relative change of g):
    20 steps * lr * 16 * 2^-24, and a little for the codes that this tips over is avoided with 32-bit state."""
    a, b = (make_parameters(((16, 256), (300,))) for _ in range(2))
    ours = AdamW8bit([{"params": a[:1]}, {"params": a[1:]}], max_grad_norm=max_norm)
    ours.param_groups[0]["state_bits"] = ours.param_groups[1]["state_bits"] = 32
    theirs = AdamW8bit([{"params": b, "state_bits": 32}])
    for _ in range(20):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        before = [p.grad.clone() for p in a]
        norm = torch.nn.utils.clip_grad_norm_(b, max_norm)
        ours.step()
        theirs.step()
        assert ours.last_grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert all(torch.equal(p.grad, g) for p, g in zip(a, before, strict=True))
    for p, q in zip(a, b, strict=True):
        assert (p - q).abs().max() <= 20 * 1e-3 * 16 * 2**-20


def test_a_norm_that_is_not_finite_gives_a_zero_gradient():
    a, b = stepped(torch.float32, max_grad_norm=1.0, shapes=((16, 256),)), None
    b = copy.deepcopy(a)
    (p,), (q,) = parameters(a), parameters(b)
    p.grad, q.grad = torch.randn(16, 256), torch.zeros(16, 256)
    p.grad[0, 0] = float("nan")
    count = a.nonfinite_count()
    a.step()
    b.step()
    assert_same_bits(p.detach(), q.detach(), "zero gradient")
    assert a.nonfinite_count() == count + 1 and a.last_grad_norm.isnan()


def test_without_gradients_the_norm_is_zero():
    optimizer = AdamW8bit(make_parameters(((2, 2),)), max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.last_grad_norm == 0 and not optimizer.state


def test_groups_agree_on_the_norm():
    a, b = make_parameters(((2, 2), (2, 2)))
    optimizer = AdamW8bit([{"params": [a]}, {"params": [b], "max_grad_norm": 1.0}])
    a.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.step()


def test_clipping_unscales_first():
    a, b = make_parameters(((16, 256),)), make_parameters(((16, 256),))
    scaled, plain = AdamW8bit(a, max_grad_norm=0.5), AdamW8bit(b, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(1, 4):
        g = torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
        a[0].grad, b[0].grad = scaler.scale(g), g
        scaler.step(scaled)
        scaler.update()
        plain.step()
        assert scaled.last_grad_norm.item() == pytest.approx(plain.last_grad_norm.item(), rel=1e-6)
    assert_same_optimizers(scaled, plain, "scaled and clipped")  # the scale is a power of two


@pytest.mark.parametrize("backend", ["cpp", "reference", "triton"])
def test_grad_scaler_overflow_skips_rounding_and_correction_too(backend):
    for options in (dict(param_rounding="stochastic"), dict(master_bits=24)):
        (p,) = make_parameters([(16, 256)], torch.float16)
        optimizer = AdamW8bit([p], lr=1e-2, backend=backend, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(1, 4):
            before = copy.deepcopy(optimizer.state_dict())
            value = p.detach().clone()
            p.grad = torch.randn(16, 256).half()
            if step == 2:
                p.grad[0, 0] = float("inf")
            scaler.scale(torch.zeros(())).item()
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                assert torch.equal(bits(p.detach()), bits(value))
                after = optimizer.state_dict()
                assert all(torch.equal(t, after["state"][0][n]) for n, t in before["state"][0].items())
        assert optimizer.state[p]["step"] == 2


# -- what changes between steps, and what is loaded -------------------------------------------------------------------


def test_a_parameter_that_changes_its_dtype_gets_another_plan():
    p, q = (torch.nn.Parameter(torch.full((64, 256), 1.5).to(dtype)) for dtype in (torch.bfloat16, FP8[0]))
    p.grad_dtype = q.grad_dtype = None
    optimizers = [AdamW8bit([x], lr=1e-3, weight_decay=0.0) for x in (p, q)]
    for step in range(100):
        for x, optimizer in zip((p, q), optimizers, strict=True):
            x.grad = torch.ones(64, 256, dtype=torch.bfloat16)
            optimizer.step()
        if step == 0:
            p.data = p.data.to(FP8[0])
    assert abs(p.float().mean() - q.float().mean()) < 0.01 and p.float().mean() < 1.45


def test_extra_bits_survive_a_file_without_them():
    """In either order: FP32 weights into weight and correction, the moments from torch's AdamW."""
    source = torch.nn.Linear(256, 64)
    theirs = torch.optim.AdamW(source.parameters())
    source(torch.ones(4, 256)).sum().backward()
    theirs.step()
    for moments_first in (False, True):
        model = torch.nn.Linear(256, 64, dtype=torch.bfloat16)
        optimizer = AdamW8bit(model.parameters(), master_bits=32)
        steps = [
            lambda: optimizer.load_master_state_dict(model, source.state_dict()),  # noqa: B023
            lambda: optimizer.load_state_dict(theirs.state_dict()),  # noqa: B023
        ]
        with pytest.warns(UserWarning, match="torch"):
            for step in reversed(steps) if moments_first else steps:
                step()
        assert torch.equal(optimizer.master_state_dict(model)["weight"], source.weight)
    optimizer.load_state_dict(AdamW8bit(model.parameters(), master_bits=32).state_dict())  # without any state
    assert torch.equal(optimizer.master_state_dict(model)["weight"], source.weight)
    set_gradients(model.parameters(), 1)
    optimizer.step()


@pytest.mark.parametrize(
    "correction", [torch.zeros(64, 256, dtype=torch.int8).to_sparse(), torch.zeros(64, 256, device="meta"), 3]
)
def test_corrections_that_cannot_be_read_are_refused_by_name(correction):
    optimizer = AdamW8bit(make_parameters([(64, 256)], torch.bfloat16), master_bits=24)
    advance(optimizer, 1, 1)
    saved = optimizer.state_dict()
    saved["state"][0]["param_correction"] = correction
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*param_correction"):
        optimizer.load_state_dict(saved)


def test_a_model_that_was_converted_after_its_first_step_says_what_to_do():
    model = torch.nn.Linear(256, 64, dtype=torch.bfloat16)
    optimizer = AdamW8bit(model.parameters(), master_bits=24)
    advance(optimizer, 1, 1, torch.bfloat16)
    model.float()
    assert torch.equal(optimizer.master_state_dict(model)["weight"], model.weight)
    set_gradients(model.parameters(), 2)
    with pytest.raises(ValueError, match="master_state_dict"):
        optimizer.step()


def test_weights_beyond_the_dtype_are_refused():
    layer = torch.nn.Linear(16, 16, bias=False)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(FP8[0]))
    optimizer = AdamW8bit(layer.parameters())
    with pytest.raises(ValueError, match="weight has values beyond 448"):
        optimizer.load_master_state_dict(layer, {"weight": torch.full((16, 16), 500.0)})


def test_fp8_parameters_have_their_state_made_by_torch_distributed():
    layer = torch.nn.Linear(256, 16, bias=False)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(FP8[0]))
    layer.weight.grad_dtype = None
    a, b = AdamW8bit(layer.parameters()), AdamW8bit(layer.parameters())
    layer.weight.grad = torch.ones(16, 256)
    a.step()
    layer.weight.grad = None
    saved = get_optimizer_state_dict(layer, a)
    set_optimizer_state_dict(layer, b, saved)
    assert_same_optimizers(a, b, "through torch.distributed.checkpoint.state_dict")
    assert b.param_groups[0]["lr"] == 1e-3 and layer.weight.grad is None


def test_options_that_run_off_are_refused_before_anything_changes():
    for name, value in (("eps", -1.0), ("weight_decay", math.nan), ("betas", (0.9, 1.5)), ("rounding_seed", "x")):
        optimizer = stepped(torch.float32, steps=1)
        optimizer.param_groups[0][name] = value
        set_gradients(parameters(optimizer), 2)
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        assert optimizer.state[parameters(optimizer)[0]]["step"] == 1
    optimizer.param_groups[0].update(rounding_seed=0, max_grad_norm=0.0)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.step()


def test_expanded_parameters_are_refused():
    with pytest.raises(TypeError, match="share memory"):
        AdamW8bit([torch.nn.Parameter(torch.zeros(1, 256).expand(64, 256))])


def test_the_default_device_does_not_matter():
    optimizer = stepped(torch.bfloat16, steps=1, shapes=((16, 256),))
    with torch.device("meta"):
        (p,) = parameters(optimizer)
        p.grad = torch.ones(16, 256, device="cpu")
        optimizer.step()
        fresh = AdamW8bit([torch.nn.Parameter(torch.ones(16, 256, device="cpu"))], min_8bit_size=0)
        parameters(fresh)[0].grad = torch.ones(16, 256, device="cpu")
        fresh.step()
    assert optimizer.state[p]["step"] == 2


def test_a_pickle_of_an_older_version_takes_the_defaults_of_newer_options():
    optimizer = stepped(torch.float32, steps=1)
    state = optimizer.__getstate__()
    for options in (state["defaults"], *state["param_groups"]):
        for name in ("master_bits", "offload", "param_rounding", "rounding_seed", "max_grad_norm"):
            options.pop(name)
    again = AdamW8bit.__new__(AdamW8bit)
    again.__setstate__(state)
    set_gradients(parameters(again), 2)
    again.step()
