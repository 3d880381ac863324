"""What a run says while it runs: console, JSON lines, TensorBoard.

`metrics.jsonl` holds one record a line, `{"step": 500, "time": 1764.2, "train/loss": 0.43, ...}`
with `time` in seconds since 1970. Figures are drawn from it; TensorBoard events repeat it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from tqdm import tqdm

from meml_jax.files import write_atomic, writing
from meml_jax.rounding import short
from meml_jax.types import UserError

FILE_NAME = "metrics.jsonl"


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a `metrics.jsonl`, oldest first.

    Args:
      path: the file; if it does not exist there are no records.

    Returns:
      One dict a line: a finite number as `step`, and numbers or None. A last line that was only
      half written is left out.

    Raises:
      UserError: another line is not a record, or the file cannot be read.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:  # e.g. a folder of that name
        raise UserError(
            f"{path}: {error.strerror or error}; move what is in its way, or make it readable"
        ) from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = _record(line)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            if number == len(lines):  # no newline after it: the process was stopped here
                break
            raise UserError(
                f"{path} line {number}: got {line[:60]!r}, expected a JSON record with a step "
                "and numbers; delete this line"
            ) from error
        records.append(record)
    return records


def _record(line: bytes) -> dict[str, Any]:
    """Read one line; raises one of many errors for what is no record."""
    record = json.loads(line)
    if not math.isfinite(record["step"]):
        raise ValueError("a step that is not finite")
    for value in record.values():
        if value is not None:
            math.isfinite(value)  # raises for what is no number, or beyond any float
    return record


class Progress:
    """How far a stage is: `report = Progress(1100, "drawing classes"); report(done, total)`.

    A bar on a terminal; elsewhere a line about every `interval` seconds, and always the last one.
    """

    def __init__(
        self,
        total: int | None,
        label: str,
        *,
        done: int = 0,
        unit: str = "it",
        interval: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        """Start the clock.

        Args:
          total: number of units, None if not known yet.
          label: what is being done.
          done: units that an earlier process did; they do not count in the speed.
          unit: plural name of what is counted.
          interval: seconds between lines where there is no terminal.
          stream: where to, standard error by default.
        """
        self._total, self._label, self._unit, self._interval = total, label, unit, interval
        self._stream = stream or sys.stderr
        self._start = self._last = (time.monotonic(), done)
        self._finished = False
        self._bar: Any = None
        if self._stream.isatty():
            look: Any = {"desc": label, "unit": f" {unit}", "dynamic_ncols": True}
            self._bar = tqdm(total=total, initial=done, file=self._stream, **look)

    def __call__(self, done: int, total: int | None = None, text: str = "") -> None:
        """Report that `done` of `total` units are finished, with a few numbers as `text`."""
        self._total = total = total or self._total
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now, last = time.monotonic(), total is not None and done >= total
        if self._finished or not last and now - self._last[0] < self._interval:
            return
        # The speed of late says how long it will take; at the end the whole is of interest.
        since, before = self._start if last else self._last
        rate = (done - before) / max(now - since, 1e-9)
        parts = [f"{self._label}: {done}" + (f"/{total}" if total else "")]
        if rate > 0:  # else more is said of the same step, e.g. its validation
            parts.append(f"{short(rate)} {self._unit}/s")
        if last:
            parts.append(f"took {tqdm.format_interval(now - since)}")
        elif total and rate > 0:
            parts.append(f"ETA {tqdm.format_interval((total - done) / rate)}")
        print(", ".join(parts + [text] * bool(text)), file=self._stream, flush=True)
        self._last, self._finished = (now, done), last

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.close()


class MetricWriter:
    """Writes the numbers of meta-training; a context manager."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        total_steps: int,
        *,
        start_step: int = 0,
        label: str = "meta-train",
        tensorboard: bool = True,
        interval: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        """Open the files; after a resume, drop what the lost steps had written.

        Args:
          directory: the workdir: gets `metrics.jsonl` and `tensorboard/`.
          total_steps: meta-steps of the whole run.
          start_step: step of the checkpoint that the run goes on from. Records of later steps are
            removed, as those steps will come again; 0 begins anew.
          label: name of the stage on the console.
          tensorboard: also write TensorBoard events.
          interval: seconds between console lines where there is no terminal.
          stream: console, standard error by default.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        kept = [r for r in read(path) if r["step"] <= start_step] if start_step else []
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter  # 0.1 s, of no use to readers of a run

            # The suffix keeps apart files that are opened within one second.
            self._board = SummaryWriter(
                str(directory / "tensorboard"),
                purge_step=start_step + 1 if start_step else 0,
                filename_suffix=f".{os.getpid()}.{start_step}",
            )
        self._progress = Progress(
            total_steps, label, done=start_step, unit="steps", interval=interval, stream=stream
        )
        self._latest: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record scalars of one step.

        Args:
          step: finished meta-steps.
          values: name, e.g. `train/loss` or `validation/accuracy`, to a scalar. One that is not
            finite is stored as null, which JSON has, in place of NaN, which it has not.

        Raises:
          UserError: the disk is full.
        """
        numbers = {name: float(value) for name, value in values.items()}
        record = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        with writing(self._file.name):
            self._file.write(json.dumps({"step": int(step), "time": time.time(), **record}) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, int(step))
            self._board.flush()
        self._latest |= numbers
        text = ", ".join(f"{name} {value:.4g}" for name, value in self._latest.items())
        self._progress(int(step), text=text)

    def close(self) -> None:
        """Close the files and the bar."""
        self._progress.close()
        with contextlib.suppress(OSError):  # a record that could not be written has been reported
            self._file.close()
        if self._board is not None:
            with contextlib.suppress(OSError):  # events only repeat the records
                self._board.close()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close, whether or not the run failed."""
        self.close()
