"""What users of 8-bit optimizers have run into elsewhere, by the behaviour that they need. One entry for each.

Most of it is tested in more depth where it belongs; here it stands together, to be read as a list.
"""

import hashlib
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fused8 import Adam8bit, AdamW8bit
from fused8.codecs import CODECS, Encoded

from .support import assert_same_optimizers, make_parameters, parameters, set_gradients, through_file

PROBLEMS = {}


def problem(behaviour):
    def register(test):
        PROBLEMS[behaviour] = test
        return test

    return register


def stepped(steps=1, shapes=((64, 256), (300,)), dtype=torch.float32, **options):
    optimizer = AdamW8bit(make_parameters(shapes, dtype), **options)
    for step in range(1, steps + 1):
        set_gradients(parameters(optimizer), step)
        optimizer.step()
    return optimizer


def like(optimizer, **options):
    """A fresh optimizer of equal parameters."""
    params = [nn.Parameter(p.detach().clone()) for p in parameters(optimizer)]
    return AdamW8bit(params, **options)


# -- the update -------------------------------------------------------------------------------------------------------


@problem("weight decay is applied in torch's order: one step with weight_decay 0.5 and lr 0.1 gives AdamW's parameters")
def _(tmp_path):
    """Within rounding: the parameter and the update, of size lr, are rounded a few times each; the state, after one
    step from zero, is rounded only after its use."""
    ours, theirs = make_parameters([(64, 256)]), make_parameters([(64, 256)])
    for optimizer in (
        AdamW8bit(ours, lr=0.1, weight_decay=0.5),
        torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.5),
    ):
        (p,) = parameters(optimizer)
        p.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        optimizer.step()
    eps = torch.finfo(torch.float32).eps
    assert (ours[0] - theirs[0]).abs().max() <= 4 * eps * theirs[0].abs().max() + 8 * eps * 0.1


@problem("an element whose gradient is always zero never drifts, beside others that move: 100 steps with lr 1e-2")
def _(tmp_path):
    for codec in CODECS:
        (p,) = make_parameters([(64, 256)])
        before = p.detach().clone()
        optimizer = Adam8bit([p], lr=1e-2, codec=codec)
        still = torch.zeros(64, 256, dtype=torch.bool)
        still[:, ::3] = True
        for step in range(100):
            p.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).masked_fill(still, 0.0)
            optimizer.step()
        assert torch.equal(p.detach()[still], before[still]) and not torch.equal(p.detach(), before)


@problem("a Parameter that views another tensor (base.t()) updates the base")
def _(tmp_path):
    base = torch.randn(256, 64)
    before = base.clone()
    p = nn.Parameter(base.t())
    p.grad = torch.ones(64, 256)
    AdamW8bit([p]).step()
    assert p.data_ptr() == base.data_ptr() and torch.equal(p.detach(), base.t()) and not torch.equal(base, before)


@problem("channels_last stays channels_last and gives the bits of contiguous memory")
def _(tmp_path):
    plain, last = (nn.Parameter(torch.randn(32, 16, 3, 3, generator=torch.Generator().manual_seed(0))) for _ in "ab")
    last.data = last.data.to(memory_format=torch.channels_last)
    for p in (plain, last):
        optimizer = AdamW8bit([p])
        for step in range(3):
            g = torch.randn(32, 16, 3, 3, generator=torch.Generator().manual_seed(step))
            p.grad = g.to(memory_format=torch.channels_last) if p is last else g
            optimizer.step()
    assert last.is_contiguous(memory_format=torch.channels_last) and torch.equal(plain, last)


@problem("fp16 parameters step under GradScaler; only unscale_ gives its usual error")
def _(tmp_path):
    (p,) = make_parameters([(64, 256)], torch.float16)
    before = p.detach().clone()
    optimizer = AdamW8bit([p], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((p.float() ** 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[p]["step"] == 1 and not torch.equal(p.detach(), before)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@problem("a learning rate that is a tensor, moved by a scheduler, makes no new plan and no new launch")
def _(tmp_path):
    optimizer = AdamW8bit(make_parameters([(64, 256)]), lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    plans = set()
    for step in range(1, 6):
        set_gradients(parameters(optimizer), 1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
        plans.add(id(optimizer._planner._plans[None][1]))
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2 * 0.9**step)
    assert len(plans) == 1


@problem("all 256 codes of each codec keep their value")
def _(tmp_path):
    """The FP32 bits that the codes stand for, as SHA-256; test_codecs.py derives the values."""
    codes = torch.arange(256).view(1, 256)
    found = {}
    for name, codec in CODECS.items():
        dtypes, scales = codec.code_dtypes, codec.scale_dtypes
        m = codes.to(torch.uint8).view(dtypes[0]) if dtypes[0] == torch.int8 else codes.to(dtypes[0])
        sq_scale = torch.full((1, 1), (5 << 3 | 3) if scales[1] == torch.int32 else 0.75, dtype=scales[1])
        decoded = codec.decode(Encoded(m, codes.to(dtypes[1]), torch.full((1, 1), 0.5), sq_scale))
        digest = hashlib.sha256()
        for x in decoded:
            digest.update(torch.where(x == 0, 0.0, x).contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()[:16]
    assert found == PINNED


PINNED = {"adaptive": "77b499223fe27651", "dynamic": "3a862a65e33222ab", "e4m3": "12f99ac3bbf7694f"}


# -- options ----------------------------------------------------------------------------------------------------------


@problem("an override of one parameter's bits never leaks into another optimizer of the same parameters")
def _(tmp_path):
    params = make_parameters([(64, 256), (64, 256)])
    first = AdamW8bit([{"params": params[:1], "state_bits": 32}, {"params": params[1:]}])
    second = AdamW8bit(params)
    for optimizer in (first, second):
        set_gradients(params, 1)
        optimizer.step()
    assert [first.state[p]["exp_avg"].element_size() for p in params] == [4, 1]
    assert [second.state[p]["exp_avg"].element_size() for p in params] == [1, 1]


# -- files ------------------------------------------------------------------------------------------------------------


@problem("a saved state whose groups lack a newer option loads, and takes the default")
def _(tmp_path):
    saved = through_file(stepped().state_dict())
    for group in saved["param_groups"]:
        for name in ("rounding_seed", "param_rounding", "max_grad_norm", "offload", "master_bits", "capturable"):
            del group[name]
    optimizer = stepped()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["rounding_seed"] == 0 and optimizer.param_groups[0]["offload"] is None
    set_gradients(parameters(optimizer), 2)
    optimizer.step()


@problem("a state of torch.optim.AdamW loads")
def _(tmp_path):
    params = make_parameters([(64, 256), (300,)])
    theirs = torch.optim.AdamW(params, lr=1e-2)
    set_gradients(params, 1)
    for p in params:
        p.grad = p.grad.nan_to_num(0.0, 0.0, 0.0).clamp(-1e9, 1e9)
    theirs.step()
    ours = AdamW8bit(params, lr=1e-2)
    with pytest.warns(UserWarning, match="torch"):
        ours.load_state_dict(through_file(theirs.state_dict()))
    assert all(ours.state[p]["step"] == 1 for p in params)
    set_gradients(params, 2)
    ours.step()


@problem("an int `step` from older files loads")
def _(tmp_path):
    a = stepped(3)
    saved = through_file(a.state_dict())
    for own in saved["state"].values():
        own["step"] = int(own["step"])
    b = like(a)
    b.load_state_dict(saved)
    assert_same_optimizers(a, b, "int step")


@problem("a state of the wrong shape is refused when it is loaded, not steps later")
def _(tmp_path):
    saved = through_file(stepped().state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"][:32]
    optimizer = stepped()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*exp_avg.*(32, 256).*Nothing was loaded"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert all(torch.equal(t, after["state"][i][n]) for i, own in before["state"].items() for n, t in own.items())


@problem("a state goes through safetensors and back")
def _(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    a = stepped(3)
    flat = {f"{i}.{name}": t for i, own in a.state_dict()["state"].items() for name, t in own.items()}
    files.save_file(flat, tmp_path / "state.safetensors")
    saved = {"param_groups": a.state_dict()["param_groups"], "state": {}}
    for key, tensor in files.load_file(tmp_path / "state.safetensors").items():
        number, name = key.split(".")
        saved["state"].setdefault(int(number), {})[name] = tensor
    b = like(a)
    b.load_state_dict(saved)
    assert_same_optimizers(a, b, "safetensors")


@problem("an unpickled optimizer steps")
def _(tmp_path):
    a = stepped(2)
    b = pickle.loads(pickle.dumps(a))
    for optimizer in (a, b):
        set_gradients(parameters(optimizer), 3)
        optimizer.step()
    assert_same_optimizers(a, b, "unpickled")


@problem("what is saved loads with weights_only=True and holds no class of ours")
def _(tmp_path):
    buffer = io.BytesIO()
    torch.save(stepped().state_dict(), buffer)
    assert b"fused8" not in buffer.getvalue().replace(b"fused8/", b"")
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


# -- devices and wrappers ---------------------------------------------------------------------------------------------


@problem("a state does not silently stay behind when the model moves to another device")
def _(tmp_path):
    model = nn.Linear(256, 64)
    optimizer = AdamW8bit(model.parameters())
    set_gradients(model.parameters(), 1)
    optimizer.step()
    model.to("meta")  # a device that is always there; module.to swaps the data of the same Parameter
    moved = [p for p in model.parameters() if p in optimizer.state]
    if not moved:  # swapped for other Parameters: the optimizer never sees them
        return
    for p in moved:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="is on cpu and should be on meta: move the model before the first step"):
        optimizer.step()


@problem("saving under each wrapper works at the first save, and what could not be saved is refused before training")
def _(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for wrap in (lambda m: m, DistributedDataParallel, lambda m: fully_shard(m, mesh=mesh), torch.compile):
            torch.manual_seed(0)
            model = wrap(nn.Linear(256, 64))
            optimizer = AdamW8bit(model.parameters())
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
            saved = get_optimizer_state_dict(model, optimizer)
            set_optimizer_state_dict(model, optimizer, saved)
            through_file(optimizer.state_dict())
        model = nn.Linear(256, 64)
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW8bit, lr=1e-3)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        zero.consolidate_state_dict()
        through_file(zero.state_dict())
        flat = FullyShardedDataParallel(nn.Linear(256, 64), device_id=torch.device("cpu"))
        with pytest.raises(TypeError, match="fully_shard"):
            AdamW8bit(flat.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("behaviour", PROBLEMS)
def test_known_problem(behaviour, tmp_path):
    PROBLEMS[behaviour](tmp_path)
