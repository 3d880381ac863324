"""How things are timed: in turn, round after round, as medians."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often things are measured.

    Attributes:
      seconds: that the rounds of one part may take, at least `least` rounds.
      least: rounds.
      repeats: exactly so many, whatever they take; None: as many as fit.
      profile: folder for a trace of one more round.
    """

    seconds: float = 10.0
    least: int = 3
    repeats: int | None = None
    profile: Path | None = None


class Case(NamedTuple):
    """A thing to be timed.

    Attributes:
      run: does it, and returns what to wait for.
      num_steps: that it consists of.
    """

    run: Callable[[], Any]
    num_steps: int = 1


class Time(NamedTuple):
    """Medians over the rounds, of one step.

    Attributes:
      ms: milliseconds on the clock.
      cpu_ms: of processor time of this process, all cores together.
    """

    ms: float
    cpu_ms: float


def interleave(cases: dict[str, Case], rounds: Rounds) -> dict[str, Time]:
    """Time cases in turn, round after round, so that what disturbs one disturbs all alike."""
    for case in cases.values():
        jax.block_until_ready(case.run())
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in _rounds(rounds):
        for name, (run, num_steps) in cases.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            spent = time.perf_counter() - wall, time.process_time() - cpu
            found[name].append((1e3 * spent[0] / num_steps, 1e3 * spent[1] / num_steps))
    if rounds.profile is not None:
        with jax.profiler.trace(str(rounds.profile)):
            for name, case in cases.items():
                with jax.profiler.TraceAnnotation(name):
                    jax.block_until_ready(case.run())
    medians = {
        name: tuple(statistics.median(column) for column in zip(*times, strict=True))
        for name, times in found.items()
    }
    return {name: Time(*values) for name, values in medians.items()}


def _rounds(rounds: Rounds) -> Iterator[int]:
    started, done = time.perf_counter(), 0
    while (
        done < rounds.repeats
        if rounds.repeats is not None
        else done < rounds.least or time.perf_counter() - started < rounds.seconds
    ):
        yield done
        done += 1
