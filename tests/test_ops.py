"""The operator: its schema, its fake kernel, and what the compiled kernel refuses before it changes anything."""

import pytest
import torch

from fused8.step_plan import Hyperparameters, scalar_row, scalar_table


def arguments(codec="adaptive", shape=(4, 256)):
    """One tensor's worth of the operator's arguments, by name."""
    code, sq_code, sq_scale = {
        "adaptive": (torch.int8, torch.uint8, torch.int32),
        "dynamic": (torch.uint8, torch.uint8, torch.float32),
    }[codec]
    scale_shape = (shape[0], -(-shape[1] // 256))
    return {
        "params": [torch.randn(shape)],
        "grads": [torch.randn(shape)],
        "exp_avg": [torch.zeros(shape, dtype=code)],
        "exp_avg_sq": [torch.zeros(shape, dtype=sq_code)],
        "exp_avg_scale": [torch.zeros(scale_shape)],
        "exp_avg_sq_scale": [torch.zeros(scale_shape, dtype=sq_scale)],
        "max_exp_avg_sq": [],
        "max_exp_avg_sq_scale": [],
        "param_correction": [],
        "scalars": scalar_table([scalar_row(Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.0, True), 1)]),
        "table": torch.tensor([[0, 0, 0, shape[1]]]),
        "grad_scale": None,
        "found_inf": None,
        "nonfinite": torch.zeros(1, dtype=torch.int64),
        "codec": codec,
        "block_size": 256,
        "decoupled_weight_decay": True,
        "maximize": False,
        "stochastic_rounding": False,
    }


@pytest.mark.parametrize("codec", ["adaptive", "dynamic"])
def test_schema_and_fake_kernel(codec):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fused8.adam_step_.default, tuple(arguments(codec).values()), test_utils=checks)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(params=[torch.zeros(4, 256, dtype=torch.float64)]), "params must be float32, .*not float64"),
        (dict(grads=[torch.zeros(4, 256).to(torch.float8_e5m2)]), "grads must be float32, .*not float8_e5m2"),
        (dict(grads=[]), "grads must hold 1 tensors"),
        (dict(grads=[torch.zeros(4, 255)]), r"grads\[0\]"),
        (dict(exp_avg=[torch.zeros(4, 256, dtype=torch.uint8)]), r"exp_avg\[0\]"),
        (dict(param_correction=[torch.zeros(4, 256, dtype=torch.int8)]), "float32 have no param_correction"),
        (
            dict(params=[torch.zeros(4, 256).half()], param_correction=[torch.zeros(4, 256)]),
            "int8 or int16, not float32",
        ),
        (
            dict(params=[torch.zeros(4, 256).half()], param_correction=[torch.zeros(4, 255, dtype=torch.int8)]),
            r"param_correction\[0\] must have the shape",
        ),
        (dict(exp_avg_scale=[torch.zeros(4, 2)]), r"exp_avg_scale\[0\]"),
        (dict(exp_avg_sq=[torch.zeros(256, 4, dtype=torch.uint8).t()]), "contiguous"),
        (dict(scalars=torch.zeros(1, 10)), "scalars"),
        (dict(table=torch.tensor([[1, 0, 0, 256]])), "row 1 of scalars"),
        (dict(codec="int4"), "int4"),
        (dict(block_size=100), "block_size"),
        (dict(nonfinite=torch.zeros(2, dtype=torch.int64)), "nonfinite"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(change, message):
    args = arguments() | change
    before = [tensor.clone() for name in ("params", "exp_avg", "exp_avg_sq") for tensor in args[name]]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fused8.adam_step_(*args.values())
    after = [tensor for name in ("params", "exp_avg", "exp_avg_sq") for tensor in args[name]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
