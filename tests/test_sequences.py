"""Random optimizers in random sequences of calls: what must hold after each, whatever came before.

Two backends do the same; a third optimizer is saved, loaded and compared now and then.
"""

import copy

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fused8
from fused8.codecs import CODECS, Encoded
from fused8.reference import _to_blocks
from fused8.state import rows_and_inner

from .support import assert_same_optimizers, parameters, through_file

BACKENDS = ("cpp", "reference")
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple) | st.sampled_from([(3, 300), (2, 257), (1, 512), (20, 16)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
GROUPS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
        "betas": st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.9, 0.999, 0.99999])),
        "eps": st.sampled_from([0.0, 1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "decoupled_weight_decay": st.booleans(),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
        "codec": st.sampled_from(sorted(CODECS)),
        "block_size": st.sampled_from([64, 128, 256]),
        "min_8bit_size": st.sampled_from([0, 100]),
        "state_bits": st.sampled_from([8, 8, 32]),
        "param_rounding": st.sampled_from([None, "stochastic"]),
        "master_bits": st.sampled_from([None, None, 24, 32]),
        "offload": st.sampled_from([None, None, "cpu"]),
    }
)
LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided"])
TREE = st.lists(st.tuples(SHAPES, DTYPES, LAYOUTS), min_size=1, max_size=4)


def in_layout(x, layout):
    if x.dim() >= 2 and layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if x.dim() >= 1 and layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    return x


class Sequences(RuleBasedStateMachine):
    @initialize(tree=TREE, group=GROUPS, seed=st.integers(0, 1000))
    def start(self, tree, group, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizers = [
            fused8.Adam8bit(params, backend=backend, **{k: v for k, v in group.items() if k != "state_bits"})
            for backend, params in zip(BACKENDS, self.new_parameters(tree), strict=True)
        ]
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["state_bits"] = group["state_bits"]
        self.moving = [{} for _ in BACKENDS]  # parameter -> where its v must not be 0

    def new_parameters(self, tree):
        """The same for each backend."""
        values = [(torch.randn(shape, generator=self.generator).to(dtype), layout) for shape, dtype, layout in tree]
        return [[torch.nn.Parameter(in_layout(x.clone(), layout)) for x, layout in values] for _ in BACKENDS]

    @rule(tree=TREE, group=GROUPS)
    @precondition(lambda self: len(self.optimizers[0].param_groups) < 3)
    def add_param_group(self, tree, group):
        for optimizer, params in zip(self.optimizers, self.new_parameters(tree), strict=True):
            optimizer.add_param_group({"params": params, **group})

    @rule(scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e12]), given_to=st.integers(1, 15), sparse=st.booleans())
    def backward(self, scale, given_to, sparse):
        for i, pair in enumerate(zip(*map(parameters, self.optimizers), strict=True)):
            if not pair[0].requires_grad or not given_to >> (i % 4) & 1:
                continue
            g = torch.randn(pair[0].shape, generator=self.generator) * (scale if pair[0].dtype != torch.float16 else 1)
            if sparse:
                g[torch.rand(g.shape, generator=self.generator) < 0.9] = 0
            for p in pair:
                p.grad = g.to(p.dtype) if p.grad is None else p.grad.copy_(g)

    @rule()
    def step(self):
        for optimizer, moving in zip(self.optimizers, self.moving, strict=True):
            for p in parameters(optimizer):
                if p.grad is not None:
                    there = p.grad.float().abs() > 1e-13
                    moving[p] = there | moving[p] if p in moving else there
            optimizer.step()

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    @rule(lr=st.sampled_from([0.0, 1e-3, 0.5]), group=st.integers(0, 2))
    def change_lr(self, lr, group):
        for optimizer in self.optimizers:
            optimizer.param_groups[group % len(optimizer.param_groups)]["lr"] = lr

    @rule(which=st.integers(0, 11), trained=st.booleans())
    def freeze(self, which, trained):
        for optimizer in self.optimizers:
            params = parameters(optimizer)
            p = params[which % len(params)]
            p.requires_grad_(trained)
            if not trained:
                p.grad = None

    @rule(how=st.sampled_from(["file", "deepcopy", "load into itself"]))
    def save_and_go_on(self, how):
        for i, optimizer in enumerate(self.optimizers):
            if how == "load into itself":
                optimizer.load_state_dict(through_file(optimizer.state_dict()))
                continue
            other = copy.deepcopy(optimizer)
            if how == "file":
                other.load_state_dict(through_file(optimizer.state_dict()))
            assert_same_optimizers(optimizer, other, how)
            moving = self.moving[i]
            pairs = list(zip(parameters(optimizer), parameters(other), strict=True))
            self.moving[i] = {q: moving[p] for p, q in pairs if p in moving}
            for p, q in pairs:
                q.grad = None if p.grad is None else p.grad.clone()
            self.optimizers[i] = other

    @rule(fault=st.sampled_from(["lr", "codec", "state", "grad", "groups", "step"]))
    def a_call_that_fails_changes_nothing(self, fault):
        for optimizer in self.optimizers:
            before = copy.deepcopy(optimizer.state_dict())
            values = [p.detach().clone() for p in parameters(optimizer)]
            group = optimizer.param_groups[0]
            with_grad = [p for p in parameters(optimizer) if p.grad is not None]
            stepped = [key for key, own in before["state"].items() if own]
            if fault in ("lr", "codec") and with_grad:
                kept = group[fault]
                group[fault] = float("nan") if fault == "lr" else "int4"
                with pytest.raises(ValueError, match=fault):
                    optimizer.step()
                group[fault] = kept
            elif fault == "grad" and with_grad:
                kept = with_grad[-1].grad
                with_grad[-1].grad = None
                with_grad[-1].grad = kept.to_sparse() if kept.dim() else kept
                if kept.dim():
                    with pytest.raises(TypeError, match="sparse"):
                        optimizer.step()
                with_grad[-1].grad = kept
            elif fault == "state" and stepped:
                broken = copy.deepcopy(before)
                own = broken["state"][stepped[-1]]
                own["exp_avg"] = own["exp_avg"].to(torch.float64)[..., None]
                with pytest.raises(ValueError, match="exp_avg"):
                    optimizer.load_state_dict(broken)
            elif fault == "groups":
                with pytest.raises(ValueError, match=r"has \d+ param groups, the optimizer \d+"):
                    optimizer.load_state_dict({"state": {}, "param_groups": before["param_groups"][:-1]})
            elif fault == "step" and stepped:
                broken = copy.deepcopy(before)
                broken["state"][stepped[-1]]["step"] = torch.tensor(0.5)
                with pytest.raises(ValueError, match="step"):
                    optimizer.load_state_dict(broken)
            after = optimizer.state_dict()
            assert before["param_groups"] == after["param_groups"] and before["state"].keys() == after["state"].keys()
            for key, own in before["state"].items():
                assert all(torch.equal(tensor, after["state"][key][name]) for name, tensor in own.items())
            assert all(torch.equal(x, p) for x, p in zip(values, parameters(optimizer), strict=True))

    @invariant()
    def backends_agree(self):
        assert_same_optimizers(*self.optimizers, "backends")

    @invariant()
    def nothing_is_nan(self):
        for p in parameters(self.optimizers[0]):
            assert not p.isnan().any()
            for tensor in self.optimizers[0].state[p].values() if p in self.optimizers[0].state else ():
                assert not tensor.is_floating_point() or bool(tensor.isfinite().all())

    @invariant()
    def what_has_moved_keeps_a_second_moment(self):
        """Or its next update would be divided by eps alone."""
        for optimizer, moving in zip(self.optimizers, self.moving, strict=True):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p in moving and p.numel() and group["betas"][1] > 0:
                        v = second_moment(optimizer.state[p], group)
                        assert bool((v.view(p.shape)[moving[p]] > 0).all())
                    if p in moving and group["betas"][1] == 0:
                        moving[p] = torch.zeros_like(moving[p])  # forgotten with each step

    @invariant()
    def the_state_is_as_large_as_estimated(self):
        for optimizer in self.optimizers[:1]:
            groups = [
                group | {"params": [p for p in group["params"] if optimizer.state.get(p)]}
                for group in optimizer.param_groups
            ]
            groups = [{k: v for k, v in group.items() if k != "param_names"} for group in groups if group["params"]]
            trained = [p for group in groups for p in group["params"]]
            frozen = [p for p in trained if not p.requires_grad]
            for p in frozen:
                p.requires_grad_(True)
            if groups:
                assert fused8.memory_report(optimizer).state == fused8.estimate_memory(groups).state
            for p in frozen:
                p.requires_grad_(False)


def second_moment(state, group):
    codes = state["exp_avg_sq"]
    if codes.dtype == torch.float32:
        return codes
    rows, inner = rows_and_inner(codes.shape)
    blocks = [_to_blocks(state[name].reshape(rows, inner), group["block_size"]) for name in ("exp_avg", "exp_avg_sq")]
    scales = [state[name].reshape(-1, 1) for name in ("exp_avg_scale", "exp_avg_sq_scale")]
    v = CODECS[group["codec"]].decode(Encoded(*blocks, *scales))[1]
    return v.view(rows, -1)[:, :inner].reshape(codes.shape)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
