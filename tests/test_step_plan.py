"""Buckets, scalar rows and step counters, with no kernel."""

import pytest
import torch

from fused8 import Adam8bit, options
from fused8.state import codec_of, kept_in_8bit, rows_and_inner, state_specs
from fused8.step_plan import TABLE_COLUMNS

from .support import make_parameters, parameters, set_gradients


def plan_of(optimizer):
    return optimizer._planner.plan(count_on_device=False)


def planned(groups, **options):
    optimizer = Adam8bit(groups, min_8bit_size=0, **options)
    set_gradients(parameters(optimizer), 1)
    return optimizer, plan_of(optimizer)


def test_one_bucket_however_many_tensors_and_groups():
    params = make_parameters([(16, 256), (5, 300)] * 20)
    groups = [
        {"params": params[::2], "lr": 0.1},
        {"params": params[1::2], "weight_decay": 0.5, "betas": (0.8, 0.9)},
    ]
    _, plan = planned(groups)
    assert [len(bucket.params) for bucket in plan.buckets] == [40]


@pytest.mark.parametrize(
    "other",
    [
        dict(codec="dynamic"),
        dict(block_size=64),
        dict(amsgrad=True),
        dict(maximize=True),
        dict(decoupled_weight_decay=False),
        dict(state_bits=32),
        dict(backend="reference"),
        dict(capturable=True),
        dict(param_rounding="stochastic"),
        dict(master_bits=24),
    ],
)
def test_what_splits_a_bucket(other):
    a, b = make_parameters([(16, 256)] * 2, torch.bfloat16)
    _, plan = planned([{"params": [a]}, {"params": [b], **other}])
    assert [len(bucket.params) for bucket in plan.buckets] == [1, 1]


def test_dtypes_split_and_strides_go_alone():
    params = make_parameters([(16, 256)] * 2) + make_parameters([(16, 256)], torch.bfloat16)
    params += [torch.nn.Parameter(torch.randn(256, 16).t()) for _ in range(2)]
    _, plan = planned(params)
    assert sorted(len(bucket.params) for bucket in plan.buckets) == [1, 1, 1, 2]


def test_each_tensor_names_its_row_of_scalars():
    params = make_parameters([(16, 256), (4, 5, 70), (8, 64)])
    optimizer, _ = planned([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}])
    optimizer.step()
    params[0].grad = None
    optimizer.step()
    set_gradients(params, 3)
    plan = plan_of(optimizer)
    (bucket,) = plan.buckets
    hyperparameters = [options.hyperparameters(group, i) for i, group in enumerate(optimizer.param_groups)]
    ((scalars, table),) = plan.scalars(hyperparameters)
    assert scalars.shape == (3, 16)  # (group 0, step 2), (group 0, step 3), (group 1, step 3)
    rows = dict(zip(TABLE_COLUMNS, table.t().tolist(), strict=True))
    assert rows == {"scalar_row": [0, 1, 2], "row0": [0] * 3, "col0": [0] * 3, "global_inner": [256, 350, 64]}
    assert scalars[2, 5].item() == pytest.approx(0.5 / (1 - 0.9**3))
    assert bucket.table([0, 1, 2]) is table


def test_step_counters_are_views_of_one_tensor_and_the_plan_is_kept():
    optimizer, plan = planned(make_parameters([(16, 256)] * 3))
    for _ in range(3):
        set_gradients(parameters(optimizer), 1)
        optimizer.step()
        assert plan_of(optimizer) is plan
    (counters,) = plan.counters
    assert counters.packed.tolist() == [3, 3, 3]
    for state in optimizer.state.values():
        assert state["step"].untyped_storage().data_ptr() == counters.packed.untyped_storage().data_ptr()


@pytest.mark.parametrize("change", ["grad dtype", "grad strides", "no grad", "group option", "new group", "frozen"])
def test_what_makes_a_new_plan(change):
    params = make_parameters([(16, 16)] * 3)
    optimizer, plan = planned(params)
    optimizer.step()
    assert plan_of(optimizer) is plan
    if change == "grad dtype":
        params[0].grad = None
        params[0].grad_dtype = None
        params[0].grad = torch.ones(16, 16, dtype=torch.bfloat16)
    elif change == "grad strides":
        params[0].grad = torch.ones(16, 16).t().contiguous().t()
    elif change == "no grad":
        params[1].grad = None
    elif change == "group option":
        optimizer.param_groups[0]["maximize"] = True
    elif change == "new group":
        optimizer.add_param_group({"params": make_parameters([(16, 16)])})
        set_gradients(optimizer.param_groups[1]["params"], 1)
    elif change == "frozen":
        params[2].requires_grad_(False)
        params[2].grad = None
    optimizer.step()
    assert plan_of(optimizer) is not plan


def test_shapes():
    assert rows_and_inner(()) == (1, 1)
    assert rows_and_inner((7,)) == (1, 7)
    assert rows_and_inner((4, 5, 6)) == (4, 30)
    assert not kept_in_8bit((4096, 0), min_8bit_size=0, state_bits=8)
    group = dict(codec="adaptive", block_size=128, min_8bit_size=4096, state_bits=8, amsgrad=True, master_bits=None)
    specs = state_specs((100, 3, 100), group)
    assert codec_of((100, 3, 100), group) == "adaptive"
    assert {name: spec.shape for name, spec in specs.items()} == {
        "step": (),
        "exp_avg": (100, 3, 100),
        "exp_avg_scale": (100, 3),
        "exp_avg_sq": (100, 3, 100),
        "exp_avg_sq_scale": (100, 3),
        "max_exp_avg_sq": (100, 3, 100),
        "max_exp_avg_sq_scale": (100, 3),
    }
