"""Threads, forked processes and interruptions: the bits of stepping alone, no hang, and a state that can go on."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fused8
from fused8 import backends

from .support import CODECS, assert_same_optimizers, hostile_gradient, make_parameters, parameters

ROOT = Path(__file__).parent.parent
# Two tensors that C++ shares out to two threads (at least 2^15 elements each), rows with tails, and FP32 state.
SHAPES = ((128, 600), (7, 300), (50,))
HANG = 60  # seconds, for what takes a few


def new_optimizer(codec="adaptive", dtype=torch.float32, shapes=SHAPES, **options):
    return fused8.AdamW8bit(make_parameters(shapes, dtype), codec=codec, min_8bit_size=1000, **options)


def advance(optimizer, first, last):
    for step in range(first, last + 1):
        for p in parameters(optimizer):
            p.grad = hostile_gradient(tuple(p.shape), step % 7 + 1, p.dtype)
        optimizer.step()
    return optimizer


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend, steps", [("cpp", 60), ("reference", 8)])
def test_optimizers_in_two_threads_give_the_bits_of_one_after_the_other(backend, steps):
    kinds = [dict(codec="adaptive"), dict(codec="dynamic", dtype=torch.bfloat16, param_rounding="stochastic")]
    # Four, two of each kind: the codecs' tables and the choice of the backend are shared.
    alone = [advance(new_optimizer(backend=backend, **kind), 1, steps) for kind in kinds]
    together = [new_optimizer(backend=backend, **kinds[i % 2]) for i in range(4)]
    barrier, errors = threading.Barrier(len(together)), []

    def work(optimizer):
        try:
            barrier.wait(HANG)
            advance(optimizer, 1, steps)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(optimizer,), daemon=True) for optimizer in together]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + HANG
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads) and not errors
    for i, optimizer in enumerate(together):
        assert_same_optimizers(optimizer, alone[i % 2], f"thread {i}")
        assert optimizer.nonfinite_count() == alone[i % 2].nonfinite_count() > 0


def test_a_step_in_one_thread_while_another_saves_and_loads():
    """Of two optimizers that share nothing but the process."""
    alone, steps = advance(new_optimizer(), 1, 40), 40
    stepping, loading = new_optimizer(), advance(new_optimizer(), 1, 1)
    stop = threading.Event()

    def save_and_load():
        while not stop.is_set():
            loading.load_state_dict(loading.state_dict())

    thread = threading.Thread(target=save_and_load, daemon=True)
    thread.start()
    try:
        advance(stepping, 1, steps)
    finally:
        stop.set()
        thread.join(HANG)
    assert not thread.is_alive()
    assert_same_optimizers(stepping, alone, "beside a thread that loads")


# -- fork -------------------------------------------------------------------------------------------------------------

# A forked process has no OpenMP threads, and GNU's OpenMP waits for them for ever if the parent has used them. So do
# torch's own operations; its DataLoader therefore sets the threads of a worker to one, and so do the children here.


class Batches(torch.utils.data.Dataset):
    """Each item is the result of steps that the worker makes."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        import fused8 as in_worker

        params = make_parameters(SHAPES)
        optimizer = in_worker.AdamW8bit(params, min_8bit_size=1000)
        advance(optimizer, 1, 3)
        return torch.cat([p.detach().flatten() for p in params])


def collate(items):
    from fused8 import codecs

    assert "adaptive" in codecs.CODECS
    return torch.stack(items)


def in_process(program, *args, timeout=HANG):
    """Run a function of this file in a fresh process that may use two threads; a hang fails."""
    code = f"import torch; torch.set_num_threads(2); from tests import test_threads as t; t.{program}(*{args!r})"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its children
        output, _ = process.communicate()
        pytest.fail(f"{program}{args} hangs: {output}")
    assert process.returncode == 0, output
    return output


def load_data_in_forked_workers(step_first):
    if step_first:
        advance(new_optimizer(), 1, 3)
    (expected,) = {tuple(batch.flatten().tolist()) for batch in [Batches()[0]]}
    loader = torch.utils.data.DataLoader(
        Batches(), batch_size=3, num_workers=2, collate_fn=collate, multiprocessing_context="fork"
    )
    between = new_optimizer()
    batches = []
    for i, batch in enumerate(loader):  # the parent steps while the workers do
        advance(between, i + 1, i + 1)
        batches.append(batch)
    assert torch.cat(batches).shape[0] == 6
    assert all(torch.equal(row, torch.tensor(expected)) for row in torch.cat(batches))
    assert_same_optimizers(between, advance(new_optimizer(), 1, 2), "beside forked workers")


@pytest.mark.parametrize("step_first", [False, True], ids=["after import", "after a step"])
def test_forked_workers_of_a_data_loader_step_and_do_not_hang(step_first):
    in_process("load_data_in_forked_workers", step_first)


def step_in_a_forked_child():
    optimizer = advance(new_optimizer(), 1, 3)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def child():
        torch.set_num_threads(1)
        advance(optimizer, 4, 6)  # a copy of the parent's, with its plan
        results.put([p.detach().flatten()[:99].tolist() for p in parameters(optimizer)])

    process = context.Process(target=child)
    process.start()
    process.join(HANG / 2)
    assert process.exitcode == 0, f"the child's exit code is {process.exitcode}"
    advance(optimizer, 4, 6)
    assert results.get() == [p.detach().flatten()[:99].tolist() for p in parameters(optimizer)]
    assert_same_optimizers(optimizer, advance(new_optimizer(), 1, 6), "beside a child")


def test_a_forked_child_goes_on_with_the_optimizer_of_its_parent():
    in_process("step_in_a_forked_child")


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
@pytest.mark.parametrize("codec", CODECS)
def test_an_exception_in_a_closure_leaves_all_as_it_was(codec, error):
    """Also in the very first step, where there is no state yet, and with gradients set before it is raised."""
    optimizer, twin = new_optimizer(codec), new_optimizer(codec)

    def closure():
        for p in parameters(optimizer):
            p.grad = torch.ones_like(p)
        raise error

    for step in (1, 2, 3):
        with pytest.raises(error):
            optimizer.step(closure)
        assert len(optimizer.state) == len(twin.state)
        assert_same_optimizers(optimizer, twin, f"interrupted step {step}")
        advance(optimizer, step, step)
        advance(twin, step, step)
        assert_same_optimizers(optimizer, twin, f"the step after, {step}")


def test_an_interruption_during_a_launch_leaves_counts_that_agree_with_the_state(monkeypatch):
    """Python delivers a signal that comes while C++ works as soon as it returns."""
    optimizer, twin = new_optimizer(), advance(new_optimizer(), 1, 3)
    advance(optimizer, 1, 2)
    launch = backends.BACKENDS["cpp"].adam_step

    def interrupted(*args, **options):
        launch(*args, **options)
        raise KeyboardInterrupt

    for p in parameters(optimizer):
        p.grad = hostile_gradient(tuple(p.shape), 3 % 7 + 1)
    backend = backends.BACKENDS["cpp"]._replace(adam_step=interrupted)
    monkeypatch.setattr(backends, "select", lambda *_: backend)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    before = advance(new_optimizer(), 1, 2)
    for p, old, new in zip(*map(parameters, (optimizer, before, twin)), strict=True):
        stepped = not torch.equal(p, old)
        assert torch.equal(p, new if stepped else old)
        assert float(optimizer.state[p]["step"]) == (3 if stepped else 2)


def step_until_interrupted(seconds):
    """Steps with a gradient that is always the same, until a signal comes; then checks what is left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    torch.manual_seed(0)
    optimizer = new_optimizer(shapes=((256, 600), (7, 300), (50,)))
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape)
    optimizer.step()
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            optimizer.step()
    except KeyboardInterrupt:
        pass
    counts = [int(optimizer.state[p]["step"]) for p in parameters(optimizer)]
    assert max(counts) > 1 and max(counts) - min(counts) <= 1
    # Each parameter is what it was after as many whole steps as it counts; those of one launch count alike.
    torch.manual_seed(0)
    twin = new_optimizer(shapes=((256, 600), (7, 300), (50,)))
    for p in parameters(twin):
        p.grad = torch.randn(p.shape)
    after = {}
    for step in range(1, max(counts) + 1):
        twin.step()
        after = {step - 1: after.get(step - 1), step: [p.detach().clone() for p in parameters(twin)]}
    for i, (p, count) in enumerate(zip(parameters(optimizer), counts, strict=True)):
        assert torch.equal(p, after[count][i]), f"parameter {i} counts {count} steps and is not there"
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters(optimizer))
    assert [int(optimizer.state[p]["step"]) for p in parameters(optimizer)] == [count + 1 for count in counts]
    other = new_optimizer(shapes=((256, 600), (7, 300), (50,)))
    other.load_state_dict(optimizer.state_dict())
    print("interrupted after", counts)


@pytest.mark.parametrize("seconds", [0.2, 0.31])
def test_a_signal_during_many_steps_leaves_whole_steps(seconds):
    assert "interrupted after" in in_process("step_until_interrupted", seconds)
