"""Every part of `make bench`, with tiny sizes and without the other libraries. No time is judged."""

import dataclasses
import gc
import json
import shutil
import sys

import pytest
import torch

import fused8
from bench import contenders, cpu_speed, flash_rule, parity, plots, report, results, rounds, run, scaling, workloads
from bench.jobs import Settings, jobs

PEERS = {"bitsandbytes 8-bit", "torchao 8-bit", "optimi foreach", "optimi loop", "optimi triton"}
SETTINGS = dataclasses.replace(run.TINY, threads=1, loop_seeds=1)
SHAPES = [(8, 1024)]


@pytest.fixture
def without_peers(monkeypatch):
    for name in ("bitsandbytes", "torchao", "torchao.optim", "optimi"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_part_runs_and_is_reported(without_peers, tmp_path):
    from bench import jobs as jobs_module

    content = {
        "machine": results.machine(),
        "jobs": json.loads(json.dumps([jobs_module.run(job, SETTINGS) for job in jobs(SETTINGS)])),
    }
    assert not results.problems(content)
    for job in content["jobs"]:
        ours = [row for row in job["rows"] if row.get("name", "").startswith("fused8")]
        assert ours or job["part"] == "state_error"
        assert all(row["status"] == "measured" for row in ours), ours
        if job["part"] == "speed":
            missing = {row["name"]: row["reason"] for row in job["rows"] if row["status"] == "not available"}
            assert missing.keys() == PEERS | {"FlashOptim 8-bit"}
            assert "import of torchao" in missing["torchao 8-bit"]
    file = tmp_path / "machine.json"
    results.write(content, file)
    report.make(file)
    text = file.with_suffix(".md").read_text()
    assert "not available: ModuleNotFoundError: import of torchao" in text
    for name in plots.PLOTS:
        assert (tmp_path / f"machine-{name}.png").stat().st_size > 5000


def test_a_job_runs_in_a_process_of_its_own_and_its_failure_is_reported(monkeypatch):
    job = next(job for job in jobs(SETTINGS) if job.part == "schedule")
    assert run.run_job(job, SETTINGS)["rows"][0]["status"] == "measured"
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    failed = run.run_job(job, SETTINGS)
    assert "exit status 1" in failed["error"]
    assert results.problems({"jobs": [failed]})


def fixed(name, make, **options):
    return contenders.Contender(name, make, **options)


def wrong_rate(params, lr=1e-3):
    return torch.optim.AdamW(params, lr=1.01 * lr)


def wrong_bits(params, lr=1e-3):
    return fused8.AdamW8bit(params, lr=lr, eps=1e-7, backend="cpp")


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize(
    "contender, reason",
    (
        (fixed("wrong betas", lambda params, lr=1e-3: torch.optim.AdamW(params, lr=lr, betas=(0.8, 0.999))), "off by"),
        (fixed("no steps", lambda params, lr=1e-3: torch.optim.AdamW(params, lr=0.0)), "off by"),
        (fixed("wrong bits", wrong_bits, tolerance=1.0, options={"codec": "adaptive"}), "bits of the reference"),
    ),
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_wrong_optimizer_has_no_speed(contender, reason, dtype):
    chosen = [*contenders.pick(contenders.BASELINE), contender]
    baseline, row = cpu_speed.compare(chosen, SHAPES, dtype, 0.01)
    assert baseline["ns"] > 0
    assert row["status"] == "refused" and reason in row["reason"]
    assert "ns" not in row and "ratio" not in row
    assert not [name for name in row if "bytes" in name]


def test_a_small_error_of_a_32_bit_optimizer_is_found():
    assert parity.check(fixed("1% faster", wrong_rate), "fp32").status == "refused"


def test_no_speeds_without_the_baseline(monkeypatch):
    monkeypatch.setattr(cpu_speed, "BASELINE", "another")
    with pytest.raises(RuntimeError, match="baseline"):
        cpu_speed.compare(contenders.pick("torch foreach"), SHAPES, "fp32", 0.01)


def test_a_step_that_would_take_long_is_left_out(monkeypatch):
    monkeypatch.setattr(cpu_speed, "SLOWEST_STEP", -1.0)
    with pytest.raises(RuntimeError, match="one step would take about"):
        cpu_speed.compare(contenders.pick(contenders.BASELINE), SHAPES, "fp32", 0.01)


def test_slow_ones_take_part_in_few_rounds():
    clock = iter(range(10**6))
    fast, slow = rounds.Timed("fast", lambda: None), rounds.Timed("slow", lambda: None)
    fast.measure = lambda: 1e-3 + 1e-9 * next(clock)
    slow.measure = lambda: 10.0
    fast.warm_up, slow.warm_up = (lambda: 1e-3), (lambda: 10.0)
    third = rounds.Timed("third", lambda: None)
    third.measure, third.warm_up = (lambda: 2e-3), (lambda: 2e-3)
    rounds.interleave([fast, slow, third], "fast", 1.0)
    assert len(slow.times) == rounds.SLOW_ROUNDS
    assert len(fast.times) == len(third.times) == rounds.MIN_ROUNDS
    assert third.ratios[0] == pytest.approx(0.5, rel=1e-3)


def test_garbage_is_not_collected_while_steps_are_timed():
    seen = []
    own = rounds.Timed("own", lambda: seen.append(gc.isenabled()))
    rounds.interleave([own], "own", 0.01)
    assert seen and not any(seen) and gc.isenabled()


def test_a_fit_finds_the_line_it_was_given():
    fit = scaling.fit([(n, 1e-5 + 2e-9 * n) for n in (10**3, 10**5, 10**7)])
    assert fit["fixed"] == pytest.approx(1e-5) and fit["slope"] == pytest.approx(2e-9)
    assert scaling.fit([(n, 1e-9 * n) for n in (1, 10, 100)])["log_log_slope"] == pytest.approx(1)


def test_workloads_have_the_promised_sizes():
    assert len(workloads.gpt(64)) == 160
    assert workloads.numel(workloads.equal_tensors(10000, Settings().tensor_total)) == Settings().tensor_total
    assert workloads.numel(workloads.gpt_of(24_000_000)) <= 24_000_000
    (p,) = workloads.make_params([(2, 1024)], torch.float8_e4m3fn)
    assert p.grad.dtype == torch.bfloat16


def test_the_rule_of_flashoptim_stores_and_loads():
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(5, 40, generator=generator)
    decoded = flash_rule.decode_m(*flash_rule.encode_m(m)).view(-1)[: m.numel()].view(m.shape)
    # A step of 1/127 in 2y / (1 + |y|), whose slope is 1/2 at least; FP16 scales.
    assert ((decoded - m).abs() <= m.abs().max() * (1 / 127 + 2**-10)).all()
    v = m.square()
    decoded = flash_rule.decode_v(*flash_rule.encode_v(v)).view(-1)[: m.numel()].view(m.shape)
    assert ((decoded.sqrt() - v.sqrt()).abs() <= v.sqrt().max() * (0.5 / 255 + 2**-10)).all()
    assert not flash_rule.encode_v(torch.zeros(3))[0].any()


def test_file_names_come_from_the_machine():
    about = {"processor": "Intel(R) Xeon(R) CPU @ 2.60GHz", "isa": "avx2", "cores": 2, "torch": "2.13.0+cpu"}
    assert results.slug(about) == "intel-xeon-cpu-2.60ghz-avx2-2-cores-torch-2.13.0"
