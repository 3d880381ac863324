"""How fast this is, on this machine: times, shares of its peak, memory, beside the authors' code.

    python experiments/benchmark.py [--json=B.json] [--compare=OLD.json] [--only=steps,stream]
        [--repeats=N] [--device=cpu|gpu|tpu] [--profile=DIR]
    python experiments/benchmark.py --json=B.json --write_docs=docs/performance.md

Medians of interleaved repetitions, so that shares and ratios hold on a machine that is not quite
quiet. The first time it compiles some 40 programs, which takes as long as all else.
`--repeats` takes so many rounds instead of as many as fit in the time; `--profile` leaves a trace
of one more round of each part (TensorBoard, Perfetto).
`--write_docs` measures nothing: it fills the marked tables of a page from B.json.

B.json: {"schema": 1, "device", "versions", "commit", "precision", "seconds", "part_seconds": {part:
seconds}, "small", "parts": {part: [row]}}. A row has a `name` and figures: `ms` (median of one
step), `cpu_ms` (processor time, all cores), `GFLOP` (three times the FEN's forward operations on
each support and query image, counted from its shapes), `peak_share` (GFLOP / ms over the matmul of
the same rounds), `outside_share` (1 - time of FEN and CLN alone, forward and backward, once an
image / time of the step: all that is neither), `ms_at_450` (ms x peak / 450 GFLOP/s, the
yardstick's machine), `yardstick_ms` (the authors' PyTorch code there), `speedup` (their quotient),
`temp_mb` (of `compiled.memory_analysis()`), `protocol_minutes` (ms x 965,250 steps: extrapolated,
not run).
"""

from __future__ import annotations

if __name__ == "__main__":
    import starting  # noqa: F401, before what takes seconds to import

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_parts
import jax
from benchmark_cases import SMALL, Sizes
from benchmark_page import fill, table
from benchmark_parts import Row
from benchmark_timing import Rounds
from console import exit_code, leave, say

from meml_jax.compilation_cache import keep_compiled
from meml_jax.data import cache
from meml_jax.environment import commit, device_name, versions
from meml_jax.files import write_atomic, write_json
from meml_jax.interrupts import Interrupted
from meml_jax.types import UserError

PARTS = ("peak", "steps", "breakdown", "memory", "stream", "encode", "growth", "kmeans", "compile")
COMPARED = ("ms", "cpu_ms", "temp_mb", "seconds", "compile_seconds", "gflops")
TITLES = {
    "peak": "Peak of the machine",
    "steps": "Meta-steps, meta-batch 1, beside the authors' code (at 450 GFLOP/s)",
    "breakdown": "Parts of a meta-step, each by itself",
    "memory": "Memory of a meta-gradient at cluster size 20",
    "stream": "Meta-test: a step of one run's stream; the protocol's minutes are extrapolated",
    "encode": "Frozen features: an image, by how many are encoded at a time",
    "growth": "A small network's meta-step as things grow",
    "kmeans": "Cluster stage",
    "compile": "Compilation, and a process from its start to ten meta-steps",
    "start": "First call",
}


def measure_compile(small: bool, device: str | None) -> list[Row]:
    """Start processes that compile eight buckets: with an empty cache, then with the first's.

    Raises:
      UserError: such a process failed; it has said why on standard error.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--only=start", f"--json={found}"]
        command += ["--small"] * small + ([f"--device={device}"] if device else [])
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for name in ("cold", "warm cache"):
            began = time.perf_counter()
            code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
            seconds = time.perf_counter() - began
            if code:
                raise UserError(
                    f"the process that the part compile measures ended with code {code}, expected "
                    "0; try it alone with --only=start, or leave compile out of --only"
                )
            [row] = json.loads(found.read_text())["parts"]["start"]
            rows.append(row | {"name": f"{row['name']}, {name}", "process_seconds": seconds})
    return rows


def measure(
    parts: list[str],
    sizes: Sizes,
    rounds: Rounds,
    *,
    small: bool,
    device: str | None,
    store: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure parts, print each one's table, and return what is stored, by `store` after each."""
    found: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    described = {
        "schema": 1,
        "device": device_name(),
        "versions": versions(),
        "commit": commit(),
        "precision": "highest",
        "small": small,
    }
    every: dict[str, Any] = {}
    for part in parts:
        began = time.monotonic()
        if part == "compile":
            found[part] = measure_compile(small, device)
        else:
            found[part] = list(benchmark_parts.PARTS[part](sizes, rounds))
        seconds[part] = time.monotonic() - began
        say(f"{TITLES[part]} ({part}, {seconds[part]:.0f} s)\n\n{table(found[part])}")
        times = {"seconds": sum(seconds.values()), "part_seconds": seconds}
        every = described | times | {"parts": found}
        store(every)
    return every


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[Row]:
    """List the figures that both have, and new / old."""
    rows = []
    for part, found in new["parts"].items():
        before = {row["name"]: row for row in old["parts"].get(part, [])}
        for row in found:
            for figure in COMPARED:
                a, b = before.get(row["name"], {}).get(figure), row.get(figure)
                if a and b:
                    name = f"{part}: {row['name']}"
                    rows.append(
                        {"name": name, "figure": figure, "old": a, "new": b, "new/old": b / a}
                    )
    return rows


def read(path: Path) -> dict[str, Any]:
    """Load what an earlier call has stored.

    Raises:
      UserError: no such file, or not one of this program.
    """
    try:
        found = json.loads(path.read_text())
        if found["schema"] != 1 or not isinstance(found["parts"], dict):
            raise ValueError
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is no file of benchmark.py --json (schema 1)") from None
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--compare", type=Path, help="file of earlier figures: print the ratios")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--repeats", type=int, help="rounds of each part")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="default: what JAX finds")
    parser.add_argument("--profile", type=Path, help="folder for profiler traces")
    parser.add_argument("--write_docs", type=Path, help="page whose tables are filled from --json")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a check of the program")
    return parser.parse_args(argv)


def use_device(device: str | None) -> None:
    """Choose the platform; raises UserError where there is none such."""
    if device:
        jax.config.update("jax_platforms", device)
    try:
        jax.devices()
    except RuntimeError:
        raise UserError(
            f"--device={device}, but JAX finds none here; on a GPU: pip install 'meml_jax[cuda]'"
        ) from None


def work(args: argparse.Namespace) -> int:
    """Fill a page, or measure and store; raises UserError for what a user can put right."""
    if args.write_docs:
        if args.json is None:
            raise UserError("--write_docs needs the figures: --json=B.json")
        found = read(args.json)
        try:
            page = args.write_docs.read_text()
        except OSError as error:
            raise UserError(f"--write_docs={args.write_docs}: {error.strerror}") from None
        write_atomic(args.write_docs, fill(page, found))
        return 0
    parts = [part for part in args.only.split(",") if part]
    for part in parts:
        if part not in TITLES:
            raise UserError(f"--only has {part!r}, expected one or more of {', '.join(PARTS)}")
    if not parts:
        raise UserError(f"--only is empty, expected one or more of {', '.join(PARTS)}")
    if args.repeats is not None and args.repeats < 1:
        raise UserError(f"--repeats={args.repeats}, expected at least 1")
    old = read(args.compare) if args.compare else None
    use_device(args.device)
    jax.config.update("jax_default_matmul_precision", "highest")
    # What only shows that the program works need not be compiled well.
    if args.small:
        jax.config.update("jax_disable_most_optimizations", True)
    keep_compiled(cache.folder(None), report=say)
    say(f"device: {device_name()}, jax {jax.__version__}\n")
    sizes = SMALL if args.small else Sizes()
    rounds = Rounds(repeats=args.repeats, profile=args.profile)
    stored: list[str] = []

    def store(found: dict[str, Any]) -> None:
        if args.json:
            write_json(args.json, found)
            stored[:] = found["parts"]

    try:
        found = measure(parts, sizes, rounds, small=args.small, device=args.device, store=store)
    except (Interrupted, KeyboardInterrupt) as stop:
        kept = f"{args.json} has {', '.join(stored)}" if stored else "nothing is stored"
        signum = getattr(stop, "signum", signal.SIGINT)
        raise Interrupted(signum, f"stopped; {kept}, the same command measures anew") from None
    if old:
        say(f"Against {args.compare}\n\n{table(compare(old, found))}")
    return 0


def main(argv: list[str]) -> int:
    """Measure, and turn what a user can put right into one line and exit code 2."""
    args = parse(argv)
    return exit_code(lambda: work(args))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
