"""Timing in interleaved rounds: everyone once per round in a shuffled order, so that a slow moment hits all alike.

What counts is the ratio to the baseline of the same round.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

MIN_ROUNDS = 9
SLOW_ROUNDS = 3  # for what takes so long that MIN_ROUNDS do not fit into its share of the time
RATIO_ERROR = 0.005  # enough rounds: the median of every ratio is known this well
MEASUREMENT = 1e-3  # seconds: a shorter call is repeated within one measurement


class Timed:
    """A function and the seconds that each call took, one number per round."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name, self.call = name, call
        self.calls = 1
        self.times: list[float] = []
        self.ratios: list[float] = []
        """The baseline's time over the own one: how many times as fast."""

    def measure(self) -> float:
        start = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        return (time.perf_counter() - start) / self.calls

    def warm_up(self) -> float:
        """Two calls; the seconds of the second one, by which the number of calls per measurement is chosen."""
        self.measure()
        seconds = self.measure()
        self.calls = max(1, math.ceil(MEASUREMENT / seconds))
        return seconds * self.calls

    def ratio_error(self) -> float:
        """Relative: the standard error of a median of n values is about their interquartile range / sqrt(n)."""
        first, middle, third = quartiles(self.ratios)
        return (third - first) / middle / math.sqrt(len(self.ratios))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """As `timeit` does: with 10,000 tensors a collection takes as long as a step, and hits any optimizer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_garbage_collection()
def interleave(timed: Sequence[Timed], baseline: str, seconds: float) -> None:
    """Fill in `times` and `ratios` until all ratios are known well, or the time is up."""
    pace = {t.name: t.warm_up() for t in timed}
    share = seconds / len(timed)
    lasting = [t for t in timed if t.name == baseline or pace[t.name] * MIN_ROUNDS <= share]
    order = random.Random(0)
    start = time.perf_counter()
    for number in range(10**6):
        part = list(timed if number < SLOW_ROUNDS else lasting)
        if number >= SLOW_ROUNDS:
            known = number >= MIN_ROUNDS and all(t.ratio_error() < RATIO_ERROR for t in lasting)
            if known or len(lasting) == 1 or time.perf_counter() - start >= seconds:
                return
        order.shuffle(part)
        took = {t.name: t.measure() for t in part}
        for t in part:
            t.times.append(took[t.name])
            t.ratios.append(took[baseline] / took[t.name] if baseline in took else math.nan)
