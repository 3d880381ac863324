"""Runs of `experiments/run.py` as a user starts them, in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from meml_jax import checkpoints, pseudo_labels
from meml_jax.data import datasets
from meml_jax.model import fresh_state, make_model
from meml_jax.settings import from_dict

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, str(ROOT / "experiments" / "run.py")]

# Small enough that a run takes seconds; all tests use these shapes, so they compile them once.
TINY = {
    "embedding.name": "pca",
    "network.channels": 4,
    "network.hidden": 16,
    "tasks.num_buckets": 2,
    "data.num_classes": 30,
    "clustering.num_clusters": 12,
    "test.num_classes": "(2,4)",
    "test.runs": 2,
    "test.learning_rates": "(0.01,0.001)",
}


def command(workdir, *flags, config="configs/quickstart.py:smoke", tiny=True, **fields):
    """The command line; double underscores in keywords stand for dots."""
    values = (TINY if tiny else {}) | {k.replace("__", "."): v for k, v in fields.items()}
    overrides = [f"--config.{name}={value}" for name, value in values.items()]
    return [*PROGRAM, f"--config={config}", f"--workdir={workdir}", *flags, *overrides]


def start(*args, **kwargs):
    """Start a run and return its process."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*args, **kwargs), cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def run(*args, **kwargs):
    """Start a run and wait for its end: (exit code, standard output, standard error)."""
    process = start(*args, **kwargs)
    try:
        out, err = process.communicate(timeout=900)
    finally:
        process.kill()
    return process.returncode, out, err


def succeed(*args, call=None, **kwargs):
    """Run and return the lines of standard output; in this process if `call` is `run_here`."""
    code, out, err = (call or run)(*args, **kwargs)
    assert code == 0, out + err
    return out.splitlines()


def refuse(*args, call=None, **kwargs):
    """Run what cannot work: exit code 2 and one line on standard error, which is returned.

    In this process, unless `call` is `run`: an import of JAX for each wrong command line adds up.
    """
    code, out, err = (call or run_here)(*args, **kwargs)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1, out + err
    assert "Traceback" not in out + err
    assert err.splitlines()[-1] == errors[0]
    return errors[0]


@functools.cache
def program():
    """The module `experiments/run.py`."""
    sys.path.append(str(ROOT / "experiments"))  # for the modules beside it
    spec = importlib.util.spec_from_file_location("program", PROGRAM[1])
    module = importlib.util.module_from_spec(spec)
    sys.modules["program"] = module
    spec.loader.exec_module(module)
    return module


def run_here(*args, **kwargs):
    """Call the program's `main` in this process, like `run`."""
    argv = command(*args, **kwargs)[1:]
    flags = program().FLAGS
    for name in list(flags):  # what an earlier call left
        if name.startswith("config."):
            delattr(flags, name)
        elif name in ("config", "workdir", "stage"):
            flags[name].unparse()
    before, precision = sys.argv, jax.config.jax_default_matmul_precision
    out, err = io.StringIO(), io.StringIO()
    try:
        sys.argv = argv  # where config_flags looks for overrides
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.chdir(ROOT),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", DeprecationWarning)  # of ml_collections
            code = program().main(argv)
    finally:
        sys.argv = before
        jax.config.update("jax_default_matmul_precision", precision)
    return code, out.getvalue(), err.getvalue()


def finished(name, call=run_here, **fields):
    """A finished run, made once for all processes of the tests; copy it before changing it.

    Of `run_here` it is compiled without optimisations, so its numbers are not quite those of `run`.
    """
    folder = Path(os.environ["MEML_JAX_CACHE"]) / "runs"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / f"{name}.done"
        if not done.exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            done.write_text("\n".join(succeed(folder / name, call=call, **fields)))
    return folder / name


def wait(condition, process, *, seconds=600):
    """Wait until a condition holds while a process runs."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError("ended too early: " + "".join(process.communicate()))
        time.sleep(0.01)


def records(workdir):
    """What `metrics.jsonl` says, without the clock; a half written line is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (workdir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [{k: v for k, v in record.items() if k != "time"} for record in found]


CLOCKS = ("seconds", "compile_seconds", "steps_per_second", "peak_bytes")


def without_circumstances(value):
    """Drop from what a run stores as JSON how fast the machine was, and the commit it ran at."""
    if isinstance(value, dict):
        left = value.keys() - {*CLOCKS, "commit"}
        return {k: without_circumstances(v) for k, v in value.items() if k in left}
    return [without_circumstances(v) for v in value] if isinstance(value, list) else value


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def stored_config(workdir):
    return from_dict(json.loads((workdir / "config.json").read_text()))


def snapshot(folder):
    """Content of all files below a folder, except the lock."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def times(folder):
    """Times of change of all files below a folder."""
    return {p: p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def arrays(workdir):
    """The state in the last checkpoint of a run, by name."""
    config = stored_config(workdir)
    dataset = datasets.load(config.data, report=lambda line: None)
    z = pseudo_labels.embed(config, dataset, workdir, lambda line: None)
    clusters = pseudo_labels.cluster(config, dataset, z, workdir, lambda line: None)
    model = make_model(config, dataset, clusters)
    template = jax.eval_shape(lambda: fresh_state(config, model))
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, _ = checkpoints.restore(manager, template)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
