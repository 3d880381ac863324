"""A run that was killed again and again equals one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import programs
import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = (
    "--config=configs/quickstart.py:smoke",
    "--config.data.num_classes=40",
    "--config.clustering.num_clusters=20",
    "--config.network.channels=4",
    "--config.network.hidden=16",
    "--config.tasks.num_buckets=2",
    "--config.tasks.rotations=True",
    "--config.train.steps=60",
    "--config.train.steps_per_call=3",
    "--config.train.log_every=7",
    "--config.train.checkpoint_every=5",
    "--config.train.validate_every=11",
    "--config.test.num_classes=(4,6)",
    "--config.test.heads=('sgd','sgd_reservoir')",
    "--config.test.reservoir_size=8",
    "--config.test.reservoir_batch=2",
)


def _start(workdir: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "experiments/run.py", *SETTINGS, *flags, f"--workdir={workdir}"]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _finish(workdir: Path, *flags: str) -> str:
    process = _start(workdir, *flags)
    try:
        output = process.communicate(timeout=900)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def _kill_once(workdir: Path, ready, *flags: str) -> None:
    """Start the run and kill -9 it as soon as `ready()` holds; fail if it ends before."""
    process = _start(workdir, *flags)
    deadline = time.monotonic() + 900
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def _saved_step(workdir: Path) -> int:
    """Return the last step that is saved in a folder of checkpoints, 0 without any."""
    folder = workdir / "checkpoints"
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    return max(steps, default=0)


@pytest.mark.slow
def test_killed_in_training_and_in_meta_test_equals_uninterrupted(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _finish(whole)

    _kill_once(killed, lambda: _saved_step(killed) >= 20)
    assert _saved_step(killed) < 60
    _kill_once(killed, lambda: (killed / "points.json").exists())
    assert not (killed / "results.json").exists()
    output = _finish(killed)
    assert "reuses 60 steps" in output and "finished points" in output

    ours, theirs = programs.arrays(killed), programs.arrays(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    results = [programs.without_circumstances(programs.results(w)) for w in (killed, whole)]
    assert results[0] == results[1]
    records = []
    for workdir in (killed, whole):
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        records.append([{k: v for k, v in json.loads(x).items() if k != "time"} for x in lines])
    assert records[0] == records[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contrastive", "acai", "deepcluster"])
def test_killed_while_it_embeds_equals_uninterrupted(tmp_path, name):
    flags = (
        f"--config.embedding.name={name}", "--config.embedding.channels=4",
        "--config.embedding.dim=16", "--config.embedding.width=2", "--config.embedding.steps=200",
        "--config.embedding.batch_size=8", "--config.embedding.checkpoint_every=10",
        "--config.embedding.num_pseudo_labels=5", "--config.embedding.round_steps=50",
        "--stage=embed",
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _finish(whole, *flags)
    _kill_once(killed, lambda: _saved_step(killed / "embedding") >= 20, *flags)
    assert _saved_step(killed / "embedding") < 200 and not (killed / "embeddings.npz").exists()
    assert "embed: goes on from step" in _finish(killed, *flags)
    ours, theirs = (np.load(workdir / "embeddings.npz") for workdir in (killed, whole))
    assert sorted(ours) == sorted(theirs)
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
