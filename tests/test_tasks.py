"""Tasks: what is split how, what is drawn how often, what padding may not change."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from meml_jax import task_spec, tasks
from meml_jax.config import TasksConfig
from meml_jax.types import TaskTable, UserError

PARTITION = (1, 2, 3, 9, 10, 500)


def labels_of(sizes) -> np.ndarray:
    """Label c for sizes[c] images, in mixed order; every other label is left out."""
    labels = np.repeat(2 * np.arange(len(sizes)), sizes)
    return np.random.default_rng(0).permutation(labels)


def make(sizes, **settings):
    """(table on the device, kept labels, spec, largest number of images used)."""
    config = TasksConfig(**settings)
    table, kept = tasks.table_from_labels(labels_of(sizes), min_size=config.min_size)
    spec = task_spec.make_spec(config, table, kept)
    bound = int(tasks.bucket_bounds(table, spec, num_buckets=1)[-1])
    return jax.tree.map(jnp.asarray, table), kept, spec, bound


@functools.partial(jax.jit, static_argnames=("spec", "bound"))
def _draw(keys, table, clusters, *, spec, bound):
    sample = functools.partial(tasks.sample_task, spec=spec, bound=bound)
    return jax.vmap(sample, in_axes=(0, None, 0, 0))(keys, table, clusters, jnp.ones(len(clusters)))


def draw(table, spec, bound, clusters, seed=0):
    """One task for each of the clusters, leaves with a leading axis."""
    keys = jax.random.split(jax.random.key(seed), len(clusters))
    clusters = jnp.asarray(clusters, jnp.int32)
    return jax.tree.map(np.asarray, _draw(keys, table, clusters, spec=spec, bound=bound))


def test_table_groups_positions_and_drops_small_clusters():
    labels = labels_of(PARTITION)
    table, kept = tasks.table_from_labels(labels, min_size=3)
    np.testing.assert_array_equal(table.size, [3, 9, 10, 500])
    np.testing.assert_array_equal(kept, [4, 6, 8, 10])
    for c, label in enumerate(kept):
        rows = table.index[table.start[c] : table.start[c] + table.size[c]]
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(labels == label))


def test_a_label_that_nothing_has_gets_an_empty_row():
    table = tasks.group_positions(np.array([2, 0, 2, -1, 5, 2]), np.arange(4))
    np.testing.assert_array_equal(table.size, [1, 0, 3, 0])
    np.testing.assert_array_equal(table.start, [0, 1, 1, 4])
    np.testing.assert_array_equal(table.index, [1, 0, 2, 5])
    assert all(x.dtype == np.int32 for x in (table.index, table.start, table.size))


@pytest.mark.parametrize("min_size", [1, 0, 11])
def test_table_refuses(min_size):
    with pytest.raises(UserError, match="tasks.min_size"):
        tasks.table_from_labels(labels_of((9, 10, 11)), min_size=min_size)


@pytest.mark.parametrize(
    "usable, size, support, own",
    [
        (1.0, 2, 1, 1), (1.0, 3, 2, 1), (1.0, 20, 13, 7), (1.0, 200, 133, 67),
        (0.75, 10, 4, 3), (0.75, 20, 10, 5), (0.75, 30, 14, 8),
    ],
)  # fmt: skip
def test_counts(usable, size, support, own):
    _, _, spec, _ = make((20, 20, 20), usable_fraction=usable)
    assert task_spec.task_counts(np.asarray(size), spec) == (support, own)
    on_device = task_spec.task_counts(jnp.asarray(size), spec)
    assert tuple(map(int, on_device)) == (support, own)


def test_odd_partition():
    table, _, spec, bound = make(PARTITION)
    clusters = np.arange(2000) % len(table.size)
    drawn = draw(table, spec, bound, clusters)
    owner = np.zeros(sum(PARTITION), int)
    for c in range(len(table.size)):
        owner[np.asarray(table.index[table.start[c] : table.start[c] + table.size[c]])] = c
    queried = set()
    random_rows = slice(-spec.num_random_query, None)
    for i, cluster in enumerate(clusters):
        support = drawn.support.inputs[i][drawn.support.mask[i]]
        own = drawn.query.inputs[i][: -spec.num_random_query]
        own = own[drawn.query.mask[i][: -spec.num_random_query]]
        other = drawn.query.inputs[i][random_rows]
        assert len(support) >= 1 and len(own) >= 1
        assert len(support) + len(own) == table.size[cluster]  # all of it, each image once
        assert len(set(support) | set(own)) == len(support) + len(own)
        assert set(owner[support]) | set(owner[own]) == {cluster}
        assert len(set(other)) == len(other)
        np.testing.assert_array_equal(owner[other], drawn.query.label[i][random_rows])
        assert cluster not in owner[other]
        queried |= set(owner[other])
    assert drawn.query.mask[:, random_rows].all()
    assert queried == set(range(len(table.size)))


def test_random_query_is_uniform_over_images_of_other_clusters():
    table, _, spec, bound = make((5, 15, 30))
    drawn = draw(table, spec, bound, np.ones(4000))
    other = drawn.query.inputs[:, -spec.num_random_query :]
    found = np.bincount(other.reshape(-1), minlength=50)
    own = np.asarray(table.index[5:20])
    assert found[own].sum() == 0
    found = np.delete(found, own)
    expected = found.sum() / 35
    # 10 of 35 without replacement vary less than a multinomial count.
    statistic = np.sum((found - expected) ** 2 / expected) / (1 - 10 / 35)
    assert scipy.stats.chi2.sf(statistic, 34) > 1e-3


def test_released_query_never_reaches_ids_above_the_number_kept():
    sizes = (20, 3, 20, 20, 3, 20)  # labels 0, 2, ..., 10; kept are 0, 4, 6, 10
    table, kept, spec, bound = make(sizes, min_size=10, query_from="all")
    np.testing.assert_array_equal(kept, [0, 4, 6, 10])
    drawn = draw(table, spec, bound, np.arange(400) % 4)
    reached = set(drawn.query.label[:, -spec.num_random_query :].reshape(-1).tolist())
    assert reached == {0}  # only label 0 is below 4, the number kept


def own_images(drawn, spec):
    """Images of the own cluster, over all draws: support, then query."""
    own = slice(None, -spec.num_random_query)
    query = drawn.query.inputs[:, own][drawn.query.mask[:, own]]
    return np.concatenate([drawn.support.inputs[drawn.support.mask], query])


def test_only_the_usable_share_of_a_cluster_is_used():
    table, _, spec, bound = make((20, 20, 20), usable_fraction=0.75, query_from="all")
    drawn = draw(table, spec, bound, np.ones(200))
    assert set(own_images(drawn, spec)) == set(np.asarray(table.index[20:35]))


def test_a_task_of_few_images_may_use_any_of_the_cluster():
    table, _, spec, bound = make((40, 5, 20), max_size=6)
    assert bound == 6
    drawn = draw(table, spec, bound, np.zeros(300))
    assert drawn.support.mask.sum(axis=1).tolist() == [4] * 300
    assert set(own_images(drawn, spec)) == set(np.asarray(table.index[:40]))


def test_used_images_in_proportion_to_the_size():
    sizes = (2, 5, 20, 80, 300)
    _, _, spec, _ = make(sizes, min_used=4, max_size=20)
    used = sum(task_spec.task_counts(np.array(sizes), spec))
    # 12, the middle of 4 and 20, for a cluster of mean size, 81.4.
    np.testing.assert_array_equal(used, [2, 4, 4, 11, 20])


def test_a_small_share_of_large_clusters_is_no_smaller():
    """Of clusters of 50,000 images on average, 12: no rounding to thousandths, which gives 0."""
    sizes = np.array([40_000, 60_000])
    table = TaskTable(np.arange(100_000, dtype=np.int32), np.array([0, 40_000]), sizes)
    spec = task_spec.make_spec(TasksConfig(min_used=4, max_size=20), table, np.arange(2))
    for xp in (np, jnp):
        used = sum(task_spec.task_counts(xp.asarray(sizes, np.int32), spec))
        np.testing.assert_array_equal(used, [9, 14])


def test_clusters_are_drawn_alike_whatever_their_size():
    table, _, _, _ = make(PARTITION)
    drawn = tasks.sample_clusters(jax.random.key(0), table, 5000)
    counts = np.bincount(np.asarray(drawn), minlength=len(table.size))
    assert len(counts) == len(table.size)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_a_task_is_a_function_of_its_key_and_keys_differ():
    table, _, spec, bound = make((30, 30, 30))
    first, again, other = (draw(table, spec, bound, np.zeros(50), seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    supports = {tuple(rows) for d in (first, other) for rows in d.support.inputs}
    assert len(supports) == 100


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 9])
def test_bounds_waste_least(num_buckets):
    sizes = (2, 2, 3, 5, 8, 8, 8, 13, 21)
    table, _, spec, _ = make(sizes)
    bounds = tasks.bucket_bounds(table, spec, num_buckets=num_buckets)
    used = np.sort(sizes)

    def waste(choice):
        choice = np.asarray(sorted(choice))
        return (choice[np.searchsorted(choice, used)] - used).sum()

    distinct = sorted(set(sizes))
    best = min(
        waste((*chosen, 21))
        for n in range(min(num_buckets, len(distinct)))
        for chosen in itertools.combinations(distinct[:-1], n)
    )
    assert len(bounds) <= num_buckets and bounds[-1] == 21
    assert waste(bounds) == best


@pytest.mark.parametrize("size, cropped", [(2, 2), (7, 9), (20, 20), (20, 33)])
def test_cropping_drops_padding_only(size, cropped):
    table, _, spec, bound = make((size, 40, 40))
    task = jax.tree.map(lambda x: x[0], draw(table, spec, bound, [0]))
    small = tasks.trim_padding(task, spec=spec, bound=bound, trimmed=cropped)
    for name in ("support", "query"):
        whole, part = getattr(task, name), getattr(small, name)
        np.testing.assert_array_equal(
            np.asarray(part.inputs)[np.asarray(part.mask)], whole.inputs[whole.mask]
        )
        np.testing.assert_array_equal(
            np.asarray(part.label)[np.asarray(part.mask)], whole.label[whole.mask]
        )
    assert len(small.support.mask) + len(small.query.mask) == cropped + spec.num_random_query


@pytest.mark.parametrize(
    "field, value",
    [
        ("query_from", "elsewhere"), ("balance", "maybe"), ("support_fraction", 0.0),
        ("usable_fraction", 1.5), ("max_size", 1), ("num_random_query", 1000),
    ],
)  # fmt: skip
def test_settings_are_checked(field, value):
    with pytest.raises(UserError, match=f"tasks.{field}"):
        make((20, 20, 20), **{field: value})
