"""State from and to other libraries: real checkpoints of the real packages load, train on, and go back."""

import copy
import sys

import pytest
import torch

import fused8
from fused8 import convert, foreign

from .convert_support import (
    CODEC_NAMES,
    FLASHOPTIM_GROUP,
    FORMATS,
    SHAPES,
    advance,
    assert_nearest,
    assert_next_update_matches,
    assert_refused,
    assert_same_nested,
    bitsandbytes_state,
    flashoptim_state,
    loaded,
    plain_decode,
    source_moments,
    through_file,
)
from .support import assert_same_bits, assert_same_optimizers, make_parameters, parameters

# -- torch.optim ------------------------------------------------------------------------------------------------------

TORCH = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {}),
    "Adam with L2": (torch.optim.Adam, dict(weight_decay=0.1)),
    "amsgrad": (torch.optim.AdamW, dict(amsgrad=True)),
    "fused": (torch.optim.AdamW, dict(fused=True)),
    "foreach": (torch.optim.AdamW, dict(foreach=True, maximize=True)),
    "capturable": (torch.optim.AdamW, dict(capturable=True)),
    "lr as a tensor": (torch.optim.AdamW, dict(lr=torch.tensor(1e-3), foreach=False)),
}


@pytest.fixture
def capturable_on_cpu(monkeypatch):
    """torch allows capturable on accelerators only; what it saves with it is the same on a CPU."""
    monkeypatch.setattr(
        sys.modules[torch.optim.Adam.__module__], "_get_capturable_supported_devices", lambda **kwargs: ["cpu"]
    )


@pytest.mark.parametrize(
    "name, codec, block_size",
    [(name, "adaptive", 256) for name in TORCH] + [("amsgrad", *other) for other in FORMATS if other[0] != "adaptive"],
)
def test_torch_state_loads_to_the_nearest_codes_and_trains_on(name, codec, block_size, capturable_on_cpu):
    cls, options = TORCH[name]
    source = advance(cls(make_parameters(SHAPES), **({"lr": 1e-3} | options)), 1, 4)
    ours, messages = loaded(source, cls=fused8.Adam8bit, codec=codec, block_size=block_size)
    assert len(messages) == 1 and f"from 32 bits to {codec} in blocks of {block_size}" in messages[0]
    for p, q in zip(parameters(source), parameters(ours), strict=True):
        moments = source_moments(source, p)
        assert_nearest(ours.state[q], tuple(p.shape), codec, block_size, moments, str(tuple(p.shape)))
    group, saved = ours.param_groups[0], source.param_groups[0]
    kept = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "capturable", "decoupled_weight_decay")
    assert all(group[option] == saved[option] for option in kept)
    assert isinstance(group["lr"], float) and group["lr"] == float(saved["lr"])
    assert not group.keys() & {"foreach", "fused"}
    assert_next_update_matches(source, ours, 5)
    advance(ours, 6, 8)


def test_torch_state_of_bfloat16_parameters():
    source = advance(torch.optim.AdamW(make_parameters(SHAPES, torch.bfloat16)), 1, 3)
    ours, messages = loaded(source)
    assert (
        "from 16 bits to adaptive in blocks of 256" in messages[0] and "from 16 bits to 32 bits, without" in messages[0]
    )
    for p, q in zip(parameters(source), parameters(ours), strict=True):
        assert_nearest(ours.state[q], tuple(p.shape), "adaptive", 256, source_moments(source, p), str(p.shape))
    advance(ours, 4, 5)


def test_a_channels_last_state_keeps_the_order_of_its_elements():
    p = torch.nn.Parameter(torch.randn(8, 32, 3, 3).to(memory_format=torch.channels_last))
    source = advance(torch.optim.AdamW([p]), 1, 2)
    assert not source.state[p]["exp_avg"].is_contiguous()
    ours, _ = loaded(source)
    assert_nearest(ours.state[parameters(ours)[0]], p.shape, "adaptive", 256, source_moments(source, p), "conv")


def test_state_that_stays_in_32_bits_is_the_same_and_no_warning_is_given():
    source = advance(torch.optim.AdamW(make_parameters(SHAPES)), 1, 3)
    ours, messages = loaded(source, min_8bit_size=1 << 20)
    assert messages == []
    for p, q in zip(parameters(source), parameters(ours), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert_same_bits(source.state[p][name], ours.state[q][name], name)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_file_that_does_not_say_how_weight_decay_works_leaves_it_as_it_is(decoupled):
    """torch.optim.AdamW before 2.7 saved nothing of decoupled_weight_decay."""
    source = advance(torch.optim.AdamW(make_parameters(SHAPES)), 1, 1)
    state_dict = source.state_dict()
    del state_dict["param_groups"][0]["decoupled_weight_decay"]
    ours, messages = loaded(source, state_dict, fused8.Adam8bit, decoupled_weight_decay=decoupled)
    assert ours.param_groups[0]["decoupled_weight_decay"] is decoupled
    assert "The file does not say whether its weight decay was decoupled" in messages[0]


def test_what_a_file_changes_about_the_options_is_said():
    source = advance(torch.optim.Adam(make_parameters(SHAPES), weight_decay=0.1, maximize=True), 1, 1)
    ours, messages = loaded(source, cls=fused8.Adam8bit, amsgrad=True)
    assert "Weight decay is added to the gradient (L2), as in the file." in messages[0]
    assert "amsgrad is off, as in the file." in messages[0] and "maximize is on, as in the file." in messages[0]
    assert not ours.param_groups[0]["amsgrad"] and not ours.param_groups[0]["decoupled_weight_decay"]


def test_schedules_and_options_of_the_user_survive():
    source = torch.optim.AdamW([{"params": make_parameters(SHAPES), "part": "body"}], lr=0.1)
    torch.optim.lr_scheduler.StepLR(source, 1)
    ours, _ = loaded(advance(source, 1, 1))
    assert ours.param_groups[0]["initial_lr"] == 0.1 and ours.param_groups[0]["part"] == "body"


@pytest.mark.parametrize("target", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("options", [{}, dict(amsgrad=True), dict(codec="dynamic"), dict(codec="e4m3", block_size=64)])
def test_export_to_torch_trains_on(options, target):
    ours = advance(fused8.Adam8bit(make_parameters(SHAPES), min_8bit_size=0, weight_decay=0.1, **options), 1, 3)
    theirs = target([torch.nn.Parameter(p.detach().clone()) for p in parameters(ours)])
    state_dict = ours.torch_state_dict()
    assert state_dict["param_groups"][0].keys() == theirs.state_dict()["param_groups"][0].keys()
    theirs.load_state_dict(through_file(state_dict))
    group = theirs.param_groups[0]
    assert group["weight_decay"] == 0.1 and group["decoupled_weight_decay"] and group["lr"] == 1e-3
    for p, q in zip(parameters(ours), parameters(theirs), strict=True):
        moments = plain_decode(
            ours.state[p], p.shape, ours.param_groups[0]["codec"], ours.param_groups[0]["block_size"]
        )
        for name, moment in zip(convert.MOMENTS, moments, strict=False):
            assert_same_bits(theirs.state[q][name], moment, name)
        assert theirs.state[q].keys() == {"step", *convert.MOMENTS[: len(moments)]}
        assert theirs.state[q]["step"] == 3
    assert_next_update_matches(theirs, ours, 4, exact=True)


def test_from_torch_to_32_bits_and_back_is_the_same():
    source = advance(torch.optim.AdamW(make_parameters(SHAPES), amsgrad=True), 1, 3)
    params = [{"params": make_parameters(SHAPES), "state_bits": 32}]
    ours = fused8.AdamW8bit(params, amsgrad=True)
    ours.load_state_dict(source.state_dict())
    back = torch.optim.AdamW(make_parameters(SHAPES))
    back.load_state_dict(ours.torch_state_dict())
    for p, q in zip(parameters(source), parameters(back), strict=True):
        for name in source.state[p]:
            assert_same_bits(source.state[p][name], back.state[q][name], name)
    assert source.state_dict()["param_groups"] == back.state_dict()["param_groups"]


# -- fused8 -----------------------------------------------------------------------------------------------------------


OWN_FORMATS = (("adaptive", 64), ("adaptive", 256), ("dynamic", 256), ("e4m3", 64), ("32 bits", 256))


@pytest.mark.parametrize("to_codec, to_block", OWN_FORMATS)
@pytest.mark.parametrize("codec, block_size", OWN_FORMATS)
def test_any_format_of_fused8_loads_into_any_other(codec, block_size, to_codec, to_block):
    def options(codec, block_size):
        if codec == "32 bits":
            return dict(min_8bit_size=1 << 30)
        return dict(min_8bit_size=0, codec=codec, block_size=block_size)

    source = fused8.AdamW8bit(make_parameters(SHAPES), amsgrad=True, **options(codec, block_size))
    advance(source, 1, 3)
    ours, messages = loaded(source, amsgrad=True, **options(to_codec, to_block))
    assert len(messages) == ((codec, block_size) != (to_codec, to_block))
    exact = to_codec == "32 bits" or (codec == to_codec and block_size >= to_block)
    assert all(("without loss" in message) == exact for message in messages)
    for p, q in zip(parameters(source), parameters(ours), strict=True):
        moments = plain_decode(source.state[p], p.shape, codec, block_size)
        own = ours.state[q]
        if exact:
            for name, a, b in zip(
                convert.MOMENTS, moments, plain_decode(own, p.shape, to_codec, to_block), strict=False
            ):
                assert_same_bits(a, b, f"{name} {tuple(p.shape)}")
        else:
            assert_nearest(own, tuple(p.shape), to_codec, to_block, moments, str(tuple(p.shape)))
    advance(ours, 4, 5)


def test_what_is_read_in_pieces_is_what_is_read_at_once(monkeypatch):
    shapes = ((3, 700), (2, 1500), (40, 16), (1, 5000))
    source = advance(torch.optim.AdamW(make_parameters(shapes), amsgrad=True), 1, 2)
    at_once, _ = loaded(source, amsgrad=True, block_size=64)
    other_at_once, _ = loaded(at_once, codec="e4m3")
    monkeypatch.setattr(convert, "CHUNK_ELEMENTS", 512)
    in_pieces, _ = loaded(source, amsgrad=True, block_size=64)
    assert_same_optimizers(at_once, in_pieces, "from torch")
    assert_same_optimizers(other_at_once, loaded(at_once, codec="e4m3")[0], "from adaptive")
    for to in (convert.to_torch_state_dict, convert.to_bitsandbytes_state_dict):
        pieces = to(at_once.state_dict())
        monkeypatch.undo()
        assert_same_nested(pieces, to(at_once.state_dict()))
        monkeypatch.setattr(convert, "CHUNK_ELEMENTS", 512)


class LargestFloat(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest floating-point tensor that any operation makes anew."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, x.numel())
        return result


def test_a_state_is_never_decoded_as_a_whole(monkeypatch):
    monkeypatch.setattr(convert, "CHUNK_ELEMENTS", 1024)
    source = advance(fused8.AdamW8bit(make_parameters([(64, 512), (1, 1 << 15)]), codec="dynamic"), 1, 1)
    state_dict = source.state_dict()
    ours = fused8.AdamW8bit(make_parameters([(64, 512), (1, 1 << 15)]))
    with LargestFloat() as largest, pytest.warns(UserWarning, match="rounded to the nearest code"):
        ours.load_state_dict(state_dict)
    assert 0 < largest.elements <= 1024


# -- bitsandbytes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def flat_form(state_dict):
    """As bitsandbytes saved it before it nested the tensors."""
    states = {key: foreign.flattened(state) for key, state in state_dict["state"].items()}
    return state_dict | {"state": states}


def of_older_release(state_dict, bitsandbytes):
    """Blocks of 2048 elements, as before bitsandbytes 0.44, requantized by bitsandbytes itself."""
    state_dict = copy.deepcopy(flat_form(state_dict))
    for state in state_dict["state"].values():
        for i in (1, 2) if "qmap1" in state else ():
            absmax = state[f"absmax{i}"].repeat_interleave(256)[: state[f"state{i}"].numel()]
            values = state[f"qmap{i}"][state[f"state{i}"].flatten().long()] * absmax
            codes, quant_state = bitsandbytes.functional.quantize_blockwise(
                values, code=state[f"qmap{i}"], blocksize=2048
            )
            state[f"state{i}"] = codes.view(state[f"state{i}"].shape)
            state[f"absmax{i}"] = quant_state.absmax
    return state_dict


@pytest.mark.parametrize("form", ["nested", "flat"])
@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Adam"])
def test_bitsandbytes_loads_into_dynamic_without_loss(bitsandbytes, name, form):
    source = advance(getattr(bitsandbytes.optim, name)(make_parameters(SHAPES), weight_decay=0.1), 1, 4)
    state_dict = source.state_dict() if form == "nested" else flat_form(source.state_dict())
    ours, messages = loaded(
        source, state_dict, min_8bit_size=4096, codec="dynamic", decoupled_weight_decay=True, cls=fused8.Adam8bit
    )
    assert len(messages) == (name != "Adam" or 1)
    for i, (p, q) in enumerate(zip(parameters(source), parameters(ours), strict=True)):
        theirs, own = source.state[p], ours.state[q]
        assert own["step"] == 4
        if theirs["state1"].dtype != torch.uint8:
            if "exp_avg_scale" not in own:
                assert torch.equal(own["exp_avg"], theirs["state1"]) and torch.equal(
                    own["exp_avg_sq"], theirs["state2"]
                )
        elif p.shape[1] % 256 == 0:
            assert torch.equal(own["exp_avg"], theirs["state1"]) and torch.equal(own["exp_avg_sq"], theirs["state2"])
            assert torch.equal(own["exp_avg_scale"].flatten(), theirs["absmax1"])
            assert torch.equal(own["exp_avg_sq_scale"].flatten(), theirs["absmax2"])
        else:
            assert_nearest(own, tuple(p.shape), "dynamic", 256, source_moments(source, p), f"parameter {i}")
    group = ours.param_groups[0]
    assert group["weight_decay"] == 0.1 and group["decoupled_weight_decay"]
    assert not group.keys() & {"alpha", "t_alpha", "t_beta3"}
    advance(ours, 5, 6)


@pytest.fixture
def exact_bitsandbytes(bitsandbytes, monkeypatch):
    """bitsandbytes with its 8-bit step served by its Triton kernel: that for CPUs rounds only approximately."""
    pytest.importorskip("triton")
    from bitsandbytes.backends.triton import kernels_optim

    kernel = kernels_optim.optimizer_update_8bit_blockwise_impl
    monkeypatch.setattr(bitsandbytes.functional, "optimizer_update_8bit_blockwise", kernel)
    return bitsandbytes


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("name", ["Adam8bit", "Adam"])
def test_the_update_after_loading_is_that_of_bitsandbytes(exact_bitsandbytes, name, codec):
    source = getattr(exact_bitsandbytes.optim, name)(make_parameters(SHAPES), weight_decay=0.1)
    ours, _ = loaded(advance(source, 1, 2), codec=codec)
    assert_next_update_matches(source, ours, 3)


def test_bitsandbytes_in_blocks_of_2048(bitsandbytes):
    shapes = ((8, 2048), (12, 512), (10, 410), (1, 5000))
    source = advance(bitsandbytes.optim.Adam8bit(make_parameters(shapes)), 1, 2)
    state_dict = of_older_release(source.state_dict(), bitsandbytes)
    assert state_dict["state"][1]["absmax1"].numel() == 3
    for codec, block_size in FORMATS:
        ours, messages = loaded(source, state_dict, codec=codec, block_size=block_size)
        assert "8 bits in blocks of 2048" in messages[0]
        for key, p in enumerate(parameters(ours)):
            state = state_dict["state"][key]
            moments = []
            for i in (1, 2):
                absmax = state[f"absmax{i}"].repeat_interleave(2048)[: p.numel()]
                moments.append((state[f"qmap{i}"][state[f"state{i}"].flatten().long()] * absmax).view(p.shape))
            own = ours.state[p]
            if codec == "dynamic" and (p.shape[0] == 1 or p.shape[1] % 256 == 0):
                assert torch.equal(own["exp_avg"], state["state1"]) and torch.equal(own["exp_avg_sq"], state["state2"])
                for a, b in zip(moments, plain_decode(own, p.shape, codec, block_size), strict=True):
                    assert_same_bits(a, b, f"parameter {key}")
            else:
                assert_nearest(own, tuple(p.shape), codec, block_size, moments, f"parameter {key}, {codec}")


def test_from_bitsandbytes_and_back_is_the_same(bitsandbytes):
    shapes = ((32, 256), (64,), (1, 4200))
    source = advance(bitsandbytes.optim.AdamW8bit(make_parameters(shapes)), 1, 3)
    ours, _ = loaded(source, codec="dynamic")
    back = through_file(convert.to_bitsandbytes_state_dict(ours.state_dict()))
    theirs = bitsandbytes.optim.AdamW8bit([torch.nn.Parameter(p.detach().clone()) for p in parameters(source)])
    theirs.load_state_dict(back)
    assert_same_nested(source.state_dict()["state"], theirs.state_dict()["state"])
    advance(source, 4, 6)
    advance(theirs, 4, 6)
    for p, q in zip(parameters(source), parameters(theirs), strict=True):
        assert_same_bits(p.detach(), q.detach(), "bitsandbytes went on")


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_export_to_bitsandbytes_trains_on(bitsandbytes, codec):
    ours = advance(fused8.AdamW8bit(make_parameters(SHAPES), min_8bit_size=0, codec=codec), 1, 3)
    state_dict = convert.to_bitsandbytes_state_dict(ours.state_dict())
    theirs = bitsandbytes.optim.AdamW8bit([torch.nn.Parameter(p.detach().clone()) for p in parameters(ours)])
    theirs.load_state_dict(through_file(state_dict))
    for p, q in zip(parameters(ours), parameters(theirs), strict=True):
        state = theirs.state[q]
        assert state["step"] == 3 and (state["state1"].dtype == torch.uint8) == (p.numel() >= 4096)
        known = plain_decode(ours.state[p], p.shape, codec, 256)
        if "qmap1" not in state:
            assert_same_bits(state["state1"], known[0], "m")
            continue
        flat = {"exp_avg": state["state1"].view(1, -1), "exp_avg_sq": state["state2"].view(1, -1)}
        flat |= {"exp_avg_scale": state["absmax1"].view(1, -1), "exp_avg_sq_scale": state["absmax2"].view(1, -1)}
        assert_nearest(flat, (1, p.numel()), "dynamic", 256, [x.view(1, -1) for x in known], str(tuple(p.shape)))
    advance(theirs, 4, 5)
    assert len({state["qmap1"].data_ptr() for state in theirs.state.values() if "qmap1" in state}) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(maximize=True), "param group 0 maximizes"),
        (dict(decoupled_weight_decay=False, weight_decay=0.1), "adds weight decay to the gradient"),
    ],
)
def test_what_bitsandbytes_cannot_do_is_refused(options, message):
    ours = advance(fused8.Adam8bit(make_parameters(SHAPES), **options), 1, 1)
    with pytest.raises(ValueError, match=message):
        convert.to_bitsandbytes_state_dict(ours.state_dict())


def test_what_bitsandbytes_does_not_have_is_reported():
    ours = advance(fused8.Adam8bit(make_parameters(SHAPES), amsgrad=True, min_8bit_size=0), 1, 1)
    report = convert.Report()
    state_dict = convert.to_bitsandbytes_state_dict(ours.state_dict(), report=report)
    assert "Lost: max_exp_avg_sq, since bitsandbytes has no amsgrad" in str(report)
    assert "amsgrad" not in state_dict["param_groups"][0]


def test_fp32_state_of_fused8_stays_in_32_bits_for_bitsandbytes():
    """bitsandbytes goes on in the precision that it finds."""
    ours = advance(fused8.AdamW8bit([{"params": make_parameters([(64, 256)]), "state_bits": 32}]), 1, 1)
    state = convert.to_bitsandbytes_state_dict(ours.state_dict())["state"][0]
    assert_same_bits(foreign.flattened(state)["state1"], ours.state[parameters(ours)[0]]["exp_avg"], "m")


# -- torchao ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchao_optim():
    """torchao's optimizers, whose compiled step runs as it is."""
    torchao_optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.compiler.set_stance("force_eager")
    yield torchao_optim
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("codec, block_size", [("adaptive", 256), ("dynamic", 64), ("e4m3", 256)])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
def test_torchao_loads_and_trains_on(torchao_optim, name, codec, block_size):
    shapes = ((16, 256), (8, 640), (64,))  # a flat block of 256 crosses the rows of the second
    source = advance(getattr(torchao_optim, name)(make_parameters(shapes)), 1, 3)
    classes = {type(t).__name__ for state in source.state.values() for t in state.values()}
    assert classes & set(foreign.TORCHAO_CLASSES)
    decoupled = name != "Adam8bit"
    ours, messages = loaded(
        source, cls=fused8.Adam8bit, codec=codec, block_size=block_size, decoupled_weight_decay=decoupled
    )
    assert len(messages) == 1 and "state of torchao" in messages[0]
    for p, q in zip(parameters(source), parameters(ours), strict=True):
        moments = source_moments(source, p)
        assert_nearest(ours.state[q], tuple(p.shape), codec, block_size, moments, str(tuple(p.shape)))
        if name.endswith("8bit") and codec == "dynamic" and p.shape[-1] == 256:
            assert torch.equal(ours.state[q]["exp_avg"], source.state[p]["exp_avg"].codes)  # without loss
    assert isinstance(ours.param_groups[0]["lr"], float)
    assert_next_update_matches(source, ours, 4)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao_is_decoded_as_torchao_does(torchao_optim, name):
    source = advance(getattr(torchao_optim, name)(make_parameters([(16, 256), (2, 5, 640)])), 1, 2)
    exported = convert.to_torch_state_dict(source.state_dict())
    for key, p in enumerate(parameters(source)):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(exported["state"][key][moment], source.state[p][moment].dequantize(), moment)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize(
    "attribute, damage, message",
    [
        ("codes", lambda t: t.flatten()[:-2], "codes of shape"),
        ("codes", lambda t: t.float(), "codes of dtype"),
        ("codes", lambda t: None, "codes of type NoneType"),
        ("scale", lambda t: t * float("nan"), "values in exp_avg_sq.scale outside"),
        ("scale", lambda t: t[:-1], "elements for 4096 elements"),
        ("scale", lambda t: t.double(), "scale of dtype"),
        ("qmap", lambda t: t * -1, "qmap"),
        ("qmap", lambda t: t[:3], "qmap of shape"),
    ],
)
def test_damaged_tensors_of_torchao_are_refused(torchao_optim, name, attribute, damage, message):
    source = advance(getattr(torchao_optim, name)(make_parameters(SHAPES)), 1, 1)
    state_dict = source.state_dict()
    tensor = state_dict["state"][0]["exp_avg_sq"]
    if hasattr(tensor, attribute):  # FP8 has no map
        setattr(tensor, attribute, damage(getattr(tensor, attribute)))
        assert_refused(state_dict, message)


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda own, other: {"exp_avg": own.dequantize()},
            "exp_avg of type Tensor beside quantized tensors of torchao",
        ),
        (lambda own, other: {"exp_avg": own.view(-1)}, r"exp_avg of shape \(4096,\), expected \(16, 256\)"),
        (lambda own, other: {"exp_avg": other}, "quantized tensors of different kinds"),
    ],
)
def test_states_that_mix_tensors_of_torchao_are_refused(torchao_optim, damage, message):
    state_dict = advance(torchao_optim.AdamW8bit(make_parameters(SHAPES)), 1, 1).state_dict()
    other = advance(torchao_optim.AdamW4bit(make_parameters(SHAPES)), 1, 1).state_dict()["state"][0]["exp_avg"]
    state = state_dict["state"][0]
    state.update(damage(state["exp_avg"], other))
    assert_refused(state_dict, message)


def test_nan_codes_of_torchao_are_refused(torchao_optim):
    state_dict = advance(torchao_optim.AdamWFp8(make_parameters(SHAPES)), 1, 1).state_dict()
    state_dict["state"][0]["exp_avg"].codes.view(torch.uint8).view(-1)[3] = 0x7F
    assert_refused(state_dict, "exp_avg.codes that are NaN")


# -- FlashOptim -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_flashoptim_loads(scale_dtype):
    """Made by hand: its package needs a GPU. For bfloat16 parameters it views the bits of its scales as bfloat16."""
    generator = torch.Generator().manual_seed(0)
    states, moments = zip(*(flashoptim_state(generator, shape, scale_dtype) for shape in SHAPES), strict=True)
    states[0]["error_bits"] = torch.zeros(SHAPES[0], dtype=torch.bfloat16)
    groups = [FLASHOPTIM_GROUP | {"params": list(range(len(SHAPES)))}]
    source = torch.optim.AdamW(make_parameters(SHAPES))
    ours, messages = loaded(source, {"state": dict(enumerate(states)), "param_groups": groups})
    assert "state of FlashOptim" in messages[0] and "8 bits in groups of 32" in messages[0]
    assert "Lost: the bits that extend the weights to 24 or 32 bits (error_bits)." in messages[0]
    for p, expected in zip(parameters(ours), moments, strict=True):
        assert_nearest(ours.state[p], tuple(p.shape), "adaptive", 256, expected, str(tuple(p.shape)))
        assert ours.state[p]["step"] == 5
    assert ours.param_groups[0]["initial_lr"] == 1e-3
    assert not ours.param_groups[0].keys() & {"master_bytewidth", "quantize"}
    advance(ours, 6, 7)


@pytest.mark.parametrize("mark, origin", [("t_alpha", "bitsandbytes"), ("master_bytewidth", "FlashOptim")])
def test_a_state_before_the_first_step_is_known_by_its_options(mark, origin):
    group = dict(lr=0.5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, params=[0]) | {mark: None}
    state_dict = {"state": {}, "param_groups": [group]}
    report = convert.Report()
    converted = convert.to_torch_state_dict(state_dict, report=report)
    assert report.origin == origin and mark not in converted["param_groups"][0]
    optimizer = fused8.AdamW8bit(make_parameters([(16, 256)]))
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.5 and mark not in optimizer.param_groups[0] and not optimizer.state


def test_flashoptim_quantized_by_itself_loads(monkeypatch):
    """Its optimizer runs unquantized on a CPU; its kernel, run by Triton's interpreter, quantizes what it saved."""
    pytest.importorskip("flashoptim", reason="flashoptim is not installed")
    import triton.language as tl
    from flashoptim import FlashAdamW, optimizers

    def quantize(x, signed=True, sqrt=False, softsign=True):
        codes = torch.empty_like(x, dtype=torch.int8 if signed else torch.uint8)
        scales = torch.empty(-(-x.numel() // 32), dtype=torch.float16)
        largest, dtype = (127.0, tl.int8) if signed else (255.0, tl.uint8)
        kernel = optimizers._triton_quantize_kernel.fn
        kernel[(1,)](x.contiguous(), codes, scales, x.numel(), largest, dtype, 32, sqrt, softsign, BLOCK_SIZE_N=1024)
        return codes, scales

    def dequantize(codes, scales, signed, sqrt, softsign):
        out, largest = torch.empty_like(codes, dtype=torch.float32), 127.0 if signed else 255.0
        kernel = optimizers._triton_dequantize_kernel.fn
        kernel[(1,)](codes, scales, out, codes.numel(), largest, 32, sqrt, softsign, BLOCK_SIZE_N=1024)
        return out

    monkeypatch.setattr(optimizers, "quantize", quantize)
    source = FlashAdamW(make_parameters(SHAPES), quantize=False, master_weight_bits=None, fused=False)
    state_dict = advance(source, 1, 3).state_dict()
    plain, messages = loaded(source, state_dict)
    assert "from 32 bits to adaptive in blocks of 256" in messages[0] and "state of FlashOptim" in messages[0]
    source._pre_quantize_state_dict(state_dict)
    ours, messages = loaded(source, state_dict)
    assert "8 bits in groups of 32" in messages[0]
    for key, p in enumerate(parameters(ours)):
        state = state_dict["state"][key]
        moments = [
            dequantize(state["exp_avg::quantized"], state["exp_avg::scales"], True, False, True),
            dequantize(state["exp_avg_sq::quantized"], state["exp_avg_sq::scales"], False, True, False),
        ]
        assert_nearest(ours.state[p], tuple(p.shape), "adaptive", 256, moments, str(tuple(p.shape)))
    advance(plain, 4, 5)
    advance(ours, 4, 5)


def test_m_without_v_is_dropped_where_it_cannot_be_kept_and_the_warning_says_so():
    """8-bit formats that round a small v to 0 but keep its m would make the next update m / eps."""
    state_dict = bitsandbytes_state()
    foreign.flattened(state_dict["state"][0])["state2"][3, :10] = 0
    source = torch.optim.AdamW(make_parameters(SHAPES))
    ours, messages = loaded(source, state_dict)
    assert "Lost: exp_avg of 10 elements whose exp_avg_sq had already become 0." in messages[0]
    state = ours.state[parameters(ours)[0]]
    assert (state["exp_avg"][3, :10] == 0).all() and (state["exp_avg"][3, 10:] != 0).any()
    kept, messages = loaded(source, state_dict, codec="dynamic")
    assert "Lost" not in messages[0] and (kept.state[parameters(kept)[0]]["exp_avg"][3, :10] != 127).all()
