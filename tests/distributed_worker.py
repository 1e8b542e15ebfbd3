"""What each rank does in tests/test_distributed.py: `torchrun distributed_worker.py SCENARIO[+SCENARIO...] FOLDER`.

Scenarios that save or compare do so through files in FOLDER. Any failed assertion ends the rank, and with it the test.
"""

from __future__ import annotations

import copy
import faulthandler
import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fused8
from fused8 import AdamW8bit

# Rows that divide evenly by no number of ranks, rows of whole blocks, short rows, and fewer rows than ranks.
LAYERS = ((300, 67), (67, 130), (130, 256), (256, 3))
OPTIONS = dict(min_8bit_size=0, lr=1e-2, weight_decay=0.1)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in LAYERS))


def shard(model: torch.nn.Module, mesh=None) -> torch.nn.Module:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def set_gradients(model: torch.nn.Module, step: int) -> None:
    """The same gradients at any world size, each sharded as its parameter is."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=generator)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def advance(model, optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        set_gradients(model, step)
        optimizer.step()
    optimizer.zero_grad()  # torch.distributed.checkpoint makes state for an optimizer only if there are no gradients


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def contents(model, optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and state tensor, gathered."""
    result = {}
    for name, p in model.named_parameters():
        result[name] = whole(p.detach()).clone()
        for key, tensor in optimizer.state[p].items():
            result[f"{name}.{key}"] = whole(tensor).clone()
    return result


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def single(steps: int, first: int = 1, model=None, optimizer=None):
    """The same training in one process, without DTensors."""
    model = model or make_model()
    optimizer = optimizer or AdamW8bit(model.parameters(), **OPTIONS)
    advance(model, optimizer, first, steps)
    return model, optimizer


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def same_bits(folder: Path) -> None:
    """Parameters and codes equal those of one process, whatever the number of ranks."""
    model, optimizer = sharded(5)
    expected = contents(*single(5))
    assert_equal(contents(model, optimizer), expected)
    p = next(model.parameters())
    state = optimizer.state[p]
    assert all(isinstance(state[k], DTensor) and state[k].placements == p.placements for k in state if k != "step")


def memory(folder: Path) -> None:
    """What the estimate says of the ranks is what they hold: FSDP2 with shards of different sizes and empty ones."""
    for options in (dict(min_8bit_size=0), dict(codec="dynamic", block_size=64, amsgrad=True)):
        model = make_model()
        model.append(torch.nn.PReLU(1 << 20)).append(torch.nn.Linear(9, 2))  # a long vector; not all ranks have a row
        estimate = fused8.estimate_memory(model, world_size=dist.get_world_size(), **options).per_rank
        shard(model)
        set_gradients(model, 1)
        optimizer = AdamW8bit(model.parameters(), **options)
        adamw = torch.optim.AdamW(model.parameters(), amsgrad=options.get("amsgrad", False))
        for own, expected in ((optimizer, "fused8"), (adamw, "torch AdamW, FP32 state")):
            own.step()
            report = fused8.memory_report(own)
            held: list = [None] * dist.get_world_size()
            dist.all_gather_object(held, (report.weights, report.gradients, report.state))
            weights, gradients, state = zip(*held, strict=True)
            total = [sum(sizes) for sizes in held]
            found = [(max(sizes), sum(sizes) / len(sizes)) for sizes in (weights, gradients, state, total)]
            on_ranks = estimate.optimizers[expected]
            shares = (estimate.weights, estimate.gradients, on_ranks.state, on_ranks.total)
            assert found == [(share.largest, share.mean) for share in shares], (options, expected)
            assert report.state == sum(
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
                for tensors in own.state.values()
                for tensor in tensors.values()
            )
        assert state[0] > state[-1]


def same_bits_2d(folder: Path) -> None:
    """Replicated and sharded (HSDP) on a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make_model(), mesh)
    optimizer = AdamW8bit(model.parameters(), **OPTIONS)
    advance(model, optimizer, 1, 4)
    assert_equal(contents(model, optimizer), contents(*single(4)))


# -- clipping ---------------------------------------------------------------------------------------------------------

U = 2.0**-24  # half the distance of neighbouring FP32 numbers, relative


def clipping(folder: Path, mesh=None) -> None:
    """max_grad_norm under FSDP2, with shards of different sizes, empty ones and plain parameters, is that of one
    process: the norm, clip_grad_norm_ before the step, and the bits of the step given the norm."""
    steps, lr, max_norm = 3, 1e-2, 1.0
    options = dict(lr=lr, weight_decay=0.0, min_8bit_size=0)

    def build(sharded: bool) -> torch.nn.Sequential:
        model = make_model()
        if sharded:
            shard(model, mesh)
        return model.append(torch.nn.Linear(37, 41))  # not sharded

    def integers(model, step: int) -> None:
        """Gradients whose squares sum up without rounding, in any order."""
        set_gradients(model, step)
        for p in model.parameters():
            sign = whole(p.grad).sign() + whole(p.grad).round()
            p.grad = distribute_tensor(sign, p.device_mesh, p.placements) if isinstance(p, DTensor) else sign

    def norm_of(model) -> float:
        return sum(whole(p.grad).double().square().sum().item() for p in model.parameters()) ** 0.5

    model, same_norm, clipped = build(True), build(False), build(False)
    state_32 = build(True)
    optimizer = AdamW8bit(model.parameters(), max_grad_norm=max_norm, **options)
    expected = AdamW8bit(same_norm.parameters(), **options)
    optimizer_32 = AdamW8bit(
        [{"params": list(state_32.parameters()), "state_bits": 32}], max_grad_norm=max_norm, **options
    )
    expected_32 = AdamW8bit([{"params": list(clipped.parameters()), "state_bits": 32}], **options)
    # The squares of a shard are exact. Then, in units of U and relative to the square of the norm: a root and a square
    # for each tensor (2 * 2 + 1, torch's root on CPUs is not correctly rounded), sums over 10 tensors, 4 ranks and 2
    # kinds of placement (10 + 4 + 2). The last root halves that, and adds 2.
    norm_bound = ((2 * 2 + 1 + 10 + 4 + 2) / 2 + 2) * U
    for step in range(1, steps + 1):
        for each in (model, same_norm, state_32, clipped):
            integers(each, step)
        norm = norm_of(clipped)
        optimizer.step()
        found = optimizer.last_grad_norm
        assert abs(found.item() / norm - 1) <= norm_bound, (found.item(), norm)
        norms: list = [None] * dist.get_world_size()
        dist.all_gather_object(norms, found.item())
        assert len(set(norms)) == 1
        expected.grad_scale = (found + 1e-6) / max_norm  # divides the gradients within the step, as GradScaler's
        expected.step()
        optimizer_32.step()
        torch.nn.utils.clip_grad_norm_(clipped.parameters(), max_norm)
        expected_32.step()
    assert_equal(contents(model, optimizer), contents(same_norm, expected))
    # A gradient that was clipped in two ways differs by twice the norm's error, and 4 U for what multiplies or divides.
    # Its moments differ by as much, their quotient, at most 1.01 in 3 steps, by twice that, and 10 U for the step's own
    # operations; the new parameter by its own rounding.
    error = 2 * (2 * norm_bound + 4 * U) + 10 * U
    for p, q in zip(state_32.parameters(), clipped.parameters(), strict=True):
        bound = steps * (1.01 * lr * error + U * (q.abs() + steps * lr))
        assert bool(((whole(p) - q).abs() <= bound).all())
    far = AdamW8bit(model.parameters(), max_grad_norm=1e6, **options)
    alone = AdamW8bit(same_norm.parameters(), **options)
    integers(model, 4), integers(same_norm, 4)
    far.step(), alone.step()
    assert_equal(contents(model, far), contents(same_norm, alone))


def clipping_2d(folder: Path) -> None:
    """The same under HSDP: replicas do not count twice."""
    clipping(folder, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(folder: Path) -> None:
    """Shard(1): 8 bits where shards are whole blocks, else 32; Shard(0) on one mesh dimension with it; mixed with a
    plain parameter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {"blocks": (64, 512 * dist.get_world_size()), "cut": (64, 320), "rows": (33, 256)}
    placements = {"blocks": [Shard(1)], "cut": [Shard(1)], "rows": [Shard(0)]}
    whole_params, params = {}, {}
    for name, shape in weights.items():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        whole_params[name] = torch.nn.Parameter(value)
        params[name] = torch.nn.Parameter(distribute_tensor(value, mesh, placements[name]))
    whole_params["plain"] = torch.nn.Parameter(torch.ones(64, 64))
    params["plain"] = torch.nn.Parameter(torch.ones(64, 64))
    model, reference = torch.nn.ParameterDict(params), torch.nn.ParameterDict(whole_params)
    optimizer = AdamW8bit(model.parameters(), **OPTIONS)
    expected = AdamW8bit(
        [{"params": [p]} | ({"state_bits": 32} if name == "cut" else {}) for name, p in reference.items()], **OPTIONS
    )
    advance(model, optimizer, 1, 4)
    advance(reference, expected, 1, 4)
    assert optimizer.state[model["blocks"]]["exp_avg"].dtype == torch.int8
    assert optimizer.state[model["cut"]]["exp_avg"].dtype == torch.float32
    assert_equal(contents(model, optimizer), contents(reference, expected))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def sharded(steps: int) -> tuple[torch.nn.Module, AdamW8bit]:
    """A sharded model and its optimizer after so many steps."""
    model = shard(make_model())
    optimizer = AdamW8bit(model.parameters(), **OPTIONS)
    advance(model, optimizer, 1, steps)
    return model, optimizer


def save(folder: Path) -> None:
    model, optimizer = sharded(3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "checkpoint")


def load(folder: Path) -> None:
    """What another number of ranks saved goes on as if it had never been interrupted."""
    model = shard(make_model())
    optimizer = AdamW8bit(model.parameters(), **OPTIONS)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_equal(contents(model, optimizer), contents(*single(3)))
    advance(model, optimizer, 4, 6)
    assert_equal(contents(model, optimizer), contents(*single(6)))


def full_state(folder: Path) -> None:
    """Gathered to rank 0, into one process; and a single process's checkpoint into FSDP2."""
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = sharded(3)
    gathered = get_optimizer_state_dict(model, optimizer, options=gather)
    if dist.get_rank() == 0:
        expected_model, expected = single(3)
        alone = AdamW8bit(expected_model.parameters(), **OPTIONS)
        set_optimizer_state_dict(expected_model, alone, gathered, options=StateDictOptions(full_state_dict=True))
        assert_equal(contents(expected_model, alone), contents(expected_model, expected))
    one_model, one = single(3)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    saved = get_optimizer_state_dict(one_model, one, options=StateDictOptions(full_state_dict=True))
    fresh = AdamW8bit(model.parameters(), **OPTIONS)
    set_optimizer_state_dict(model, fresh, saved if dist.get_rank() == 0 else {}, options=broadcast)
    assert_equal(contents(model, fresh), contents(model, optimizer))


def interrupted_save(folder: Path) -> None:
    """Rank 1 dies in the middle of a second save. (The test then loads the first.)"""
    model, optimizer = sharded(5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if dist.get_rank() == 1:
        import os

        os._exit(7)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "second")


# -- replicas ---------------------------------------------------------------------------------------------------------


def data_parallel(folder: Path) -> None:
    """DDP: after 50 steps on different data every rank has the same parameters and state."""
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = AdamW8bit(model.parameters(), **OPTIONS)
    for step in range(50):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in contents(model, optimizer).values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes(4))
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    assert len(set(digests)) == 1


def zero_redundancy(folder: Path) -> None:
    """ZeroRedundancyOptimizer steps, consolidates and resumes like a plain optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(model):
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW8bit, **OPTIONS)

    model = make_model()
    optimizer = make(model)
    advance(model, optimizer, 1, 3)
    optimizer.consolidate_state_dict(to=0)
    saved = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    other_model = make_model()
    other_model.load_state_dict(model.state_dict())
    other = make(other_model)
    other.load_state_dict(saved[0])
    advance(model, optimizer, 4, 6)
    advance(other_model, other, 4, 6)
    expected, _ = single(6)
    for p, q, r in zip(model.parameters(), other_model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, r), "stepped"
        assert torch.equal(q, r), "resumed"


def accelerate(folder: Path) -> None:
    """examples/accelerate_loop.py under `accelerate launch`: replicated, sharded by the FSDP2 plugin, and resumed."""
    import accelerate_loop
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    def run(processes: DistributedType, *arguments: str | Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        AcceleratorState._reset_state()  # in use, each run is a process
        PartialState._shared_state["distributed_type"] = processes
        return accelerate_loop.main(["--offline", "--train-size", "160", "--epochs", "2", *map(str, arguments)])

    PartialState(cpu=True)
    replicated = contents(*run(DistributedType.MULTI_CPU, "--out", folder / "replicated"))
    # The plugin serves accelerators only, though it uses nothing of them: these processes pose as such.
    gpus = DistributedType.MULTI_GPU
    model, optimizer = run(gpus, "--out", folder / "sharded")
    assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in model.parameters())
    sharded = contents(model, optimizer)
    # Gradients are summed in another order; where one is nearly 0, Adam's step has the size of the learning rate in
    # either direction, here 1e-3 in 6 steps.
    apart = torch.cat([(sharded[name] - replicated[name]).abs().flatten() for name, _ in model.named_parameters()])
    assert apart.max() <= 2 * 1e-3 * 6 and apart.median() < 1e-5, (apart.max(), apart.median())
    run(gpus, "--out", folder / "resumed", "--stop-after", "1")
    assert_equal(contents(*run(gpus, "--out", folder / "resumed", "--resume")), sharded)


def fsdp1(folder: Path) -> None:
    """Flat parameters are refused before training starts, with the way out."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        try:
            AdamW8bit(model.parameters(), **OPTIONS)
        except TypeError as error:
            assert "fully_shard" in str(error), error
        else:
            raise AssertionError("FSDP1 was not refused")


def offending_placements(folder: Path) -> None:
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    try:
        AdamW8bit([partial])
    except TypeError as error:
        assert "Partial" in str(error)
    else:
        raise AssertionError("Partial was not refused")
    replicated = torch.nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Replicate()]))
    optimizer = AdamW8bit([replicated])
    replicated.grad = DTensor.from_local(torch.ones(64, 64), mesh, [Partial()])
    optimizer.step()
    assert bool((whole(replicated) < 1).all())
    copy.deepcopy(optimizer.state_dict())


def main() -> None:
    faulthandler.dump_traceback_later(50, exit=True)  # a hung rank says where before the test gives up on it
    torch.set_num_threads(1)
    scenarios, folder = sys.argv[1:3]
    dist.init_process_group("gloo")
    for scenario in scenarios.split("+"):
        globals()[scenario](Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
