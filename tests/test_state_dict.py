"""Saving and loading: the step resumes bit for bit, and what does not fit is refused before anything is changed."""

import copy

import pytest
import torch

from fused8 import Adam8bit, AdamW8bit

from .support import CODECS, assert_same_optimizers, make_parameters, parameters, set_gradients, through_file

SHAPES = ((16, 256), (5, 300), (64,), ())


def fresh(shapes=SHAPES, dtype=torch.float32, **options):
    return AdamW8bit(make_parameters(shapes, dtype), min_8bit_size=0, **options)


def advance(optimizer, first, last):
    for step in range(first, last + 1):
        set_gradients(parameters(optimizer), step)
        optimizer.step()
    return optimizer


def resumed(optimizer, other, state_dict=None):
    """`other` with the parameters of `optimizer` and its state through a file."""
    with torch.no_grad():
        for p, q in zip(parameters(optimizer), parameters(other), strict=True):
            q.copy_(p)
    other.load_state_dict(through_file(state_dict or optimizer.state_dict()))
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [dict(codec=c) for c in CODECS] + [dict(amsgrad=True), dict(capturable=True)])
def test_resumes_bit_for_bit(options, dtype):
    a = advance(fresh(dtype=dtype, **options), 1, 3)
    b = resumed(a, fresh(dtype=dtype, **options))
    assert_same_optimizers(a, b, "loaded")
    assert_same_optimizers(advance(a, 4, 8), advance(b, 4, 8), "resumed")


def test_the_file_holds_plain_tensors_that_share_no_memory():
    state_dict = advance(fresh(amsgrad=True), 1, 2).state_dict()
    tensors = [t for state in state_dict["state"].values() for t in state.values()]
    assert all(type(t) is torch.Tensor for t in tensors)
    pointers = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(pointers) == len(set(pointers))
    assert all(len(t.untyped_storage()) == t.numel() * t.element_size() for t in tensors)
    codes = state_dict["state"][0]
    assert (codes["exp_avg"].dtype, codes["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    assert (codes["exp_avg_scale"].dtype, codes["exp_avg_sq_scale"].dtype) == (torch.float32, torch.int32)
    assert codes["exp_avg_scale"].shape == (16, 1) and state_dict["state"][1]["exp_avg_scale"].shape == (5, 2)
    assert state_dict["param_groups"][0]["state_format"] == 1


def test_loading_copies():
    a = advance(fresh(), 1, 2)
    b = fresh()
    state_dict = a.state_dict()
    b.load_state_dict(state_dict)
    before = copy.deepcopy(state_dict)
    advance(b, 3, 4)
    for key, state in state_dict["state"].items():
        assert all(torch.equal(tensor, before["state"][key][name]) for name, tensor in state.items())


def test_saved_hyperparameters_win_and_formats_stay():
    a = advance(fresh(lr=0.02, betas=(0.8, 0.9), weight_decay=0.3, eps=1e-6, maximize=True), 1, 2)
    b = fresh(backend="reference")
    b.load_state_dict(a.state_dict())
    group = b.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.02, (0.8, 0.9), 0.3)
    assert (group["eps"], group["maximize"], group["backend"]) == (1e-6, True, "reference")


def test_missing_group_keys_take_defaults():
    a = advance(fresh(), 1, 2)
    state_dict = a.state_dict()
    for name in (
        "maximize",
        "capturable",
        "state_format",
        "decoupled_weight_decay",
        "codec",
        "state_bits",
        "backend",
    ):
        del state_dict["param_groups"][0][name]
    b = resumed(a, fresh(), state_dict)
    assert_same_optimizers(advance(a, 3, 5), advance(b, 3, 5), "resumed")


def test_empty_state_round_trips():
    optimizer = fresh()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_optimizers(advance(optimizer, 1, 3), advance(fresh(), 1, 3), "after an empty load")


def test_a_parameter_without_state_in_the_file_starts_at_zero():
    a = fresh()
    set_gradients(parameters(a)[:2], 1)
    a.step()
    b = resumed(a, fresh())
    assert set(b.state) == set(parameters(b)[:2])
    assert_same_optimizers(advance(a, 2, 4), advance(b, 2, 4), "resumed")


def test_step_may_be_a_number_or_on_another_device_or_shaped():
    a = advance(fresh(), 1, 3)
    state_dict = a.state_dict()
    for i, make in enumerate((int, float, lambda s: s.reshape(1), lambda s: s.to(torch.int64))):
        state_dict["state"][i]["step"] = make(state_dict["state"][i]["step"])
    b = fresh()
    b.load_state_dict(state_dict)
    assert all(b.state[p]["step"].dtype == torch.float32 and b.state[p]["step"] == 3 for p in parameters(b))


def test_hooks_of_the_user_see_what_torch_shows_them():
    a = advance(fresh(), 1, 2)
    b = fresh()
    seen = []

    def pre_hook(optimizer, state_dict):
        seen.append(type(state_dict["state"][0]["exp_avg"]))
        return state_dict | {"param_groups": [g | {"lr": 0.5} for g in state_dict["param_groups"]]}

    b.register_load_state_dict_pre_hook(pre_hook)
    b.register_load_state_dict_post_hook(lambda o: seen.append(type(o.state[parameters(o)[0]]["exp_avg"])))
    b.load_state_dict(a.state_dict())
    assert seen == [torch.Tensor, torch.Tensor] and b.param_groups[0]["lr"] == 0.5
    a.register_state_dict_post_hook(lambda o, sd: sd | {"extra": 1})
    assert a.state_dict()["extra"] == 1
    advance(b, 3, 3)


# -- what does not fit ------------------------------------------------------------------------------------------------


def drop(name):
    return lambda sd: sd["state"][0].pop(name)


def put(name, make):
    def change(sd):
        sd["state"][0][name] = make(sd["state"][0][name])

    return change


def group(**options):
    return lambda sd: sd["param_groups"][0].update(options)


MISFITS = {
    "no state": (lambda sd: sd.pop("state"), "no 'state'"),
    "no groups": (lambda sd: sd.pop("param_groups"), "no 'param_groups'"),
    "two groups": (lambda sd: sd["param_groups"].append(sd["param_groups"][0] | {"params": []}), "2 param groups"),
    "the same group twice": (lambda sd: sd["param_groups"].append(sd["param_groups"][0]), "names parameter 0 twice"),
    "fewer parameters": (lambda sd: sd["param_groups"][0]["params"].pop(), "3 parameters"),
    "tensors of another codec": (group(codec="dynamic"), "exp_avg of dtype torch.int8, expected torch.uint8"),
    "scales of another block size": (group(block_size=64), r"exp_avg_scale of shape \(16, 1\), expected \(16, 4\)"),
    "an unknown codec": (group(codec="nf4"), "codec must be one of"),
    "an unknown block size": (group(block_size=32), "block_size must be one of"),
    "a newer format": (group(state_format=2), "format 2"),
    "a bad option": (group(betas=(0.9, 1.5)), "betas"),
    "amsgrad without its state": (group(amsgrad=True), "lacks max_exp_avg_sq"),
    "no scale": (drop("exp_avg_scale"), "lacks exp_avg_scale"),
    "an unknown tensor": (lambda sd: sd["state"][0].update(extra=torch.zeros(1)), "unknown entries extra"),
    "codes of another shape": (
        put("exp_avg", lambda t: t[:-1]),
        r"exp_avg of shape \(15, 256\), expected \(16, 256\)",
    ),
    "codes as floats": (put("exp_avg", lambda t: t.float()), "exp_avg of dtype torch.float32"),
    "unsigned codes": (put("exp_avg", lambda t: t.view(torch.uint8)), "exp_avg of dtype torch.uint8"),
    "scales of another shape": (
        put("exp_avg_sq_scale", lambda t: t.t()),
        r"exp_avg_sq_scale of shape \(1, 16\)",
    ),
    "no tensor": (put("exp_avg_sq", lambda t: t.tolist()), "type list"),
    "a NaN scale": (put("exp_avg_scale", lambda t: t * float("nan")), "exp_avg_scale holds"),
    "impossible meta": (put("exp_avg_sq_scale", lambda t: t | 7), "exp_avg_sq_scale holds"),
    "a fractional step": (put("step", lambda t: t + 0.5), "step 2.5"),
    "a negative step": (put("step", lambda t: -t), "step -2"),
    "a step beyond the limit": (put("step", lambda t: t + 2.0**25), "2\\^24"),
    "a NaN step": (put("step", lambda t: t * float("nan")), "step nan"),
    "a vector of steps": (put("step", lambda t: t.repeat(3)), "step of shape"),
    "a step of text": (put("step", lambda t: "2"), "step of type str"),
    "negative fp32 v": (lambda sd: sd["state"][2]["exp_avg_sq"].sub_(1e9), "parameter 2.*exp_avg_sq"),
    "infinite fp32 m": (lambda sd: sd["state"][2]["exp_avg"].fill_(float("inf")), "parameter 2.*exp_avg"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_changes(case):
    damage, message = MISFITS[case]
    state_dict = copy.deepcopy(advance(fresh(), 1, 2).state_dict())
    damage(state_dict)
    optimizer = advance(fresh(lr=0.5), 1, 1)
    before, groups = copy.deepcopy(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert_same_optimizers(optimizer, before, case)
    assert optimizer.state_dict()["param_groups"] == groups
    advance(optimizer, 2, 3)
    assert_same_optimizers(optimizer, advance(before, 2, 3), case)


def test_a_state_that_fits_another_codec_is_converted_by_name():
    """dynamic and e4m3 have the same dtypes and shapes: only the group tells them apart."""
    a = advance(fresh(codec="e4m3"), 1, 1)
    b = fresh(codec="dynamic")
    with pytest.warns(
        UserWarning, match="from e4m3 in blocks of 256 to dynamic in blocks of 256, rounded to the nearest"
    ):
        b.load_state_dict(through_file(a.state_dict()))
    assert b.param_groups[0]["codec"] == "dynamic"
    codes, converted = a.state[parameters(a)[0]]["exp_avg"], b.state[parameters(b)[0]]["exp_avg"]
    assert codes.dtype == converted.dtype and not torch.equal(codes, converted)
    advance(b, 2, 3)


def test_a_state_in_the_same_format_gives_no_warning(recwarn):
    a = advance(fresh(amsgrad=True), 1, 1)
    fresh(amsgrad=True).load_state_dict(through_file(a.state_dict()))
    assert not recwarn.list


def test_a_saved_amsgrad_state_turns_amsgrad_on():
    a = advance(fresh(amsgrad=True), 1, 2)
    b = resumed(a, fresh())
    assert b.param_groups[0]["amsgrad"]
    assert_same_optimizers(advance(a, 3, 4), advance(b, 3, 4), "amsgrad")


def test_decoupled_and_l2_are_saved():
    a = Adam8bit(make_parameters(SHAPES), decoupled_weight_decay=False, weight_decay=0.1, min_8bit_size=0)
    advance(a, 1, 2)
    b = resumed(a, Adam8bit(make_parameters(SHAPES), min_8bit_size=0))
    assert_same_optimizers(advance(a, 3, 4), advance(b, 3, 4), "L2")


def test_adamw_stays_decoupled_whatever_the_file_says():
    a = Adam8bit(make_parameters(SHAPES), decoupled_weight_decay=False, weight_decay=0.1, min_8bit_size=0)
    advance(a, 1, 2)
    b = fresh()
    b.load_state_dict(a.state_dict())
    assert b.param_groups[0]["decoupled_weight_decay"] and b.param_groups[0]["weight_decay"] == 0.1
