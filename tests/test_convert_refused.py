"""State that does not fit, is damaged or hostile: refused with a clear error, and the optimizer stays what it was."""

import contextlib
import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused8 import convert, foreign

from .convert_support import (
    MAKERS,
    advance,
    assert_refused,
    trained,
)
from .support import assert_same_optimizers


def change(name, make, key=0):
    """Replace an entry of a parameter's state, nested or not; None drops it."""

    def damage(state_dict):
        state = state_dict["state"][key]
        holder = state if name in state else state[foreign.NESTED_BITSANDBYTES]
        new = make and make(holder[name])
        if new is None:
            del holder[name]
        else:
            holder[name] = new

    return damage


def add(name, value, key=0):
    return lambda state_dict: state_dict["state"][key].update({name: value})


def option(name, value):
    return lambda state_dict: state_dict["param_groups"][0].update({name: value})


def nan(t):
    return t * float("nan")


MISFITS = {
    # (which state, what is done to it, the message)
    "momentum of SGD": (
        "torch",
        lambda sd: sd["state"].update({0: {"momentum_buffer": torch.zeros(16, 256)}}),
        "no state of Adam",
    ),
    "NAdam": ("torch", add("mu_product", torch.tensor(1.0)), "unknown entries mu_product"),
    "Adamax": ("torch", change("exp_avg_sq", None), "parameter 0 of group 0 lacks exp_avg_sq"),
    "no step": ("torch", change("step", None), "lacks step"),
    "amsgrad without its state": ("torch", change("max_exp_avg_sq", None), "lacks max_exp_avg_sq"),
    "state of amsgrad without it": ("torch", option("amsgrad", False), "unknown entries max_exp_avg_sq"),
    "another shape": (
        "torch",
        change("exp_avg", lambda t: t[:8]),
        r"exp_avg of shape \(8, 256\), expected \(16, 256\)",
    ),
    "a transposed moment": (
        "torch",
        change("exp_avg_sq", lambda t: t.t(), 2),
        r"parameter 2 of group 0 has exp_avg_sq",
    ),
    "integers": ("torch", change("exp_avg", lambda t: t.int()), "exp_avg of dtype torch.int32"),
    "complex numbers": ("torch", change("exp_avg", lambda t: t + 1j), "exp_avg of dtype torch.complex64"),
    "a sparse moment": ("torch", change("exp_avg", lambda t: t.to_sparse()), "exp_avg that is no dense tensor"),
    "a moment without data": ("torch", change("exp_avg", lambda t: t.to("meta")), "exp_avg that is no dense tensor"),
    "a moment that claims more data than it has": (
        "torch",
        change("exp_avg", lambda t: torch.zeros(1).expand(t.shape)),
        "exp_avg of 4,096 elements, and the data of fewer",
    ),
    "no tensor": ("torch", change("exp_avg", lambda t: t.tolist()), "exp_avg of type list"),
    "NaN": ("torch", change("exp_avg_sq", nan), r"values in exp_avg_sq outside \[0, "),
    "negative v": ("torch", change("exp_avg_sq", lambda t: -t), r"values in exp_avg_sq outside \[0, "),
    "infinite maximum": ("torch", change("max_exp_avg_sq", lambda t: t / 0), "values in max_exp_avg_sq outside"),
    "huge m": ("torch", change("exp_avg", lambda t: t * 0 - 1e19), "values in exp_avg outside"),
    "a fractional step": ("torch", change("step", lambda t: t + 0.5), "step 2.5"),
    "a huge step": ("torch", change("step", lambda t: 10**400), "step beyond"),
    "two steps": ("torch", change("step", lambda t: torch.ones(2)), r"step of shape \(2,\)"),
    "a step of text": ("torch", change("step", lambda t: "two"), "step of type str"),
    "a complex step": ("torch", change("step", lambda t: t * 1j), "step of dtype torch.complex64"),
    "no betas": ("torch", option("betas", None), "betas must be two numbers"),
    "betas of 1": ("torch", option("betas", (0.9, 1.0)), "betas must be two numbers"),
    "a vector for lr": ("torch", option("lr", torch.ones(2)), "lr must be a number"),
    "a NaN for lr": ("torch", option("lr", float("nan")), "lr must be a finite number"),
    "a tensor of NaN for lr": ("torch", option("lr", torch.tensor(float("nan"))), "lr must be a finite number"),
    "a tensor for an option": ("torch", option("maximize", torch.tensor(True)), "maximize must not be a tensor"),
    "amsgrad of text": ("torch", option("amsgrad", "yes"), "amsgrad must be True or False"),
    "other groups": ("torch", lambda sd: sd["param_groups"].append({"params": []}), "2 param groups"),
    "too few parameters": ("torch", option("params", [0, 1]), "2 parameters in the saved state and 6"),
    "a parameter twice": ("torch", option("params", [0, 1, 2, 3, 4, 4]), "names parameter 4 twice"),
    "params of text": ("torch", option("params", "012345"), "no list of 'params'"),
    "a list as a key": ("torch", option("params", [[0], 1, 2, 3, 4, 5]), "names a parameter"),
    "too few names": ("torch", option("param_names", ["a"]), "param_names that do not fit"),
    "groups that are no list": ("torch", lambda sd: sd.update(param_groups={"lr": 1}), "must be a list of dicts"),
    "groups that are no dicts": ("torch", lambda sd: sd.update(param_groups=[1]), "must be a list of dicts"),
    "state that is no dict": ("torch", lambda sd: sd.update(state=[1]), "'state' must be a dict"),
    "state of a parameter that is no dict": ("torch", lambda sd: sd["state"].update({0: 1}), "must be a dict, not int"),
    "no state": ("torch", lambda sd: sd.pop("state"), "no 'state'"),
    "bnb without state2": ("bitsandbytes", change("state2", None), "lacks state2"),
    "bnb with amsgrad": ("bitsandbytes", option("amsgrad", True), "lacks max_exp_avg_sq, which amsgrad needs"),
    "bnb without absmax": ("bitsandbytes", change("absmax1", None), "lacks absmax1"),
    "bnb with other blocks": (
        "bitsandbytes",
        change("absmax1", lambda t: t[:5]),
        "absmax1 of 5 elements, expected 2 or 16",
    ),
    "bnb with two block sizes": ("bitsandbytes", change("absmax1", lambda t: t[:2]), "of different lengths"),
    "bnb with a matrix of absmax": ("bitsandbytes", change("absmax1", lambda t: t.view(4, 4)), "absmax1 of shape"),
    "bnb with absmax in bfloat16": ("bitsandbytes", change("absmax2", lambda t: t.bfloat16()), "absmax2 of dtype"),
    "bnb with a NaN": ("bitsandbytes", change("absmax2", nan), "values in absmax2 outside"),
    "bnb with negative absmax": ("bitsandbytes", change("absmax1", lambda t: -t), "values in absmax1 outside"),
    "bnb with another map": ("bitsandbytes", change("qmap1", lambda t: t.flip(0)), "qmap1 that is not the dynamic map"),
    "bnb with a short map": ("bitsandbytes", change("qmap2", lambda t: t[:16]), "qmap2 of shape"),
    "bnb in two dtypes": ("bitsandbytes", change("state2", lambda t: t.float()), "state2 of dtype"),
    "bnb with signed codes": (
        "bitsandbytes",
        change("state1", lambda t: t.view(torch.int8)),
        "unknown entries absmax1",
    ),
    "bnb of another shape": ("bitsandbytes", change("state1", lambda t: t.view(-1)), "state1 of shape"),
    "bnb of a transposed memory format": (
        "bitsandbytes",
        change("state1", lambda t: t.t().contiguous().t()),
        "not contiguous",
    ),
    "bnb not blockwise": ("bitsandbytes", add("max1", torch.ones(1)), "block_wise=False"),
    "bnb's Lion": (
        "bitsandbytes",
        lambda sd: sd["state"].update({0: {"step": 1, "state1": torch.zeros(16, 256)}}),
        "lacks state2",
    ),
    "bnb's AdEMAMix": ("bitsandbytes", change("state1", lambda t: torch.stack([t, t])), "state1 of shape"),
    "bnb with no nested dict": ("bitsandbytes", add(foreign.NESTED_BITSANDBYTES, [1]), "of type list"),
    "an unknown codec": ("fused8", option("codec", "nf4"), "codec must be one of"),
    "an unknown block size": ("fused8", option("block_size", 7), "block_size must be one of"),
    "another codec": ("fused8", option("codec", "adaptive"), "exp_avg of dtype torch.uint8, expected torch.int8"),
    "another block size": ("fused8", option("block_size", 64), "exp_avg_scale of shape"),
    "no scale": ("fused8", change("exp_avg_scale", None), "lacks exp_avg_scale"),
    "scales of a parameter that never has 8 bits": (
        "fused8",
        add("exp_avg_scale", torch.zeros(1, 1), 5),
        "unknown entries exp_avg_scale",
    ),
    "a fractional step of ours": ("fused8", change("step", lambda t: t + 0.5), "step 2.5"),
    "NaN for lr, of ours": ("fused8", option("lr", torch.tensor(float("nan"))), "lr must be a finite number"),
    "the codes of NaN": ("fused8", change("exp_avg", lambda t: t | 0x7F), "the code of NaN"),
    "flashoptim without scales": ("FlashOptim", change("exp_avg::scales", None), "lacks exp_avg::scales"),
    "flashoptim in other groups": (
        "FlashOptim",
        change("exp_avg::scales", lambda t: t[:3]),
        "exp_avg::scales of shape",
    ),
    "flashoptim with a NaN": ("FlashOptim", change("exp_avg_sq::scales", nan), "values in exp_avg_sq::scales outside"),
    "flashoptim that overflowed": (
        "FlashOptim",
        change("exp_avg::scales", lambda t: t / 0),
        "values in exp_avg::scales",
    ),
    "flashoptim with code -128": (
        "FlashOptim",
        change("exp_avg::quantized", lambda t: t * 0 - 128),
        "exp_avg::quantized",
    ),
    "flashoptim of a transposed memory format": (
        "FlashOptim",
        change("exp_avg::quantized", lambda t: t.t().contiguous().t()),
        "exp_avg::quantized that is not contiguous",
    ),
    "flashoptim's codes as floats": (
        "FlashOptim",
        change("exp_avg::quantized", lambda t: t.half()),
        "quantized of dtype",
    ),
}


# A state dict by itself does not tell which parameters there are, nor their shapes.
NEED_AN_OPTIMIZER = ("another shape", "other groups", "too few parameters")


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_changes(case):
    kind, damage, message = MISFITS[case]
    state_dict = copy.deepcopy(MAKERS[kind]())
    damage(state_dict)
    assert_refused(state_dict, message)
    if case not in NEED_AN_OPTIMIZER:
        with pytest.raises((ValueError, TypeError)):
            convert.to_torch_state_dict(state_dict)


def test_what_amsgrad_lacks_is_refused_in_every_conversion():
    state_dict = copy.deepcopy(MAKERS["bitsandbytes"]())
    option("amsgrad", True)(state_dict)
    with pytest.raises(ValueError, match="saved state of parameter 0 lacks max_exp_avg_sq, which amsgrad needs"):
        convert.to_fused8_state_dict(state_dict)


@pytest.mark.parametrize("state_dict", [None, [], 3, "state", {}, {"state": {}}])
def test_what_is_no_state_dict_is_refused(state_dict):
    assert_refused(state_dict)
    for to in (convert.to_torch_state_dict, convert.to_fused8_state_dict, convert.to_bitsandbytes_state_dict):
        with pytest.raises((ValueError, TypeError)):
            to(state_dict)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.just(b"x"),
    st.just([]),
    st.just({}),
    st.just({1: 2}),
    st.sampled_from([torch.tensor(value) for value in (1.0, float("nan"), 3, True, 1j)]),
    st.just(torch.zeros(2, 2)),
)
TENSOR_CHANGES = [
    lambda t: t.flatten()[:-1],
    lambda t: t.unsqueeze(0),
    lambda t: t.t() if t.dim() == 2 else t[None],
    lambda t: t.float() * float("nan") if t.is_floating_point() else t.float(),
    lambda t: -t,
    lambda t: t * 0,
    lambda t: t.bfloat16(),
    lambda t: t.double(),
    lambda t: t.to(torch.int64),
    lambda t: t.to(torch.complex64),
    lambda t: t.to(torch.bool),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: t.expand(2, *t.shape),
    lambda t: t.contiguous().view(torch.uint8) if t.dim() else t,
    lambda t: torch.empty(0),
    lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t,
    lambda t: torch.nested.nested_tensor([t.float()], layout=torch.jagged) if t.dim() else t,
]
SMALL = ((9, 16), (3,))
ORIGINALS = {name: make(SMALL) for name, make in MAKERS.items()}


def places(container, path=()):
    """Paths of everything within nested dicts and lists."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


NAMES = [7, "exp_avg", "state1", "codec", "step", "exp_avg_scale"]


def damage_one_place(state_dict, data):
    path = data.draw(st.sampled_from(sorted(places(state_dict), key=str)))
    holder, key = state_dict, path[-1]
    for outer in path[:-1]:
        holder = holder[outer]
    kind = data.draw(st.sampled_from(["drop", "scalar", "tensor", "rename"]))
    if kind == "drop":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[data.draw(st.sampled_from(NAMES))] = holder.pop(key)
    elif kind == "tensor" and isinstance(holder[key], torch.Tensor):
        change_tensor = data.draw(st.sampled_from(TENSOR_CHANGES))
        with contextlib.suppress(RuntimeError, NotImplementedError, IndexError):  # of one that was changed before
            holder[key] = change_tensor(holder[key])
    else:
        holder[key] = copy.deepcopy(data.draw(SCALARS))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_state_loads_or_is_refused_and_nothing_else(data):
    """Whatever is changed in a valid state: it still loads, or a ValueError or TypeError leaves all as it was."""
    state_dict = copy.deepcopy(ORIGINALS[data.draw(st.sampled_from(sorted(ORIGINALS)))])
    for _ in range(data.draw(st.integers(1, 3))):
        if [*places(state_dict)]:
            damage_one_place(state_dict, data)
    optimizer = trained(SMALL)
    before, groups = copy.deepcopy(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer.load_state_dict(state_dict)
        except (ValueError, TypeError):
            assert_same_optimizers(optimizer, before, "after the error")
            assert optimizer.state_dict()["param_groups"] == groups
        else:
            advance(optimizer, 4, 4)
        for to in (convert.to_torch_state_dict, convert.to_fused8_state_dict, convert.to_bitsandbytes_state_dict):
            with contextlib.suppress(ValueError, TypeError):
                to(state_dict)
