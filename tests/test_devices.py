"""Several devices and processes: the same run as on one, shared between them, written once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from meml_jax import devices
from meml_jax.samplers import Sampler
from meml_jax.types import UserError

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
NO_GRADIENT = "['attention']['output']['bias']"  # rounding noise alone: a softmax does not see it


# What a process of eight devices prints: the same steps and streams on one of them and on all.
PROGRAM = """
import json, re
import jax, jax.numpy as jnp, numpy as np
import tiny
from meml_jax import devices, heads, meta_train, task_spec, tasks
from meml_jax.config import InnerConfig, OuterConfig, TasksConfig
from meml_jax.learners import LEARNERS
from meml_jax.samplers import cluster_sampler
from meml_jax.trajectories import Trajectory
from meml_jax.types import TrainState

found = {"meshes": {}, "devices": jax.device_count()}
for meta_batch in (1, 2, 6, 8, 9, 20):
    mesh = devices.train_mesh(meta_batch)
    found["meshes"][meta_batch] = [mesh.size if mesh else 1, devices.note(mesh)]

# Clusters of dots; a network without convolutions, which compile long.
labels = np.arange(tiny.CLASSES).repeat(12)
table, kept = tasks.table_from_labels(labels, min_size=2)
spec = task_spec.make_spec(TasksConfig(num_random_query=2), table, kept)
images = np.random.default_rng(1).integers(0, 256, (len(labels), *tiny.IMAGE), dtype=np.uint8)
network = tiny.network("meml", channels=16, hidden=32)
ends = []
for mesh in (None, devices.train_mesh(8)):
    sampler = cluster_sampler(spec, np.array([12]), meta_batch=8)
    call = meta_train.make_train_call(
        network=network, learner=LEARNERS["meml"], inner=InnerConfig(), outer=OuterConfig(lr=1e-3),
        sampler=devices.share_tasks(sampler, mesh), steps_per_call=4,
    )
    params = tiny.parameters(network)
    state = TrainState(jnp.int32(0), params, meta_train.outer_optimizer(OuterConfig()).init(params))
    data = (images, table, np.ones(tiny.CLASSES, np.float32))
    data = (*jax.tree.map(jnp.asarray, data), jax.random.key(1))
    arguments = devices.replicate((state, jnp.int32(4), *data), mesh)
    program = jax.jit(call).lower(*arguments).compile()
    state, history = devices.local(program(*arguments), mesh)
    ends.append((state.params, history))
    text = program.as_text()
    kinds = "all-gather|all-to-all|collective-permute"
    sent = re.findall(rf"= \\w+\\[([\\d,]*)\\]\\S* (?:{kinds})\\(", text)
    found["one" if mesh is None else "eight"] = {
        "flops": program.cost_analysis()["flops"],
        "largest sent": max([np.prod([int(n) for n in s.split(",") if n]) for s in sent] + [0]),
        "sums": len(re.findall(r" all-reduce\\(", text)),
    }
(one, history), (eight, other) = ends
gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), one, eight)
found["gaps"] = {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(gap)}
found["history"] = [np.asarray(h["loss"]).tolist() for h in (history, other)]

# Classes that lie far apart, so that no rounding decides.
noise = np.random.default_rng(0).normal(size=(12, 4))
features = (5 * np.eye(3, 4)[np.arange(3).repeat(4)] + noise).astype(np.float32)
network = tiny.network("meml", channels=4)
runs = 11
stream = jnp.asarray(np.tile([0, 1, 4, 5, 8, 9], (runs, 1)))
test = jnp.asarray(np.tile([2, 3, 6, 7, 10, 11], (runs, 1)))
label = jnp.asarray(np.tile([0, 0, 1, 1, 2, 2], (runs, 1)))
outcomes, all_of_them, split, at_once = [], devices.test_mesh, devices.split, []
devices.split = lambda tree, mesh: at_once.append(mesh.size if mesh else 1) or split(tree, mesh)
for devices.test_mesh in (lambda: None, all_of_them):
    outcomes.append(heads.sgd_outcomes(
        tiny.parameters(network), jnp.asarray(features), Trajectory(stream, label, test, label),
        jax.random.split(jax.random.key(0), runs), jnp.full(runs, 0.1), network=network,
        shuffled=True, reservoir=None, runs_at_once=3,
    ))
found["outcomes"] = [np.asarray(x.test).tolist() for x in outcomes]
found["at once"] = at_once
print(json.dumps(found, default=int))
"""


@pytest.fixture(scope="module")
def found():
    """One device and eight simulated ones, compared in a process of its own."""
    env = os.environ | EIGHT | QUICK | {"PYTHONPATH": str(programs.ROOT / "tests")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_eight_devices_train_to_the_parameters_of_one(found):
    assert found["devices"] == 8
    assert len(found["gaps"]) == 10
    assert {k: v for k, v in found["gaps"].items() if v > 1e-5 and k != NO_GRADIENT} == {}
    np.testing.assert_allclose(*found["history"], rtol=1e-6)


@pytest.mark.slow
def test_each_device_does_its_own_tasks_and_sends_little_but_the_gradient(found):
    one, eight = found["one"], found["eight"]
    assert eight["flops"] < 0.2 * one["flops"]
    assert one["sums"] == one["largest sent"] == 0 < eight["sums"]
    assert eight["largest sent"] <= 8 * 32  # the rows W_i of the tasks' classes; no images


@pytest.mark.slow
def test_the_number_of_devices_divides_the_meta_batch(found):
    sizes = {int(meta_batch): size for meta_batch, (size, _) in found["meshes"].items()}
    assert sizes == {1: 1, 2: 2, 6: 6, 8: 8, 9: 3, 20: 5}
    assert found["meshes"]["8"][1] == ", 8 of 8 devices"
    assert "3 of 8 devices: a multiple of them as outer.meta_batch" in found["meshes"]["9"][1]


@pytest.mark.slow
def test_runs_of_a_meta_test_are_shared(found):
    assert found["at once"] == [1] * 4 + [8]  # 11 runs: 3 at once, then all, 2 on each device
    one, eight = np.array(found["outcomes"])
    np.testing.assert_array_equal(one, eight)
    assert one.shape == (11, 6) and one.mean() > 0.5


def test_on_one_device_nothing_is_touched():
    assert devices.train_mesh(6) is devices.test_mesh() is None
    assert devices.note(None) == ""
    tree, sampler = {"a": jnp.ones(2)}, Sampler(*6 * [None])
    for same in (devices.replicate, devices.local, devices.split):
        assert same(tree, None) is tree
    assert devices.share_tasks(sampler, None) is sampler
    assert devices.largest(3, None) == 3 and devices.process() == 0


def test_processes_share_a_meta_batch_evenly(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="outer.meta_batch=3 for 2 processes, expected a multiple"):
        devices.train_mesh(3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("h:1", "", ""), "ADDRESS set, but not JAX_NUM_PROCESSES, JAX_PROCESS_ID; set all"),
        (("", "2", "0"), "JAX_NUM_PROCESSES, JAX_PROCESS_ID set, but not JAX_COORDINATOR_ADDRESS"),
        (("host", "2", "0"), "JAX_COORDINATOR_ADDRESS=host, expected HOST:PORT"),
        (("h:1", "two", "0"), "JAX_NUM_PROCESSES=two, JAX_PROCESS_ID=0; expected"),
        (("h:1", "2", "2"), "JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=2; expected"),
        (("h:1", "2", "-1"), "JAX_PROCESS_ID=-1; expected"),
    ],
)
def test_half_set_or_wrong_variables(values, message):
    with pytest.raises(UserError, match=message):
        devices.connect(dict(zip(devices.VARIABLES, values, strict=True)))
    assert not jax.distributed.is_initialized()


def test_no_variables_no_processes():
    devices.connect({})
    assert not jax.distributed.is_initialized()


# Whole runs.

TRAINED = {"outer__meta_batch": 8, "tasks__num_buckets": 1, "train__steps_per_call": 5}


def start(workdir, *flags, count=1, env=None, **fields):
    """Start a run of so many processes on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    pipe, processes = subprocess.PIPE, []
    for index in range(count):
        values = dict(zip(devices.VARIABLES, (address, str(count), str(index)), strict=True))
        processes.append(
            subprocess.Popen(
                programs.command(workdir, *flags, **TRAINED | fields), cwd=programs.ROOT,
                env=os.environ | QUICK | (env or {}) | (values if count > 1 else {}),
                stdout=pipe, stderr=pipe, text=True,
            )
        )  # fmt: skip
    return processes


def finish(processes, code=0):
    """Wait for the processes of a run: the lines that each has printed."""
    ends = []
    try:
        for process in processes:
            ends.append(process.communicate(timeout=900))
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), ends
    return [[x for x in out.splitlines() if not x.startswith("[Gloo]")] for out, _ in ends]


def assert_same_run(workdir, other):
    """Same parameters and records to 1e-5, which Adam makes of rounding, same accuracies."""
    found, expected = programs.arrays(workdir), programs.arrays(other)
    assert found.keys() == expected.keys()
    for name in (name for name in expected if name.startswith(".params")):
        if NO_GRADIENT not in name:
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5, err_msg=name)
    records = programs.records(workdir), programs.records(other)
    for record, wanted in zip(*records, strict=True):
        assert record == pytest.approx(wanted, rel=1e-5)
    results = [programs.results(x) for x in (workdir, other)]
    assert results[0]["meta_train"]["steps"] == results[1]["meta_train"]["steps"]
    heads = [[x["meta_test"], *x["comparisons"]] for x in results]
    for curve, wanted in zip(*heads, strict=True):
        accuracies = [[p["accuracy"] for p in part["points"]] for part in (curve, wanted)]
        np.testing.assert_allclose(*accuracies, atol=0.051)  # one image of 20 may lie on an edge


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on one device."""
    workdir = tmp_path_factory.mktemp("whole")
    finish(start(workdir))
    return workdir


@pytest.mark.slow
def test_a_run_on_eight_devices(tmp_path, whole):
    [lines] = finish(start(tmp_path, env=EIGHT))
    assert any("8 of 8 devices" in line for line in lines)
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_two_processes_stop_together_go_on_and_write_once(tmp_path, whole):
    # One of them is told to stop: both do, after the same step.
    processes = start(tmp_path, count=2, train__steps=100_000, train__checkpoint_every=5)
    saved = tmp_path / "checkpoints" / "5"
    programs.wait(saved.exists, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    first, second = finish(processes, code=128 + signal.SIGTERM)
    assert "stopped and saved at step" in first[-1] and second == []
    assert sum(line.startswith("cluster: k-means") for line in first) == 1
    steps = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert len(steps) <= 3 and max(steps) % 5 == 0  # whole ones, and no one else's
    for record in (records := programs.records(tmp_path)):
        assert records.count(record) == 1


@pytest.mark.slow
def test_two_processes_train_to_the_parameters_of_one(tmp_path, whole):
    first, second = finish(start(tmp_path, "--stage=train", count=2, train__steps=20))
    assert "2 processes" in first[0] and any("2 of 2 devices" in line for line in first)
    assert second == []
    first, second = finish(start(tmp_path, count=2))
    assert "train: goes on from step 20" in first and second == []
    assert sum(line.startswith("test ") for line in first) == 8
    assert first[-1].startswith("report: ")
    assert_same_run(tmp_path, whole)
    names = [{path.name for path in folder.iterdir()} for folder in (tmp_path, whole)]
    assert names[0] == names[1]
    [lines] = finish(start(tmp_path))  # one process goes on with what two have left
    assert any(line.startswith("train: reuses 40 steps") for line in lines)


@pytest.mark.slow
def test_processes_that_cannot_share_a_meta_batch_stop_with_a_line(tmp_path):
    processes = start(tmp_path, count=2, outer__meta_batch=3)
    errors = [process.communicate(timeout=900)[1].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    for error, who in zip(errors, ("error: ", "error: process 1: "), strict=True):
        assert error.startswith(
            f"{who}outer.meta_batch=3 for 2 processes, expected a multiple of 2"
        )
