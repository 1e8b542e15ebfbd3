"""Damage files and state dicts for so many seconds, or so many times: `python -m tests.fuzz 600`.

Each fault is printed once for the place where it arose, and its input is kept in a folder. The exit code says whether
there was any. With `--engine atheris` (`pip install fused8[fuzz]`) libFuzzer chooses the bytes by the coverage that
they give, and stops at the first fault.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from . import corpus, mutate, targets

HANG = 20  # seconds for an input of at most some 100 KB, which takes milliseconds
# Converting takes below 100 MB of temporaries, whatever the size (convert.CHUNK_ELEMENTS); as much again for the
# allocator's leftovers.
MEMORY = 256 << 20
ADDRESS_SPACE = 8 << 30  # a larger allocation fails at once, rather than taking the machine down


def memory() -> dict[str, int]:
    """Bytes of the process: now, and at most so far."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


class Run:
    """Inputs by number; the same number is the same input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = corpus.files()
        self.state_dicts = [*corpus.state_dicts().values()]
        self.work = Path(tempfile.mkdtemp(dir=folder, prefix="work-"))
        (self.work / "model.safetensors").write_bytes(self.files["model.safetensors"])
        self.accepted = 0
        self.faults: dict[str, str] = {}

    def input(self, number: int) -> tuple[str, Any]:
        rng = random.Random(number)
        torch.manual_seed(number)
        if number % 3 == 2:
            return "state_dict", mutate.state_dict(rng.choice(self.state_dicts), self.state_dicts, rng)
        name = rng.choice(sorted(self.files))
        return name, mutate.file(name, self.files, rng)

    def one(self, number: int) -> None:
        name, content = self.input(number)
        (self.folder / "current").write_text(f"{number}")  # of a crash or a hang
        faulthandler.dump_traceback_later(HANG, exit=True)
        try:
            self.accepted += self.check(name, content, number)
        except Exception as error:
            # For a Fault the place of its cause tells more.
            cause = error.__cause__ or error
            frames = traceback.extract_tb(cause.__traceback__)
            place = next(
                (f for f in reversed(frames) if "fused8" in f.filename and "/tests/" not in f.filename), frames[-1]
            )
            key = f"{Path(place.filename).name}:{place.lineno} {type(cause).__name__}"
            if key not in self.faults:
                self.faults[key] = f"input {number} ({name}): {error}"
                is_bytes = isinstance(content, bytes)
                kept = self.folder / (f"{number}-{name}" if is_bytes else f"{number}.txt")
                kept.write_bytes(content if is_bytes else repr(content).encode())
        finally:
            faulthandler.cancel_dump_traceback_later()

    def check(self, name: str, content: Any, number: int) -> int:
        if name == "state_dict":
            return targets.load_state_dict(content)
        path = self.work / (name if name.endswith(".index.json") else f"in{Path(name).suffix}")
        path.write_bytes(content)
        try:
            return targets.file(path, number)
        finally:
            path.unlink()


def with_atheris(run: Run, seconds: float) -> None:
    """libFuzzer over the files; our own damage is its mutator."""
    import atheris

    by_number = sorted(run.files)
    seeds = run.folder / "corpus"
    seeds.mkdir(exist_ok=True)
    for i, name in enumerate(by_number):
        (seeds / name).write_bytes(bytes([i]) + run.files[name])

    def damage(data: bytes, largest: int, seed: int) -> bytes:
        if not data:
            return b"\0"
        rng = random.Random(seed)
        return (data[:1] + mutate.once(data[1:] or b"\0", run.files[rng.choice(by_number)], rng))[:largest]

    def one(data: bytes) -> None:
        if data:
            run.check(by_number[data[0] % len(by_number)], bytes(data[1:]), data[0])

    options = [
        f"-max_total_time={int(seconds)}",
        "-max_len=100000",
        f"-timeout={HANG}",
        f"-artifact_prefix={run.folder}/",
    ]
    for module in ("files", "checkpoints", "report", "models", "convert", "foreign", "sources"):
        _instrument(atheris, sys.modules[f"fused8.{module}"])
    atheris.Setup(["fuzz", *options, str(seeds)], one, custom_mutator=damage)
    atheris.Fuzz()


def _instrument(atheris: Any, module: Any) -> None:
    for name, value in vars(module).items():
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__code__"):
            setattr(module, name, atheris.instrument_func(value))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("seconds", nargs="?", type=float, default=60)
    parser.add_argument("--inputs", type=int, help="stop after so many inputs, however long they take")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input (default: 0)")
    parser.add_argument("--folder", type=Path, default=None, help="where faulty inputs are kept")
    parser.add_argument("--engine", choices=("seeded", "atheris"), default="seeded")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="fused8-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder)
    if args.engine == "atheris":
        with_atheris(run, args.seconds)
        return 0
    for name in sorted(run.files):  # what is not damaged works; and warms up
        run.check(name, run.files[name], 0)
    for state_dict in run.state_dicts:
        assert targets.load_state_dict(state_dict) == 1
    run.accepted = 0
    before = memory()
    limit = before["VmSize"] + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    number, start = args.first, time.monotonic()
    while number - args.first < args.inputs if args.inputs else time.monotonic() - start < args.seconds:
        run.one(number)
        peak = memory()["VmHWM"]
        if peak > before["VmHWM"] + MEMORY:
            run.faults[f"memory {number}"] = f"input {number}: {peak - before['VmHWM']:,} bytes more than before"
            before["VmHWM"] = peak
        number += 1
    done = number - args.first
    print(f"{done} inputs in {time.monotonic() - start:.0f} s, {run.accepted} times one was accepted")
    for place, fault in run.faults.items():
        print(f"FAULT {place}: {fault}")
    if run.faults:
        print(f"Inputs are kept in {folder}")
    return bool(run.faults)


if __name__ == "__main__":
    sys.exit(main())
