"""The examples that need packages of others run offline, learn, and go on after an interruption with the same bits."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
# A few seconds each: 10 batches of 32 an epoch. One thread, so that matrix products are cut in the same way each time.
SMALL = ["--offline", "--train-size", "320", "--epochs", "2"]


@pytest.fixture
def examples(monkeypatch, tmp_path):
    """The directory of the examples importable, as when one of them runs; a working directory; one thread."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def run_python(code: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def results(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a run leaves: parameters and state."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach()
        found |= {f"{name}/{key}": value for key, value in optimizer.state[p].items()}
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and len(a) > 100
    different = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not different


def test_texts_are_of_two_kinds_and_always_the_same(examples):
    from classification import LENGTH, encode, stdlib_texts

    texts, labels = stdlib_texts(200)
    assert len(texts) == len(labels) == 200 and sum(labels) == 100
    assert (texts, labels) == stdlib_texts(200)
    example = encode("aé", 1)
    assert example["input_ids"][:4] == [98, 196, 170, 0] and sum(example["attention_mask"]) == 3
    assert len(example["input_ids"]) == LENGTH


def test_accuracy_and_f1(examples):
    from classification import accuracy_and_f1

    result = accuracy_and_f1(torch.tensor([1, 1, 0, 0, 1]), torch.tensor([1, 0, 0, 1, 1]))
    assert result == {"accuracy": 3 / 5, "f1": pytest.approx(2 / 3)}  # 2 hits, 3 claimed, 3 real
    assert accuracy_and_f1(torch.zeros(3), torch.zeros(3)) == {"accuracy": 1.0, "f1": 0.0}


@pytest.mark.parametrize("how", ["object", "class"])
def test_trainer_learns(examples, how):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import trainer as example

    arguments = ["--offline", "--train-size", "1600", "--epochs", "2", "--save-every", "1000"]
    trainer = example.main([*arguments, "--optimizer", how])
    assert [type(trainer.optimizer.optimizer).__name__, trainer.optimizer.param_groups[0]["eps"]] == ["AdamW8bit", 1e-8]
    epochs = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    assert len(epochs) == 2 and epochs[-1]["eval_accuracy"] > 0.85 and epochs[-1]["eval_f1"] > 0.85
    decays = {group["weight_decay"] for group in trainer.optimizer.param_groups}
    assert decays == {0.01, 0.0}


def test_killed_and_resumed_trainer_equals_the_uninterrupted(examples):
    """20 steps. One run saves at step 4, 8 and 12, and is killed in step 14, in the middle of the second epoch."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    killed = run_python(f"""
        import os, signal
        import torch, trainer
        from transformers import TrainerCallback

        class Kill(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 14:
                    os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        trainer.main({[*SMALL, "--save-every", "4", "--out", str(examples / "killed")]}, [Kill()])
        """)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (examples / "killed" / "checkpoint-12").exists() and not (examples / "killed" / "checkpoint-16").exists()

    import trainer as example

    runs = {}
    for name, more in (("killed", ["--resume"]), ("whole", [])):
        done = example.main([*SMALL, "--save-every", "4", "--out", str(examples / name), *more])
        assert done.state.global_step == 20
        runs[name] = results(done.model, done.optimizer)
        losses = [entry["eval_loss"] for entry in done.state.log_history if "eval_loss" in entry]
        runs[name]["eval_losses"] = torch.tensor(losses)
    assert_same(runs["killed"], runs["whole"])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_loop_resumes(examples, capsys, precision):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import accelerate_loop as example
    from accelerate.state import AcceleratorState

    def run(*arguments: str) -> dict[str, torch.Tensor]:
        AcceleratorState._reset_state(reset_partial_state=True)  # in use, each run is a process
        return results(*example.main([*SMALL, "--precision", precision, *arguments]))

    whole = run("--out", "whole")
    assert "'accuracy':" in capsys.readouterr().out
    run("--out", "parts", "--stop-after", "1")
    assert_same(run("--out", "parts", "--resume"), whole)
    assert {t.dtype for name, t in whole.items() if "/" not in name} == {torch.float32}


def test_lightning_module_resumes(examples):
    pytest.importorskip("transformers")
    lightning = pytest.importorskip("lightning")
    import lightning_module as example

    class PowerCut(Exception):
        pass

    class Interrupt(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 14:
                raise PowerCut

    def final(trainer) -> dict[str, torch.Tensor]:
        assert trainer.global_step == 20 and "accuracy" in trainer.callback_metrics
        return results(trainer.lightning_module, trainer.optimizers[0])

    whole = final(example.main([*SMALL, "--out", "whole"]))
    with pytest.raises(PowerCut):
        example.main([*SMALL, "--out", "parts"], [Interrupt()])
    assert_same(final(example.main([*SMALL, "--out", "parts", "--resume"])), whole)


# -- what else people do in such loops --------------------------------------------------------------------------------


def tiny_run(*, checkpointing: bool, accumulate: int, scheduler: str = "linear") -> dict[str, torch.Tensor]:
    """Four steps on 8 texts each, in `accumulate` pieces."""
    from classification import collate, encode, stdlib_texts, tiny_model
    from transformers import get_scheduler

    import fused8

    torch.manual_seed(0)
    model = tiny_model()
    model.config.dropout = model.config.attention_dropout = 0.0
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = fused8.AdamW8bit(fused8.param_groups(model), lr=1e-3)
    schedule = get_scheduler(scheduler, optimizer, num_warmup_steps=1, num_training_steps=4)
    examples = [encode(text, label) for text, label in zip(*stdlib_texts(32), strict=True)]
    for step in range(4):
        batch = examples[8 * step : 8 * step + 8]
        for piece in range(accumulate):
            part = batch[piece * 8 // accumulate : (piece + 1) * 8 // accumulate]
            (model(**collate(part)).loss / accumulate).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return results(model, optimizer) | {"lr": torch.tensor(schedule.get_last_lr())}


def test_gradient_checkpointing_changes_nothing(examples):
    pytest.importorskip("transformers")
    assert_same(tiny_run(checkpointing=True, accumulate=1), tiny_run(checkpointing=False, accumulate=1))


def test_gradient_accumulation_sums(examples):
    """Gradients that are summed in another order differ in their last bits. Where one is nearly 0, Adam's first steps
    have the size of the learning rate in either direction, so at most 2 lr apart each: 8e-3 after 4 steps of 1e-3."""
    pytest.importorskip("transformers")
    whole, parts = (tiny_run(checkpointing=False, accumulate=n) for n in (1, 4))
    weights = [name for name in whole if "/" not in name]
    apart = torch.cat([(whole[name] - parts[name]).abs().flatten() for name in weights])
    assert apart.max() <= 8e-3 and apart.median() < 1e-5


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"])
def test_schedulers_of_transformers(examples, name):
    pytest.importorskip("transformers")
    from transformers import get_scheduler

    import fused8

    rates = []
    for cls in (fused8.AdamW8bit, torch.optim.AdamW):
        p = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = cls([p], lr=1e-3)
        schedule = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=6)
        rates.append([])
        for _ in range(6):
            p.grad = torch.ones_like(p)
            optimizer.step()
            schedule.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


def test_lora_has_state_for_its_adapters_only(examples):
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from classification import collate, encode, tiny_model

    import fused8

    config = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["q_lin", "v_lin", "lin1"])
    model = peft.get_peft_model(tiny_model(), config)
    groups = fused8.param_groups(model, weight_decay=0.1)
    names = [name for group in groups for name in group["param_names"]]
    assert names and all("lora_" in name or "modules_to_save" in name for name in names)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = fused8.AdamW8bit(groups, lr=1e-2, min_8bit_size=0)
    batch = collate([encode("def f(x): return x", 0), encode("The value of x.", 1)])
    losses = []
    for _ in range(20):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    estimate = fused8.estimate_memory(model, min_8bit_size=0)
    assert estimate.state == fused8.memory_report(optimizer).state
    assert estimate.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
