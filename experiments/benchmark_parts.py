"""The parts of `experiments/benchmark.py`: functions from sizes and rounds to rows of figures."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import benchmark_cases as lib
import benchmark_memory
import jax
import jax.numpy as jnp
import numpy as np
from benchmark_cases import Sizes, make_problem, steps_case
from benchmark_timing import Case, Rounds, Time, interleave

from meml_jax import chunks, clustering, encoding, meta_test
from meml_jax.config import ClusteringConfig, NetworkConfig, TasksConfig, TestConfig
from meml_jax.learners import LEARNERS
from meml_jax.networks import make_network
from meml_jax.trajectories import Pool
from meml_jax.types import TaskTable

Row = dict[str, Any]
"""Figures of one thing measured, by name of the column; `name` says what, and is unique."""

OMNIGLOT, MINI_IMAGENET = "omniglot", "mini_imagenet"
PROTOCOL_STEPS = 965_250  # of the meta-test on Omniglot: 12 rates and 50 runs, all points
YARDSTICK_PEAK = 450.0  # GFLOP/s in float32 of the 2 cores on which the authors' code was timed
YARDSTICK = {
    (OMNIGLOT, "meml"): {10: 79.0, 20: 92.0, 30: 107.0},
    (OMNIGLOT, "oml"): {10: 107.0, 20: 206.0, 30: 311.0},
    (MINI_IMAGENET, "meml"): {20: 870.0, 30: 1030.0},
    (MINI_IMAGENET, "oml"): {20: 1620.0, 30: 2450.0},
}
"""Milliseconds of a meta-step of the authors' PyTorch code, by cluster size."""
YARDSTICK_STREAM = 7.2  # likewise, of a step of its meta-test


def peak(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Measure the float32 matrix products that this machine can do."""
    case, gflop = lib.peak_case(sizes)
    found = interleave({"peak": case}, dataclasses.replace(rounds, seconds=rounds.seconds / 10))
    ms = found["peak"].ms
    return [{"name": f"matmul {sizes.matmul}", "ms": ms, "gflops": 1e3 * gflop / ms}]


def steps(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Measure meta-steps of MEML and OML beside the peak, the floor and the authors' code."""
    peak, peak_gflop = lib.peak_case(sizes)
    cases: dict[str, Case] = {}
    facts: dict[str, dict[str, Any]] = {}
    nets = ((OMNIGLOT, (28, 28, 1)), (MINI_IMAGENET, (84, 84, 3)))
    config = NetworkConfig(channels=sizes.channels, hidden=sizes.hidden)
    rows: list[Row] = []
    for i, (net, image) in enumerate(nets):
        cases = {"peak": peak}
        for size in sizes.cluster_sizes[i]:
            for learner in ("meml", "oml"):
                clusters = np.full(sizes.outputs[i], size)
                problem = make_problem(learner, clusters, network=config, image=image)
                support, own = (rows.mask.shape[1] for rows in lib.task_shapes(problem))
                name = f"{net} {learner} {size}"
                cases[name] = steps_case(problem, num_steps=1)
                floor = f"{net} floor {support + own}"
                if floor not in cases:
                    cases[floor] = lib.floor_case(problem, support + own)
                facts[name] = {
                    "K/Q": f"{support}/{own}",
                    "GFLOP": 3 * (support + own) * lib.forward_gflop(problem),
                    "floor": floor,
                    "yardstick_ms": YARDSTICK[net, learner].get(size),
                }
        # A step of the larger network takes seconds.
        found = interleave(cases, dataclasses.replace(rounds, least=3 - i))
        gflops = 1e3 * peak_gflop / found["peak"].ms
        rows += [
            step_row(name, found, facts[name], gflops) for name in facts if name.startswith(net)
        ]
    return rows


def step_row(name: str, found: dict[str, Time], facts: dict[str, Any], peak: float) -> Row:
    """Put together the figures of one kind of step; `peak` in GFLOP/s."""
    ms, yardstick = found[name].ms, facts["yardstick_ms"]
    scaled = ms * peak / YARDSTICK_PEAK
    return {
        "name": name,
        "K/Q": facts["K/Q"],
        "ms": ms,
        "cpu_ms": found[name].cpu_ms,
        "GFLOP": facts["GFLOP"],
        "peak_share": 1e3 * facts["GFLOP"] / ms / peak,
        "outside_share": 1 - found[facts["floor"]].ms / ms,
        "outside_cpu_share": 1 - found[facts["floor"]].cpu_ms / found[name].cpu_ms,
        "ms_at_450": scaled,
        "yardstick_ms": yardstick,
        "speedup": yardstick and yardstick / scaled,
    }


def breakdown(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Measure the parts of a meta-step, each by itself, at full width and at the quickstart's."""
    rows: list[Row] = []
    full = (sizes.channels, sizes.hidden, sizes.outputs[0])
    for label, (channels, hidden, outputs) in {"full": full, "small": sizes.small}.items():
        cases: dict[str, Case] = {}
        for learner in ("meml",) if label == "full" else ("meml", "oml"):
            config = NetworkConfig(channels=channels, hidden=hidden)
            problem = make_problem(learner, np.full(outputs, 20), network=config)
            cases[f"{label} {learner} step"] = steps_case(problem, num_steps=1)
            cases[f"{label} {learner} gradient"] = lib.gradient_case(problem)
        support, query = (rows.mask.shape[1] for rows in lib.task_shapes(problem))
        cases |= {
            f"{label} FEN and CLN": lib.floor_case(problem, support + query),
            f"{label} outer update": lib.update_case(problem),
            f"{label} sampling": lib.sampling_case(problem),
        }
        found = interleave(cases, dataclasses.replace(rounds, seconds=rounds.seconds / 3))
        whole = found[f"{label} meml step"].ms
        rows += [
            {"name": name, "ms": t.ms, "cpu_ms": t.cpu_ms, "of_meml_step": t.ms / whole}
            for name, t in found.items()
        ]
    return rows


def stream(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Measure a step of the meta-test's stream, per run, with and without rehearsal."""
    num_classes, *outputs = sizes.stream
    every = 20
    settings = TestConfig(
        protocol="clean", runs=2, learning_rates=(1e-3,), trajectories=1, iid=False
    )
    steps = (settings.runs + settings.trajectories) * num_classes * settings.shots
    learner = LEARNERS["meml"]
    config = NetworkConfig(channels=sizes.channels, hidden=sizes.hidden)
    cases: dict[str, Case] = {}
    for width in outputs:
        network = make_network(config, learner, image_shape=(28, 28, 1), num_classes=width)
        params = jax.jit(network.init)(jax.random.key(0))
        features = jax.random.normal(jax.random.key(1), (width * every, network.num_features))
        table = TaskTable(
            jnp.arange(width * every, dtype=jnp.int32),
            every * jnp.arange(width, dtype=jnp.int32),
            jnp.full(width, every, jnp.int32),
        )
        pool = Pool(features, table)
        for name, reservoir in {"": None, ", reservoir": (500, 10)}.items():
            run = functools.partial(
                meta_test.sgd_point,
                jax.random.key(2),
                params,
                pool,
                pool,
                settings,
                network=network,
                num_classes=num_classes,
                reservoir=reservoir,
            )
            cases[f"{width} outputs{name}"] = Case(run, steps)
    found = interleave(cases, dataclasses.replace(rounds, seconds=rounds.seconds / 2))
    return [
        {
            "name": name,
            "ms": t.ms,
            "cpu_ms": t.cpu_ms,
            "protocol_minutes": t.ms * PROTOCOL_STEPS / 60e3,
            "yardstick_ms": None if "reservoir" in name else YARDSTICK_STREAM,
        }
        for name, t in found.items()
    ]


def encode(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Measure frozen features by how many images are encoded at a time: per image."""
    config, learner = NetworkConfig(channels=sizes.channels, hidden=sizes.hidden), LEARNERS["meml"]
    rows: list[Row] = []
    for net, image in ((OMNIGLOT, (28, 28, 1)), (MINI_IMAGENET, (84, 84, 3))):
        network = make_network(config, learner, image_shape=image, num_classes=2)
        params = jax.jit(network.init)(jax.random.key(0))
        images = np.random.default_rng(0).integers(0, 256, (sizes.encoded, *image), np.uint8)
        cases = {
            f"{net}, {chunk} at a time": Case(
                functools.partial(encoding.encode, params, images, network=network, chunk=chunk),
                sizes.encoded,
            )
            for chunk in sorted({1, min(chunks.size(), sizes.encoded), sizes.encoded})
        }
        found = interleave(cases, dataclasses.replace(rounds, seconds=rounds.seconds / 3))
        rows += [{"name": name, "ms": t.ms, "cpu_ms": t.cpu_ms} for name, t in found.items()]
    return rows


def growth(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Measure how a meta-step of a small network grows with each thing that can grow."""
    channels, hidden, outputs = sizes.small

    def grown(size=20, width=1, meta_batch=1, clusters=1, images=1) -> lib.Problem:
        return make_problem(
            "meml",
            np.full(outputs * clusters, size * images),
            network=NetworkConfig(channels=channels * width, hidden=hidden * width),
            meta_batch=meta_batch,
            task=TasksConfig(max_size=size),
        )

    def case(**what: int) -> Case:
        return steps_case(grown(**what), num_steps=10)

    cases = {
        "cluster size x 2": case(size=40),
        "width x 2": case(width=2),
        "meta-batch x 4": case(meta_batch=4),
        "clusters x 10": case(clusters=10),
        "images x 10": case(images=10),
    }
    problem = grown()
    calls = lib.jitted_steps(problem, steps_per_call=100)
    for name, per_call in {"base": 10, "steps a call / 10": 1, "steps a call x 10": 100}.items():
        own = problem._replace(state=jax.tree.map(jnp.array, problem.state))
        cases[name] = steps_case(own, num_steps=per_call, call=calls)
    found = interleave(cases, dataclasses.replace(rounds, seconds=rounds.seconds / 2))
    return [
        {"name": name, "ms": t.ms, "cpu_ms": t.cpu_ms, "ratio": t.ms / found["base"].ms}
        for name, t in found.items()
    ]


def start(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Measure the first call of a training: eight buckets, with what the compilation cache has."""
    rng = np.random.default_rng(0)
    clusters = np.clip(np.exp(rng.normal(np.log(17), 0.5, sizes.outputs[0])), 2, 64).astype(int)
    config = NetworkConfig(channels=sizes.channels, hidden=sizes.hidden)
    problem = make_problem("meml", clusters, network=config, task=TasksConfig())
    began = time.perf_counter()
    call = lib.jitted_steps(problem, steps_per_call=10)
    lowered = call.lower(problem.state, jnp.int32(1), *problem.data)
    traced = time.perf_counter()
    compiled = lowered.compile()
    ready = time.perf_counter()
    jax.block_until_ready(steps_case(problem, num_steps=10, call=compiled).run())
    return [
        {
            "name": f"meml, {len(problem.sampler.trims)} buckets",
            "trace_seconds": traced - began,
            "compile_seconds": ready - traced,
            "ten_steps_seconds": time.perf_counter() - ready,
        }
    ]


def kmeans(sizes: Sizes, rounds: Rounds) -> list[Row]:
    """Time the cluster stage on embeddings of noise, on which it does all its passes."""
    z = np.random.default_rng(0).standard_normal((sizes.rows, 64), np.float32)
    num_clusters = sizes.rows // 20
    config = ClusteringConfig(num_clusters=num_clusters, max_iter=10)
    began = time.perf_counter()
    clustering.cluster(z, config, seed=0)
    return [
        {
            "name": f"{sizes.rows} x 64, {num_clusters} clusters, 10 passes",
            "seconds": time.perf_counter() - began,
        }
    ]


PARTS: dict[str, Callable[[Sizes, Rounds], Sequence[Row]]] = {
    "peak": peak,
    "steps": steps,
    "breakdown": breakdown,
    "memory": benchmark_memory.memory,
    "stream": stream,
    "encode": encode,
    "growth": growth,
    "kmeans": kmeans,
    "start": start,
}
"""Parts that run in the program's own process."""
