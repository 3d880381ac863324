"""The reservoir is uniform, never too full, and replays only what came before."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import scipy.stats
from tiny import IMAGE, assert_close, assert_same, learner_of, network

from meml_jax import (
    checkpoints,
    feed,
    meta_train,
    metrics,
    rehearsal,
    task_spec,
    tasks,
    training,
    updates,
)
from meml_jax.config import InnerConfig, OuterConfig, TasksConfig, TrainConfig
from meml_jax.networks import reset_class_rows
from meml_jax.samplers import cluster_sampler
from meml_jax.types import Batch, UserError

STREAMS = 2000


def inclusion_p_value(insert, *, length: int, capacity: int) -> float:
    """Chi-square p-value that every position of a stream is kept equally often."""

    @jax.jit
    def counts(keys):
        def stream(key):
            def step(reservoir, item):
                return insert(jax.random.fold_in(key, item), reservoir, item), None

            items = jnp.arange(length, dtype=jnp.int32)
            return jax.lax.scan(step, rehearsal.init(capacity), items)[0].slots

        slots = jax.lax.map(stream, keys, batch_size=200)
        return jnp.zeros(length, jnp.int32).at[slots.reshape(-1)].add(1)

    found = np.asarray(counts(jax.random.split(jax.random.key(1), STREAMS)))
    assert found.sum() == STREAMS * capacity
    expected = STREAMS * capacity / length
    # Exactly `capacity` of `length` are kept, so a count varies less than a multinomial one.
    shrink = (1 - capacity / length) * length / (length - 1)
    statistic = np.sum((found - expected) ** 2 / expected) / shrink
    return float(scipy.stats.chi2.sf(statistic, length - 1))


LONG_STREAM = pytest.param(3000, 500, marks=pytest.mark.slow)


def window_rule(key, reservoir, item):
    """The released code's rule: any of the slots, whatever the number of items seen."""
    capacity = reservoir.slots.shape[0]
    full = jax.random.randint(key, (), 0, jnp.minimum(reservoir.seen, capacity) + 1)
    slot = jnp.where(reservoir.seen < capacity, reservoir.seen, full % capacity)
    return rehearsal.Reservoir(reservoir.slots.at[slot].set(item), reservoir.seen + 1)


# The short stream sees an error of one in the number of items, which long ones hide in their noise.
@pytest.mark.parametrize("length, capacity", [LONG_STREAM, (150, 10), (12, 4)])
def test_inclusion_is_uniform(length, capacity):
    assert inclusion_p_value(rehearsal.insert, length=length, capacity=capacity) > 1e-3


@pytest.mark.parametrize("length, capacity", [LONG_STREAM, (150, 10)])
def test_the_released_rule_is_not_uniform(length, capacity):
    assert inclusion_p_value(window_rule, length=length, capacity=capacity) < 1e-6


def test_the_first_items_are_all_kept():
    reservoir = rehearsal.init(7)
    for item in range(7):
        reservoir = rehearsal.insert(jax.random.key(item), reservoir, jnp.int32(item + 10))
        kept = set(np.asarray(reservoir.slots[: item + 1]).tolist())
        assert kept == {10 + i for i in range(item + 1)}
    assert reservoir.slots.shape == (7,)


@pytest.mark.parametrize("length, capacity, num", [(40, 6, 3), (5, 30, 4), (20, 2, 5)])
def test_replay_is_distinct_and_of_the_past(length, capacity, num):
    items, mask = rehearsal.replay_schedule(jax.random.key(0), length, capacity=capacity, num=num)
    assert items.shape == mask.shape == (length, num)
    for now in range(length):
        replayed = np.asarray(items[now])[np.asarray(mask[now])]
        assert len(replayed) == min(now, capacity, num)
        assert len(set(replayed.tolist())) == len(replayed)
        assert (replayed < now).all()


@pytest.mark.parametrize("capacity", [3, 40])
def test_items_offered_at_once_are_items_offered_in_turn(capacity):
    @jax.jit
    def at_once(keys, items, mask):
        def step(reservoir, batch):
            return rehearsal.insert_all(batch[0], reservoir, *batch[1:]), None

        return jax.lax.scan(
            step, rehearsal.init(capacity, np.zeros(2, np.int32)), (keys, items, mask)
        )[0]

    @jax.jit
    def in_turn(keys, items, mask):
        def step(reservoir, one):
            key, item, real = one
            offered = rehearsal.insert(key, reservoir, item)
            return jax.tree.map(lambda a, b: jnp.where(real, a, b), offered, reservoir), None

        every = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(6)))
        flat = every(keys).reshape(-1), items.reshape(-1, 2), mask.reshape(-1)
        return jax.lax.scan(step, rehearsal.init(capacity, np.zeros(2, np.int32)), flat)[0]

    rng = np.random.default_rng(0)
    for seed in range(20):
        items = jnp.asarray(rng.integers(1000, size=(4, 6, 2)), jnp.int32)
        mask = jnp.asarray(rng.random((4, 6)) < 0.7)
        keys = jax.random.split(jax.random.key(seed), 4)
        assert_same(at_once(keys, items, mask), in_turn(keys, items, mask))


# Rehearsal at meta-train, on 60 images in 5 clusters.
TRAIN = TrainConfig(
    steps=23, steps_per_call=5, log_every=7, checkpoint_every=11, validate_every=100
)
OUTER = OuterConfig(lr=1e-2, meta_batch=2)
KEY = jax.random.key(3)


@functools.cache
def problem(learner="oml", **settings):
    """(compiled call, fresh state, data, sampler) of a training whose S_query is a coreset."""
    config = TasksConfig(query_from="coreset", **settings)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, *IMAGE), np.uint8)
    labels = np.repeat(np.arange(5), (4, 7, 12, 17, 20))[rng.permutation(60)]
    table, kept = tasks.table_from_labels(labels, min_size=2)
    spec = task_spec.make_spec(config, table, kept)
    bounds = tasks.bucket_bounds(table, spec, num_buckets=1)
    sampler = cluster_sampler(spec, bounds, meta_batch=OUTER.meta_batch)
    net = network(learner)
    call = meta_train.make_train_call(
        network=net, learner=learner_of(learner), inner=InnerConfig(lr=0.1), outer=OUTER,
        sampler=sampler, steps_per_call=TRAIN.steps_per_call,
    )  # fmt: skip
    tx = meta_train.outer_optimizer(OUTER)
    init = functools.partial(
        meta_train.init_state, network=net, tx=tx, coreset_size=config.coreset_size
    )
    fresh = functools.partial(jax.jit(init), jax.random.key(0))
    data = (jnp.asarray(images), jax.tree.map(jnp.asarray, table), jnp.ones(5), KEY)
    return jax.jit(call), fresh, data, sampler


def own_images(table, steps):
    """All (position, cluster) that the tasks of the first steps hold, in any order."""
    seen = []
    for step in range(steps):
        cluster_key, *_ = meta_train.step_keys(KEY, step)
        for c in np.asarray(tasks.sample_clusters(cluster_key, table, OUTER.meta_batch)):
            rows = table.index[table.start[c] : table.start[c] + table.size[c]]
            seen += [(int(row), int(c)) for row in rows]
    return sorted(seen)


@pytest.mark.slow
def test_a_coreset_larger_than_all_that_was_seen_is_all_that_was_seen():
    call, fresh, data, _ = problem(coreset_size=400, coreset_batch=9)
    state, _ = call(fresh(), jnp.int32(4), *data)
    expected = own_images(data[1], 4)
    assert int(state.reservoir.seen) == len(expected) <= 400
    stored = np.asarray(state.reservoir.slots[: len(expected)])
    assert sorted(map(tuple, stored.tolist())) == expected


@pytest.mark.slow
def test_the_query_of_a_step_is_all_that_was_seen_before():
    """The second step by hand, its query rows being all images of the first step's clusters."""
    call, fresh, data, sampler = problem(coreset_size=80, coreset_batch=80)
    before, _ = call(fresh(), jnp.int32(1), *data)
    after, history = call(before, jnp.int32(1), *data)
    seen = jnp.asarray(own_images(data[1], 1), jnp.int32)

    @jax.jit  # one by one, the many small operations take long to compile
    def by_hand(before, images, table, weights, key):
        cluster_key, reset_key, task_key, *_ = meta_train.step_keys(key, 1)
        drawn, clusters, _ = sampler.draw(cluster_key, task_key, table, weights)
        rows = Batch(seen[:, 0], seen[:, 1], jnp.ones(len(seen), bool))
        query = jax.tree.map(lambda x: jnp.stack([x, x]), rows)
        params = reset_class_rows(reset_key, before.params, clusters, reset_bias=True)
        grads, info = meta_train.meta_grad(
            params, meta_train.gather_images(images, dataclasses.replace(drawn, query=query)),
            network=network("oml"), learner=learner_of("oml"), inner=InnerConfig(lr=0.1),
            outer=OUTER, ways=1,
        )  # fmt: skip
        start = dataclasses.replace(before, params=params, reservoir=after.reservoir)
        return updates.apply_gradients(start, grads, meta_train.outer_optimizer(OUTER)), info

    expected, info = by_hand(before, *data)
    np.testing.assert_allclose(history["loss"][0], info["loss"], rtol=1e-5)
    assert_close(after, expected, 1e-4)


@pytest.mark.slow
def test_the_first_step_has_nothing_to_replay_and_learns_nothing():
    call, fresh, data, _ = problem(coreset_size=400, coreset_batch=9)
    state, history = call(fresh(), jnp.int32(2), *data)
    spread = history.pop("logit_spread")
    assert np.isposinf(spread[0]) and np.isfinite(spread[1])  # no row: nothing can be told
    assert all(np.all(np.isfinite(values)) for values in history.values())
    assert float(history["loss"][0]) == 0 < float(history["loss"][1])
    alone, _ = call(fresh(), jnp.int32(1), *data)
    assert_same(alone.params["fen"], fresh().params["fen"])
    assert not np.array_equal(state.params["fen"]["kernel"], fresh().params["fen"]["kernel"])


@pytest.mark.slow
def test_views_of_images_are_not_stored():
    settings = {"balance": "augment", "balance_size": 10}
    call, fresh, data, _ = problem(coreset_size=400, coreset_batch=6, **settings)
    state, _ = call(fresh(), jnp.int32(3), *data)
    table = data[1]
    seen = 0
    for step in range(3):
        cluster_key, *_ = meta_train.step_keys(KEY, step)
        clusters = tasks.sample_clusters(cluster_key, table, 2)
        seen += int(jnp.minimum(table.size[clusters], 10).sum())
    assert int(state.reservoir.seen) == seen


def run(workdir, *stops, learner="meml"):
    """Train with a stop at each of these steps: the last state and what was recorded."""
    call, fresh, data, _ = problem(learner, coreset_size=30, coreset_batch=8)
    for steps in stops:
        training.train(
            call, fresh, data, dataclasses.replace(TRAIN, steps=steps), workdir=workdir,
            fingerprint="f", validate=None, report=lambda line: None,
        )  # fmt: skip
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, _ = checkpoints.restore(manager, jax.eval_shape(fresh))
    return state


@pytest.mark.slow
def test_a_resumed_training_with_a_coreset_is_the_uninterrupted_one(tmp_path):
    whole = run(tmp_path / "whole", 23)
    resumed = run(tmp_path / "resumed", 6, 14, 23)
    assert int(whole.reservoir.seen) > 30  # full, so that slots have been drawn
    assert_same(whole, resumed)


def test_a_training_without_a_coreset_stores_none():
    net, tx = network("meml"), meta_train.outer_optimizer(OUTER)
    init = functools.partial(meta_train.init_state, network=net, tx=tx)
    assert jax.eval_shape(init, jax.random.key(0)).reservoir is None


@pytest.mark.parametrize("batch, size", [(0, 10), (11, 10)])
def test_coreset_settings_are_checked(batch, size):
    with pytest.raises(UserError, match="tasks.coreset_batch=.*1 <= coreset_batch <= coreset_size"):
        problem(coreset_size=size, coreset_batch=batch)


def test_a_coreset_needs_the_images_on_the_device():
    _, _, data, sampler = problem(coreset_size=10, coreset_batch=5)
    with (
        pytest.raises(UserError, match="set train.images_on='device'"),
        feed.open_feed("host", data, sampler=sampler, train=TRAIN),
    ):
        pass


@pytest.mark.slow
def test_run_with_rehearsal_at_both_ends(tmp_path):
    fields = {
        "learner": "oml", "tasks__query_from": "coreset", "tasks__coreset_size": 200,
        "test__heads": "('sgd_reservoir',)", "train__steps": 20,
    }  # fmt: skip
    code, out, err = programs.run_here(tmp_path, **fields)
    assert code == 0, out + err
    results = programs.results(tmp_path)
    assert results["meta_test"]["head"] == "sgd_reservoir"
    assert results["config"]["tasks"]["query_from"] == "coreset"
    losses = [record["train/loss"] for record in metrics.read(tmp_path / "metrics.jsonl")
              if "train/loss" in record]  # fmt: skip
    assert losses and all(np.isfinite(losses))
