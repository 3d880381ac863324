"""A small table, the program that does tables in this process, and results made by hand."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import re
import sys

import jax
import numpy as np
import programs
import pytest
import scipy.stats

from meml_jax import (
    table_report,
    tables,
)
from meml_jax.results import points_version
from meml_jax.tables import Choice
from meml_jax.types import UserError

ROOT = programs.ROOT
NAMES = sorted(path.stem for path in (ROOT / "configs" / "tables").glob("*.py"))
MINI = '''"""A table on generated characters."""

from meml_jax.tables import Row, Table

TABLE = Table(
    title="Mini",
    config="configs/quickstart.py",
    rows={
        "oracle": Row({"sgd": "Oracle MEML"}, values={"tasks.labels": "true"}),
        "oml": Row({"sgd": "OML"}, values={"learner": "oml"}),
        "meml": Row({"sgd": "MEML"}),
    },
    smoke=SMOKE,
)
'''


@functools.cache
def program():
    """The module `experiments/tables.py`, on the same `run` as other tests."""
    sys.modules["run"] = programs.program()
    spec = importlib.util.spec_from_file_location("tables_program", ROOT / "experiments/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(*args):
    """Call the program's `main`: (exit code, standard output, standard error)."""
    precision = jax.config.jax_default_matmul_precision
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = program().main(["tables.py", *map(str, args)])
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def mini(tmp_path):
    """The file of a small table, with settings that other tests have compiled."""
    fields = {k: v for k, v in programs.TINY.items() if not k.startswith("test.")}
    fields |= {"test.num_classes": (2, 4), "test.runs": 2, "test.learning_rates": (0.01, 0.001)}
    fields |= {"train.steps": 40, "train.log_every": 20, "train.checkpoint_every": 20}
    fields |= {"embedding.dim": 64}
    path = tmp_path / "mini.py"
    path.write_text(MINI.replace("SMOKE", repr(fields)))
    return path


@functools.cache
def table(name):
    return tables.load(name, ROOT)


def settings(name, row, budget="paper", seed=0, **choice):
    return tables.settings(table(name), row, ROOT, Choice(budget, **choice), seed=seed)


def point(accuracies, n=10, **fields):
    a = np.asarray(accuracies, float)
    half = scipy.stats.t.ppf(0.975, len(a) - 1) * a.std(ddof=1) / len(a) ** 0.5
    return {
        "num_classes": n, "runs": len(a), "accuracy": float(a.mean()), "ci95": float(half),
        "chance": 1 / n, "accuracies": [float(x) for x in a], "seconds": 2.0, "learning_rate": 0.1,
    } | fields  # fmt: skip


def results(config, *, sgd, prototype=(0.8, 0.9), pixels=(0.5, 0.6), **fields):
    """What a run stores, with the accuracies of its runs at 10 classes; half as much at 50."""

    def curve(head, accuracies, **names):
        half = [a / 2 for a in accuracies]
        return {"head": head, "protocol": "clean"} | names | {
            "points": [point(accuracies), point(half, 50)]
        }  # fmt: skip

    oracle = config.tasks.labels == "true"
    return {
        "dataset": "omniglot", "note": "", "device": "cpu", "commit": "abc",
        "points_version": points_version(config),
        "embedding": None if oracle else {"name": config.embedding.name},
        "clustering": {"labels": config.tasks.labels, "kept": 9, "purity": 0.5, "seconds": 3.0},
        "meta_train": {
            "steps": config.train.steps, "seconds": 100.0, "steps_per_second": 5.0,
            "peak_bytes": 3 * 2**20,
        },
        "meta_test": curve("sgd", sgd) | {"checkpoint_step": config.train.steps},
        "comparisons": [
            curve("prototype", prototype, name="prototype head"),
            curve("pixels", pixels, name="baseline: raw pixels"),
        ],
        "config": dataclasses.asdict(config),
    } | fields  # fmt: skip


@pytest.fixture
def stored(tmp_path):
    """Results of three rows of Table 1, one of them with two seeds."""
    for row, seed, fields in (
        ("oracle_oml", 0, {"sgd": (0.9, 0.92)}),
        ("oml", 0, {"sgd": (0.70, 0.70), "note": "PART of omniglot"}),
        ("meml", 0, {"sgd": (0.85, 0.85)}),
        ("meml", 1, {"sgd": (0.85, 0.85)}),
    ):
        config = settings("omniglot", row, "short", seed)
        folder = tmp_path / "omniglot" / row / f"seed{seed}"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(results(config, **fields)))
        (folder / "embedding.json").write_text('{"name": "x", "seconds": 40.0}')
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the figures, which take longer than all else."""

    def draw(lines, path, *, title):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    monkeypatch.setattr(table_report.table_figures, "draw", draw)


def cells(text, name):
    found = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    return found and found[1].split(" | ")


@pytest.fixture
def done(monkeypatch, undrawn):
    """The runs that were done, in place of doing them."""
    runs = []

    def do(config, workdir, results_folder):
        runs.append((workdir.parent.name, config.seed))
        if config.learner == "oml":
            raise UserError("cannot be") if config.seed else OSError("no such\ndevice")
        workdir.mkdir(parents=True, exist_ok=True)
        stored = results(config, sgd=(0.5, 0.5), points_version=points_version(config))
        (workdir / "results.json").write_text(json.dumps(stored))
        (workdir / "report.md").touch()

    monkeypatch.setattr(program(), "do", do)
    return runs
