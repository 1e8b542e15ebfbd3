"""Adam8bit and AdamW8bit: the torch.optim contract over the fused step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import convert, gradients, loading, master_weights, offload, ops, options
from . import state as state_of
from .offload import Offload
from .planner import Planner, check_param
from .step_plan import Bucket, StepPlan


class _Prepared(NamedTuple):
    """A step that has been checked and planned. Lists run parallel to the plan's buckets."""

    plan: StepPlan
    scalars: list[tuple[Tensor, Tensor]]
    """Each bucket's scalar table and tensor table."""
    grads: list[list[Tensor]]
    fetched: list[offload.Fetched | None]
    grad_scale: Tensor | None
    found_inf: Tensor | None
    launched: list[Bucket]
    """Those whose kernel has been called, and has not refused."""


class Adam8bit(torch.optim.Optimizer):
    r"""Adam with **decoupled** weight decay and 8-bit state.

    Weight decay is decoupled, as in bitsandbytes' `Adam8bit` and `torch.optim.AdamW`, *not* added to the gradient as
    in `torch.optim.Adam`; `decoupled_weight_decay=False` gives torch.optim.Adam's. In everything else the update is
    Adam's (Kingma & Ba, 2015, https://arxiv.org/abs/1412.6980). Both moments are kept in 8 bits with a scale per block
    of `block_size` elements, about 2.03 bytes per parameter instead of 8, and updated in FP32 registers.

    Args:
        params: parameters (FP32, BF16, FP16 or FP8), named parameters, or param groups. Every option below can also
            stand in a param group and is saved with it. `state_bits: 32` in a group keeps its state in FP32.
        lr: learning rate; a float or a 0-dim tensor. A tensor on an accelerator needs `capturable`.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the denominator. Values below 2^-64 act as 2^-64.
        weight_decay: decoupled weight decay coefficient (multiplied by lr), or the L2 coefficient when
            `decoupled_weight_decay` is False.
        amsgrad: divide by the largest second moment so far (a third 8-bit state).
        maximize: ascend instead of descend.
        decoupled_weight_decay: see above.
        capturable: keep `step` on the parameter's device and compute the schedule there, so that a CUDA graph can
            capture the step.
        codec: the state format: "adaptive" (most precise), "dynamic" (bitsandbytes' map) or "e4m3" (FP8).
        block_size: elements per scale: 64, 128 or 256.
        min_8bit_size: parameters with fewer elements keep FP32 state. So do 1-D parameters below 2^20 elements and
            parameters whose rows have fewer than 8 elements.
        param_rounding: how the new value of a parameter that is not FP32 is rounded to its dtype: "nearest", or
            "stochastic", which is unbiased, so that small updates add up. None: stochastic for FP8 parameters without
            `master_bits`, nearest for all others. Reproducible: the random bits are a hash of (`rounding_seed`, step,
            element), the same on every backend and at any world size, and for elements of the same index in several
            parameters (a `rounding_seed` for each param group makes them differ).
        rounding_seed: see above.
        master_bits: keep parameters that are not FP32 as if they had so many bits: 24 or 32 for BF16 and FP16, 16 or 24
            for FP8. The bits that the dtype lacks are kept in the state as `param_correction` (int8 or int16).
        max_grad_norm: clip the gradients of all groups together to this Euclidean norm, as
            torch.nn.utils.clip_grad_norm_ would before the step, without writing them. The norm is then in
            `last_grad_norm`. If it is not finite, all gradients of the step count as 0.
        offload: "cpu" keeps the state (with `master_bits` the correction too) of parameters on an accelerator in CPU
            memory and makes the step there: each gradient is copied down and each new weight up, nothing else. With
            `step_in_backward` all of that goes on during backward. The host also holds a copy of the weights; a weight
            that is written through `.data`, which leaves no trace, is not noticed.
        backend: None chooses by device. "cpp", "triton", "cuda" or "reference" insist on one: an error says why if it
            cannot serve.

    State of a parameter, under torch's names: `step` (float32 scalar), `exp_avg`, `exp_avg_sq` (codes of the
    parameter's shape) and `exp_avg_scale`, `exp_avg_sq_scale` ([rows, blocks per row]; rows is dim 0); FP32 `exp_avg`,
    `exp_avg_sq` where it stays in 32 bits; with amsgrad also `max_exp_avg_sq` and its scale.

    A gradient element that is NaN, infinite or above 2^63 counts as 0 for that element alone; `nonfinite_count()` says
    how many there were.

    Raises:
        ValueError: an option is out of range.
        TypeError: a parameter or gradient has a dtype or layout that is not supported.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        capturable: bool = False,
        codec: str = "adaptive",
        block_size: int = 256,
        min_8bit_size: int = 4096,
        param_rounding: str | None = None,
        rounding_seed: int = 0,
        master_bits: int | None = None,
        max_grad_norm: float | None = None,
        offload: str | None = None,
        backend: str | None = None,
        **unsupported: Any,
    ) -> None:
        own_name = type(self).__name__
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            capturable=capturable,
            codec=codec,
            block_size=block_size,
            min_8bit_size=min_8bit_size,
            state_bits=8,
            param_rounding=param_rounding,
            rounding_seed=rounding_seed,
            master_bits=master_bits,
            max_grad_norm=max_grad_norm,
            offload=offload,
            backend=backend,
            state_format=state_of.STATE_FORMAT,
        )
        for name in unsupported:
            if name == "state_bits":
                raise TypeError(f"{own_name} does not take state_bits: put `state_bits: 32` into a param group")
            if name in options.UNSUPPORTED:
                raise TypeError(f"{own_name} does not take {name}: {options.UNSUPPORTED[name]}")
            close = options.meant(name, defaults)
            hint = f". Did you mean {close!r}?" if close else ""
            raise TypeError(f"{own_name} got an unexpected keyword argument {name!r}{hint}")
        options.check(defaults, own_name)
        self._nonfinite: dict[torch.device, Tensor] = {}
        self._in_backward: Any = None
        self._offload = Offload()
        self.last_grad_norm: Tensor | None = None
        super().__init__(params, defaults)
        self._planner = Planner(self)

    # -- param groups and pickling ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. Options that it lacks take the optimizer's defaults."""
        number = len(self.param_groups)
        if isinstance(param_group, dict):
            options.check_names(param_group, self.defaults, f"param group {number}")
            options.check(self.defaults | param_group, f"param group {number}")
        super().add_param_group(param_group)
        group = self.param_groups[number]
        try:
            for i, p in enumerate(group["params"]):
                if p.requires_grad:
                    check_param(p, group, options.parameter_name(group, number, i))
        except (TypeError, ValueError):
            del self.param_groups[number]
            raise

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A pickle of an older version lacks some. torch adds one, which groups that were never loaded do not have, and
        # flattened checkpoints of torch.distributed ask for every entry of a group.
        self.defaults = options.DEFAULTS | self.defaults
        self.defaults.pop("differentiable", None)
        self.__dict__.setdefault("_nonfinite", {})
        self.__dict__.setdefault("_in_backward", None)
        self.__dict__.setdefault("_offload", Offload())
        self.__dict__.setdefault("last_grad_norm", None)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        self._planner = Planner(self)

    # -- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state and the param groups, as torch.optim has them: plain tensors and numbers."""
        self._settle()
        result = super().state_dict()
        # Step counters are views of one packed tensor; a file should hold each by itself.
        result["state"] = {
            key: value | {"step": value["step"].clone()} if isinstance(value.get("step"), Tensor) else value
            for key, value in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned, or an Adam state of another library. The tensors are copied.

        A state in another format is converted to this optimizer's own, parameter by parameter, and a warning says what
        was converted and what was lost: one of fused8 with other `codec`, `block_size`, `min_8bit_size` or
        `state_bits`; of torch.optim.Adam and AdamW; of bitsandbytes' Adam, Adam8bit, AdamW8bit; of torchao's 8-bit,
        4-bit and FP8 Adam and AdamW; of FlashOptim's Adam and AdamW.

        Saved options of a group win over the optimizer's, except codec, block_size, min_8bit_size, state_bits,
        master_bits, offload, max_grad_norm and backend, which stay its own; options that are missing take the defaults,
        and with a file of another library the group's own. So a file that does not say whether its weight decay was
        decoupled changes nothing about that. Extra bits of weights (`master_bits`) that the file does not have stay as
        they are: `load_master_state_dict` may come before or after. Fewer or more bits are refused.

        Raises:
            ValueError, TypeError: the groups, the shapes, dtypes or values do not fit, or the format is not known.
                Nothing is changed then.
        """
        self._settle()
        convert.check_structure(state_dict)
        load = loading.Load()
        # torch would cast integer codes and scales to the parameter's dtype: they pass through it in boxes.
        # Hooks of the user come first when reading and last when done.
        prepare = self.register_load_state_dict_pre_hook(load.prepare)
        finish = self.register_load_state_dict_post_hook(loading.unbox, prepend=True)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            prepare.remove()
            finish.remove()
        if load.report.converted:
            warnings.warn(f"fused8 loaded the {load.report}", UserWarning, stacklevel=2)

    def torch_state_dict(self, device: torch.device | str | None = None) -> dict[str, Any]:
        """The state in FP32 as torch.optim.AdamW saves it, for its `load_state_dict`, or that of torch.optim.Adam.

        With `decoupled_weight_decay=False` it is for torch.optim.Adam: AdamW decouples whatever it loads.

        Args:
            device: where the tensors go; None keeps them where they are. In FP32 the state is four times as large:
                "cpu" keeps it off the accelerator.

        Raises:
            ValueError: the state holds extra bits of weights (`master_bits`), which torch.optim has no place for.
        """
        return convert.to_torch_state_dict(self.state_dict(), device=device)

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """`model.state_dict()` with the parameters of this optimizer in FP32, for a checkpoint of full precision.

        With `master_bits` that is the parameter and its `param_correction` together: all the bits that the optimizer
        works with. Without, it is the parameter itself. Buffers and other parameters stay as they are. A tied weight is
        one tensor under several names, as in `model.state_dict()`.
        """
        self._settle()
        return master_weights.state_dict(self, model)

    def load_master_state_dict(self, model: torch.nn.Module, state_dict: Mapping[str, Any]) -> None:
        """Load FP32 weights into the model and, with `master_bits`, what its dtype lacks into the state.

        `model.load_state_dict` alone would round the weights and leave the old `param_correction` beside them.

        Raises:
            ValueError, TypeError: names, shapes or dtypes do not fit, or a weight is beyond the largest number of its
                dtype. Nothing is changed then.
        """
        self._settle()
        master_weights.load_state_dict(self, model, state_dict)

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, in place.

        Args:
            closure: reevaluates the model and returns the loss, which `step` then returns.

        Raises:
            TypeError, ValueError, RuntimeError: before any parameter or state is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.finish_step(self)
        else:
            # GradScaler sets these two for the duration of the call, as on torch's fused optimizers.
            # Without any gradient found_inf is the number 0.
            found_inf = getattr(self, "found_inf", None)
            self._step(getattr(self, "grad_scale", None), found_inf if isinstance(found_inf, Tensor) else None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim. With `step_in_backward` it also forgets a backward that did not end."""
        if self._in_backward is not None:
            self._in_backward.forget()
        super().zero_grad(set_to_none)

    def _settle(self) -> None:
        """Wait for steps that a thread still makes."""
        if self._in_backward is not None:
            self._in_backward.join()

    @torch._disable_dynamo
    @torch.no_grad()
    def _step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Step all parameters that have gradients."""
        if found_inf is not None and (found_inf.device.type == "cpu" or self._offloads()):
            if bool(found_inf):
                return
            found_inf = None
        self._execute(self._prepare(grad_scale, found_inf, only=None))
        self._offload.finish()

    def _offloads(self) -> bool:
        return any(group["offload"] is not None for group in self.param_groups)

    @torch.no_grad()
    def _prepare(self, grad_scale: Tensor | None, found_inf: Tensor | None, only: Tensor | None) -> _Prepared:
        """Check and plan a step of all parameters, or of the one `only`. Nothing changes yet, but that gradients of
        offloaded parameters set out."""
        if only is None:
            hyperparameters = {i: options.hyperparameters(group, i) for i, group in enumerate(self.param_groups)}
            max_grad_norm = options.max_grad_norm(self.param_groups)
        else:
            number = self._planner.place(only)[0]
            hyperparameters = {number: options.hyperparameters(self.param_groups[number], number)}
            max_grad_norm = None
            if self.param_groups[number]["max_grad_norm"] is not None:
                raise RuntimeError("max_grad_norm cannot clip in backward, where the norm is not known: remove() first")
        plan = self._planner.plan(found_inf is not None, only)
        scalars = plan.scalars(hyperparameters)
        grads = [bucket.local_grads() for bucket in plan.buckets]
        fetched = [
            self._offload.fetch(bucket.params, own) if bucket.key.offload_from is not None else None
            for bucket, own in zip(plan.buckets, grads, strict=True)
        ]
        if max_grad_norm is not None:
            norm = gradients.global_norm(
                [(bucket.params, own) for bucket, own in zip(plan.buckets, grads, strict=True)]
            )
            self.last_grad_norm, grad_scale = gradients.clip(norm, grad_scale, max_grad_norm)
        return _Prepared(plan, scalars, grads, fetched, grad_scale, found_inf, launched=[])

    @torch.no_grad()
    def _execute(self, step: _Prepared) -> None:
        # A signal that comes during a launch is delivered when it returns: by then the step must have been counted.
        for counters in step.plan.counters:
            counters.advance(step.found_inf)
        try:
            work = list(zip(step.plan.buckets, step.grads, step.scalars, step.fetched, strict=True))
            for bucket, grads, scalars, fetched in work:
                if fetched is None:
                    self._run(bucket, grads, *scalars, step)
            for bucket, _, scalars, fetched in work:
                if fetched is not None:  # the CPU works while the devices do
                    self._run_offloaded(bucket, fetched, *scalars, step)
        except BaseException:
            for bucket in step.plan.buckets:
                if bucket not in step.launched:
                    bucket.counters.take_back(bucket.slots, step.found_inf)
            raise

    def _run(self, bucket: Bucket, grads: list[Tensor], scalars: Tensor, table: Tensor, step: _Prepared) -> None:
        params = bucket.local_params()
        contiguous = params
        if bucket.key.solo is not None:
            contiguous, grads = [p.contiguous() for p in params], [g.contiguous() for g in grads]
        self._call(bucket, contiguous, grads, bucket.states, scalars, table, step, bucket.cache)
        for p, source in zip(params, contiguous, strict=True):
            if source is not p:
                p.copy_(source)
        torch.autograd.graph.increment_version(bucket.params)

    def _run_offloaded(
        self, bucket: Bucket, fetched: offload.Fetched, scalars: Tensor, table: Tensor, step: _Prepared
    ) -> None:
        def run(piece: slice, params: list[Tensor], grads: list[Tensor]) -> None:
            states = [tensors[piece] for tensors in bucket.states]
            cache = bucket.cache.setdefault(str(piece.start), {})
            self._call(bucket, params, grads, states, scalars, table[piece], step, cache)

        fetched.step(run)
        torch.autograd.graph.increment_version(bucket.params)
        fetched.are_sent()

    def _call(
        self,
        bucket: Bucket,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        scalars: Tensor,
        table: Tensor,
        step: _Prepared,
        cache: dict[str, Any],
    ) -> None:
        key = bucket.key
        device = key.device
        if device not in self._nonfinite:
            self._nonfinite[device] = torch.zeros(1, dtype=torch.int64, device=device)
        step.launched.append(bucket)
        try:
            ops.adam_step(
                key.backend,
                params,
                grads,
                *states,
                scalars,
                table,
                None if step.grad_scale is None else step.grad_scale.to(device),
                None if step.found_inf is None else step.found_inf.to(device),
                self._nonfinite[device],
                key.codec,
                key.block_size,
                key.decoupled_weight_decay,
                key.maximize,
                key.stochastic_rounding,
                cache=cache,
            )
        except Exception:
            step.launched.remove(bucket)
            raise

    def nonfinite_count(self) -> int:
        """How many gradient elements were not finite (or above 2^63) and counted as 0, since this object was made.

        Reads the counters of all devices, and so waits for them. Steps that GradScaler skips are not counted.
        """
        return sum(int(counter.item()) for counter in self._nonfinite.values())


class AdamW8bit(Adam8bit):
    r"""AdamW with 8-bit state: `Adam8bit` with a `weight_decay` of 1e-2, always decoupled.

    The defaults are those of torch.optim.AdamW (Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101).
    Arguments as in `Adam8bit`, without `decoupled_weight_decay`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **others: Any,
    ) -> None:
        if "decoupled_weight_decay" in others:
            raise TypeError("AdamW8bit always decouples weight decay; Adam8bit takes decoupled_weight_decay")
        super().__init__(params, lr, betas, eps, weight_decay, **others)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # whatever the file of another optimizer says, as torch.optim.AdamW
            group["decoupled_weight_decay"] = True
