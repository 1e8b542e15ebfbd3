"""The torch.library operators of fused8: schemas and fake kernels, and the call that runs one bucket.

The schemas stand here, in Python, so that they exist whether or not the compiled library (csrc/) does; it only adds
kernels to them. No other module registers operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backends

_library = torch.library.Library("fused8", "DEF")

# Lists run parallel to `params`. With codec "fp32" both scale lists are empty; without amsgrad both max lists are.
# `param_correction` holds the extra mantissa bits of parameters that are not float32 (formats.py: int8 or int16, of the
# parameter's shape), or nothing. `stochastic_rounding` says how their new values are rounded.
# All tensors of the lists are contiguous and on one device. Columns of `scalars` (float32) and `table` (int64):
# step_plan.SCALAR_COLUMNS and TABLE_COLUMNS. Gradients are divided by `grad_scale` (one float32). A found_inf that is
# not zero makes the call do nothing.
_library.define(
    "adam_step_("
    "Tensor(a!)[] params, Tensor[] grads, "
    "Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
    "Tensor(d!)[] exp_avg_scale, Tensor(e!)[] exp_avg_sq_scale, "
    "Tensor(f!)[] max_exp_avg_sq, Tensor(g!)[] max_exp_avg_sq_scale, Tensor(h!)[] param_correction, "
    "Tensor scalars, Tensor table, Tensor? grad_scale, Tensor? found_inf, Tensor(i!) nonfinite, "
    "str codec, int block_size, bool decoupled_weight_decay, bool maximize, bool stochastic_rounding) -> ()"
)


@torch.library.register_fake("fused8::adam_step_", lib=_library)
def _adam_step_fake(*args: Any, **kwargs: Any) -> None:
    return None


backends.load_library()


def adam_step(backend: str | None, params: list[Tensor], *args: Any, cache: dict[str, Any]) -> None:
    """Step one bucket in place. `params` and the rest are the arguments of the schema above, in its order.

    `cache` belongs to the bucket and lives as long: what a backend wants to keep for its next step.
    """
    backends.select(params[0].device, backend).adam_step(params, *args, cache=cache)
