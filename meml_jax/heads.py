"""Heads that learn a whole stream on frozen features: the CLN by Adam, the nearest class mean."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from meml_jax import devices, film, pooling, rehearsal
from meml_jax.inner import inner_step, rows_loss
from meml_jax.keys import keys_of_run
from meml_jax.networks import Network, reset_class_rows
from meml_jax.orders import random_order
from meml_jax.trajectories import Trajectory, pad
from meml_jax.types import Array, Batch, Params

CACHE_BYTES = 8 * 2**20  # of a CPU, what runs that are vectorised may fill
MOST_RUNS = 50
HEADS = ("sgd", "sgd_reservoir", "prototype")


class Outcome(NamedTuple):
    """Which images were classified correctly.

    Attributes:
      test: bool [n * queries] (generalisation).
      stream: bool [n * shots], after the whole stream (forgetting).
    """

    test: Array
    stream: Array


def learn_stream(
    params: Params,
    features: Array,
    label: Array,
    replay: tuple[Array, Array],
    *,
    network: Network,
    learning_rate: Array | float,
    length: Array | int | None = None,
) -> Params:
    """Learn a stream of single images with Adam on the CLN, the representation frozen.

    A stream step is an inner step of the one mechanism (`inner_step`) with Adam in place of SGD.
    Its loss is the mean cross-entropy of the new image and of the images replayed with it.

    Those roles of FiLM layers that are fast learn too (supplement, FiLM Layers). Where the class of
    the new image differs from the one before, context and its Adam state start at 0 again.

    Args:
      params: parameters whose output layer has been reset.
      features: float32 [T, D] in order of arrival; with FiLM layers, what lies before them: the
        fifth convolution (`network.stem`) [T, H, W, channels].
      label: int32 [T].
      replay: (positions in the stream int32 [T, M], mask bool [T, M]), M = 0 without rehearsal.
      network: pure functions; with FiLM layers `networks.after_stem`.
      learning_rate: Adam's.
      length: [], images that the stream has, at most T, what follows is padding; None: all T. It
        is no shape, so that streams of any length run the same program.

    Returns:
      Parameters after the stream, of which `network.stream_roles` have changed. The context is 0:
      images to classify belong to no known class, so no class's context can serve them.

    Differs from the paper: it does not say which context classifies test images.
    """
    end = jnp.asarray(len(label) if length is None else length, jnp.int32)
    rows = jnp.concatenate([jnp.arange(len(label))[:, None], replay[0]], axis=1)
    mask = jnp.concatenate([jnp.ones((len(label), 1), bool), replay[1]], axis=1)
    batches, fresh = Batch(rows, label[rows], mask), film.starts_class(label)
    tx = film.adam_by_role(learning_rate, network.stream_roles)

    def loss_fn(fast: Params, batch: Batch) -> tuple[Array, Array]:
        return rows_loss(params | fast, batch, network=network)

    def step(t: Array, carry: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
        batch = jax.tree.map(lambda x: x[t], batches)
        batch = dataclasses.replace(batch, inputs=features[batch.inputs])
        return inner_step(loss_fn, film.reset_context(carry, fresh[t]), batch, tx)[0]

    fast = {role: params[role] for role in network.stream_roles}
    fast, _ = lax.fori_loop(0, end, step, (fast, tx.init(fast)))
    return params | film.reset_context(fast, True)


def sgd_outcomes(
    params: Params,
    features: Array,
    trajectories: Trajectory,
    keys: Array,
    learning_rates: Array | np.ndarray,
    *,
    network: Network,
    shuffled: bool,
    reservoir: tuple[int, int] | None,
    runs_at_once: int,
    longest: int | None = None,
) -> Outcome:
    """Run the sgd head on R trajectories, each with its own learning rate and initial output layer.

    Args:
      params: meta-trained parameters with an output layer of the width wanted.
      features: float32 [N, D] of a pool.
      trajectories: leaves with leading [R].
      keys: [R] random keys: initial rows, order where shuffled, reservoir.
      learning_rates: float32 [R].
      network: pure functions for that output layer.
      shuffled: present the stream in random order instead of class order (an oracle).
      reservoir: (capacity, images replayed a step), None without rehearsal.
      runs_at_once: runs that are vectorised, on each device of this process, which share the runs;
        bounds memory.
      longest: classes that trajectories are padded to, so that all of them run the same program;
        None: those that they have.

    Returns:
      Outcome with leading [R].
    """
    padded = trajectories if longest is None else pad(trajectories, longest)
    length = jnp.asarray(trajectories.stream.shape[1], jnp.int32)
    xs = (padded, keys, learning_rates)
    count, mesh = len(keys), devices.test_mesh()
    if mesh is not None:
        runs_at_once = mesh.size * min(runs_at_once, -(-count // mesh.size))
    params, features, length = devices.replicate((params, features, length), mesh)
    outcomes = []
    for start in range(0, count, runs_at_once):
        # The last runs are repeated to fill the chunk, so that any R runs the same program.
        rows = np.minimum(np.arange(start, start + runs_at_once), count - 1)
        chunk = devices.split(jax.tree.map(lambda x, rows=rows: x[rows], xs), mesh)
        outcomes.append(
            _sgd_chunk(
                params, features, *chunk, length, shuffled, network=network, reservoir=reservoir
            )
        )
    every = jax.tree.map(lambda *x: np.concatenate(x)[:count], *outcomes)
    return _unpadded(every, trajectories)


def _unpadded(outcome: Outcome, trajectories: Trajectory) -> Outcome:
    tests, length = trajectories.test.shape[1], trajectories.stream.shape[1]
    return Outcome(outcome.test[:, :tests], outcome.stream[:, :length])


@functools.partial(jax.jit, static_argnames=("network", "reservoir"))
def _sgd_chunk(
    params: Params,
    features: Array,
    trajectories: Trajectory,
    keys: Array,
    learning_rates: Array,
    length: Array,
    shuffled: Array | bool,
    *,
    network: Network,
    reservoir: tuple[int, int] | None,
) -> Outcome:
    """Learn and judge some runs side by side."""

    def run(trajectory: Trajectory, key: Array, learning_rate: Array) -> Outcome:
        own = keys_of_run(key)
        everything = jnp.arange(network.num_classes)
        start = reset_class_rows(own.outputs, params, everything, reset_bias=True)
        rows = jnp.arange(len(trajectory.stream))
        order = jnp.where(shuffled, random_order(own.order, length, len(rows)), rows)
        stream, label = features[trajectory.stream[order]], trajectory.stream_label[order]
        if reservoir is None:
            replay = jnp.zeros((len(rows), 0), jnp.int32), jnp.zeros((len(rows), 0), bool)
        else:
            capacity, num = reservoir
            replay = rehearsal.replay_schedule(
                own.reservoir, len(rows), capacity=capacity, num=num, length=length
            )
        learned = learn_stream(
            start,
            stream,
            label,
            replay,
            network=network,
            learning_rate=learning_rate,
            length=length,
        )

        def correct(x: Array, label: Array) -> Array:
            return jnp.argmax(network.classify(learned, x), axis=-1) == label

        return Outcome(
            correct(features[trajectory.test], trajectory.test_label), correct(stream, label)
        )

    runs = (trajectories, keys, learning_rates)
    if len(keys) > 1:
        return jax.vmap(run)(*runs)
    # Not a batch of one, which would make each matmul a batched one, without a fast routine on a
    # CPU: at full width with 11 rows a step 7 ms against 1.6.
    return jax.tree.map(lambda x: x[None], run(*jax.tree.map(lambda x: x[0], runs)))


def prototype_outcomes(
    features: Array,
    trajectories: Trajectory,
    *,
    num_classes: int,
    runs_at_once: int,
    longest: int | None = None,
) -> Outcome:
    """Classify by the nearest class mean of frozen features (Euclidean distance).

    Args:
      features: float32 [N, D] of a pool.
      trajectories: leaves with leading [R].
      num_classes: n.
      runs_at_once: runs that are vectorised.
      longest: as in `sgd_outcomes`.

    Returns:
      Outcome with leading [R].
    """
    longest = longest or num_classes
    outcome = _prototype_outcomes(
        features,
        pad(trajectories, longest),
        jnp.asarray(num_classes, jnp.int32),
        longest=longest,
        runs_at_once=runs_at_once,
    )
    return _unpadded(jax.tree.map(np.asarray, outcome), trajectories)


@functools.partial(jax.jit, static_argnames=("longest", "runs_at_once"))
def _prototype_outcomes(
    features: Array,
    trajectories: Trajectory,
    num_classes: Array,
    *,
    longest: int,
    runs_at_once: int,
) -> Outcome:
    """Compare with the means of the first `num_classes` of `longest` classes."""
    padding = jnp.arange(longest)[None] >= num_classes

    def run(trajectory: Trajectory) -> Outcome:
        stream = features[trajectory.stream]
        means = stream.reshape(longest, -1, stream.shape[-1]).mean(axis=1)

        def predict(x: Array) -> Array:
            distances = pooling.square_distances(x, means)
            return jnp.argmin(jnp.where(padding, jnp.inf, distances), axis=1)

        return Outcome(
            predict(features[trajectory.test]) == trajectory.test_label,
            predict(stream) == trajectory.stream_label,
        )

    return lax.map(run, trajectories, batch_size=runs_at_once)


def runs_that_fit(bytes_of_run: int, *, rows: int = 1) -> int:
    """Count the runs to vectorise, at most 50: what a CPU's cache, an accelerator's memory holds.

    A small network's step costs more to launch than to compute, so runs share the launch; the
    weights and Adam moments of a big one come from the cache only while few runs are under way.
    Steps on several `rows` run one by one on a CPU, whose batched matmuls are slow.
    """
    if jax.default_backend() == "cpu":
        return 1 if rows > 1 else max(1, min(MOST_RUNS, CACHE_BYTES // bytes_of_run))
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    # A quarter of the memory, as what is computed from a run's inputs is a few times as large.
    return max(1, min(MOST_RUNS, memory // (4 * bytes_of_run))) if memory else MOST_RUNS
