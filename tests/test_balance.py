"""Balancing: what it makes equal, what it may not change, and where it does nothing."""

from __future__ import annotations

import dataclasses
import functools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import scipy.stats
from tiny import IMAGE, assert_close, assert_same, learner_of, network

from meml_jax import balance, clustering, losses, meta_train, paper, task_spec, tasks
from meml_jax.config import Config, InnerConfig, OuterConfig, TasksConfig
from meml_jax.data import datasets
from meml_jax.samplers import cluster_sampler
from meml_jax.settings import from_dict, override
from meml_jax.types import UserError

SIZES = (2, 3, 8, 12, 30)


def table_of(sizes, **settings):
    """(config, clusters on the host, their labels) for images in mixed order."""
    config = TasksConfig(**settings)
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return config, *tasks.table_from_labels(labels, min_size=config.min_size)


def rows_of(table, c):
    return table.index[table.start[c] : table.start[c] + table.size[c]].tolist()


def test_truncated_clusters_have_n_of_their_own_images():
    config, table, kept = table_of(SIZES, balance="truncate", balance_size=8)
    equal, left = balance.balance_table(config, table, kept, seed=0)
    np.testing.assert_array_equal(left, [2, 3, 4])
    np.testing.assert_array_equal(equal.size, [8, 8, 8])
    for c, label in enumerate(left):
        chosen, whole = rows_of(equal, c), rows_of(table, label)
        assert len(set(chosen)) == 8
        assert [row for row in whole if row in set(chosen)] == chosen  # in the order they had
    again, _ = balance.balance_table(config, table, kept, seed=0)
    other, _ = balance.balance_table(config, table, kept, seed=1)
    np.testing.assert_array_equal(again.index, equal.index)
    assert not np.array_equal(other.index, equal.index)


def test_truncation_keeps_every_image_equally_often():
    config, table, kept = table_of((12, 4, 4), balance="truncate", balance_size=4)
    found = np.zeros(20, int)
    for seed in range(600):
        equal, _ = balance.balance_table(config, table, kept, seed=seed)
        found[equal.index] += 1
    counts = found[rows_of(table, 0)]
    assert counts.sum() == 600 * 4
    # 4 of 12 without replacement vary less than a multinomial count.
    statistic = np.sum((counts - 200) ** 2 / 200) / ((1 - 4 / 12) * 12 / 11)
    assert scipy.stats.chi2.sf(statistic, 11) > 1e-3


def test_truncation_to_the_size_that_all_have_changes_nothing():
    config, table, kept = table_of((7, 7, 7), balance="truncate", balance_size=7)
    assert_same(balance.balance_table(config, table, kept, seed=0), (table, kept))


@pytest.mark.parametrize("name", ["none", "augment", "loss"])
def test_other_ways_leave_the_clusters_alone(name):
    config, table, kept = table_of(SIZES, balance=name, balance_size=8)
    assert balance.balance_table(config, table, kept, seed=0) == (table, kept)


def test_weights_are_gamma_where_asked_for():
    size = jnp.asarray(SIZES)
    for name in ("none", "truncate", "augment"):
        weights = balance.task_weights(TasksConfig(balance=name), size)
        np.testing.assert_array_equal(weights, np.ones(5, np.float32))
    weights = balance.task_weights(TasksConfig(balance="loss"), size)
    np.testing.assert_array_equal(weights, losses.gamma(size))


def augmented(sizes, count=400, **settings):
    """Tasks drawn from clusters that are refilled to 8: (table, drawn, cluster of each)."""
    config, table, kept = table_of(
        sizes, balance="augment", balance_size=8, num_random_query=3, **settings
    )
    spec = task_spec.make_spec(config, table, kept)
    bounds = tasks.bucket_bounds(table, spec, num_buckets=5)
    np.testing.assert_array_equal(bounds, [8])
    clusters = jnp.arange(count) % len(sizes)
    sample = jax.vmap(
        functools.partial(tasks.sample_task, spec=spec, bound=8), in_axes=(0, None, 0, 0)
    )
    keys = jax.random.split(jax.random.key(0), count)
    drawn = jax.jit(sample)(keys, jax.tree.map(jnp.asarray, table), clusters, jnp.ones(count))
    return table, jax.tree.map(np.asarray, drawn), np.asarray(clusters)


def test_refilled_tasks_have_n_rows_from_their_own_half():
    table, drawn, clusters = augmented(SIZES)
    assert drawn.support.mask.shape == (400, 5) and drawn.query.mask.shape == (400, 3 + 3)
    assert drawn.support.mask.all() and drawn.query.mask.all()
    assert not drawn.query.altered[:, 3:].any()
    again = set()
    for i, cluster in enumerate(clusters):
        own = rows_of(table, cluster)
        support, query = drawn.support.inputs[i], drawn.query.inputs[i][:3]
        altered = drawn.support.altered[i], drawn.query.altered[i][:3]
        images = [*support[~altered[0]], *query[~altered[1]]]
        assert len(set(images)) == len(images) == min(len(own), 8)  # each image once as it is
        assert set(images) <= set(own) and not set(support) & set(query)
        assert set(support[altered[0]]) <= set(support[~altered[0]])
        assert set(query[altered[1]]) <= set(query[~altered[1]])
        assert set(drawn.query.label[i][:3]) == {cluster} == set(drawn.support.label[i])
        again |= {(cluster, row) for row in support[altered[0]]}
    small = {(c, row) for c in (0, 1) for row in rows_of(table, c)}
    assert again == small  # any image of a small cluster, none of a large one


def test_large_clusters_give_the_tasks_of_n_images():
    _, drawn, clusters = augmented((8, 20, 30))
    config, table, kept = table_of((8, 20, 30), max_size=8, num_random_query=3)
    spec = task_spec.make_spec(config, table, kept)
    sample = jax.vmap(
        functools.partial(tasks.sample_task, spec=spec, bound=8), in_axes=(0, None, 0, 0)
    )
    keys = jax.random.split(jax.random.key(0), 400)
    plain = jax.jit(sample)(
        keys, jax.tree.map(jnp.asarray, table), jnp.asarray(clusters), jnp.ones(400)
    )
    assert not drawn.support.altered.any() and not drawn.query.altered.any()
    for name in ("support", "query"):
        ours = dataclasses.replace(getattr(drawn, name), altered=None)
        assert_same(ours, getattr(plain, name))


@pytest.mark.slow
def test_views_follow_the_key_and_leave_images_alone():
    _, drawn, _ = augmented(SIZES, count=5)
    images = jnp.asarray(np.random.default_rng(1).integers(0, 256, (55, 8, 8, 1)), jnp.uint8)
    batch = meta_train.gather_images(images, jax.tree.map(jnp.asarray, drawn))
    refill = jax.jit(balance.refill)
    one, again, other = (refill(jax.random.key(seed), batch) for seed in (0, 0, 1))
    assert_same(one, again)
    for name in ("support", "query"):
        before, after, changed = (getattr(x, name) for x in (batch, one, other))
        altered = np.asarray(before.altered)
        assert altered.any() and not altered.all()
        np.testing.assert_array_equal(after.inputs[~altered], before.inputs[~altered])
        np.testing.assert_array_equal(after.mask, before.mask)
        for x in (before, changed):
            differ = np.abs(np.asarray(after.inputs - x.inputs))[altered].max(axis=(1, 2, 3))
            assert np.mean(differ > 0.01) > 0.8  # a view may have no part at all
        assert after.altered is None


@functools.cache
def compiled(spec):
    """(compiled call of 4 meta-steps, fresh state) for tasks of one padded size."""
    net, outer = network("meml"), OuterConfig(lr=1e-2, meta_batch=2)
    call = meta_train.make_train_call(
        network=net, learner=learner_of("meml"), inner=InnerConfig(lr=0.1), outer=outer,
        sampler=cluster_sampler(spec, np.array([6]), meta_batch=2), steps_per_call=4,
    )  # fmt: skip
    init = functools.partial(
        meta_train.init_state, network=net, tx=meta_train.outer_optimizer(outer)
    )
    return jax.jit(call), jax.jit(init)(jax.random.key(0))


def train(**settings):
    """State after a few meta-steps on three clusters of 6 images, and what was recorded."""
    config, table, kept = table_of((6, 6, 6), num_random_query=4, **settings)
    table, kept = balance.balance_table(config, table, kept, seed=0)
    call, state = compiled(task_spec.make_spec(config, table, kept))
    images = np.random.default_rng(0).integers(0, 256, (18, *IMAGE), np.uint8)
    weights = balance.task_weights(config, jnp.asarray(table.size))
    data = (jnp.asarray(images), jax.tree.map(jnp.asarray, table), weights, jax.random.key(1))
    return call(state, jnp.int32(4), *data)


def without_score_bias(tree):
    """Set to 0 what belongs to the bias of the attention score.

    The softmax cancels it: its gradient is rounding, of which Adam makes whole steps.
    """

    def keep(path, leaf):
        own = "['attention']['output']['bias']" in jax.tree_util.keystr(path)
        return jnp.zeros_like(leaf) if own else leaf

    return jax.tree_util.tree_map_with_path(keep, tree)


@pytest.mark.slow
def test_on_equal_clusters_every_balancing_is_the_unbalanced_training():
    plain = train()
    assert_same(train(balance="loss"), plain)
    assert_same(train(balance="truncate", balance_size=6), plain)
    augmented = train(balance="augment", balance_size=6)  # another program, rounded otherwise
    assert_close(without_score_bias(augmented), without_score_bias(plain), tolerance=1e-5)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"balance": "maybe"}, "tasks.balance='maybe', expected one of"),
        ({"balance": "truncate", "balance_size": 1}, "tasks.balance_size=1, expected at least 2"),
        ({"balance": "augment", "balance_size": 1}, "tasks.balance_size=1, expected at least 2"),
        ({"balance": "truncate", "balance_size": 13}, "1 clusters of at least tasks.balance_size"),
        ({"balance": "augment", "max_size": 9}, "tasks.max_size=9, tasks.min_used=None, expected"),
    ],
)
def test_settings_are_checked(settings, message):
    config, table, kept = table_of(SIZES, num_random_query=1, **settings)
    with pytest.raises(UserError, match=message):
        balance.balance_table(config, table, kept, seed=0)


@pytest.mark.parametrize(
    "presets, rows",
    [
        ("oml,balanced500", {"OML balanced 500"}),
        ("oml,balanced1100", set()),  # not in the paper's table
        ("oml,balancing", {"OML balancing param"}),
        ("oml,augmentation", {"OML augmentation"}),
        ("oml,oracle", {"Oracle OML"}),
        ("oracle", {"Oracle MEML"}),
        ("oml,coreset500", {"OML RS both"}),
        ("coreset500", {"MEML RS both"}),
    ],
)
def test_a_row_of_the_paper_is_a_preset(presets, rows):
    path = programs.ROOT / "configs" / "omniglot.py"
    config = from_dict(runpy.run_path(str(path))["get_config"](presets).to_dict())
    assert set(paper.rows_beside(config, "omniglot")) == rows


@pytest.mark.parametrize("learner", ["oml", "meml"])
def test_a_row_of_the_paper_has_its_coreset_of_500(learner):
    for size in (200, 500, 1000):
        fields = {"learner": learner, "tasks.query_from": "coreset", "tasks.coreset_size": size}
        rows = paper.rows_beside(override(Config(), fields), "omniglot")
        assert set(rows) == ({f"{learner.upper()} RS both"} if size == 500 else set())


@pytest.mark.parametrize("learner, row", [("oml", "Oracle OML"), ("oml_film", "Oracle OML FiLM")])
def test_a_row_of_the_paper_that_is_tested_on_another_set(learner, row):
    config = override(Config(), {"learner": learner, "tasks.labels": "true"})
    assert set(paper.rows_beside(config, "omniglot_cifar100")) == {f"{row} Omniglot"}


# Each option once through the whole program, on generated characters.
SMOKE = {"train__steps": 20, "test__heads": "('sgd',)"}


def smoke(workdir, **fields):
    code, out, err = programs.run_here(workdir, **SMOKE, **fields)
    assert code == 0, out + err
    return out, programs.results(workdir)


@pytest.mark.slow
def test_run_with_truncated_clusters(tmp_path):
    fields = {"tasks__balance": "truncate", "tasks__balance_size": 30, "learner": "oml"}
    out, results = smoke(tmp_path, **fields)
    clusters = results["clustering"]
    assert clusters["size_min"] == clusters["size_max"] == 30
    assert clusters["kept"] + clusters["dropped"] == 12 and clusters["dropped"] > 0
    assert clusters["images"] == 30 * clusters["kept"]
    assert f"{clusters['dropped']} dropped (under 30 images)" in out
    with np.load(tmp_path / "tasks.npz") as stored:
        train = datasets.load(programs.stored_config(tmp_path).data, report=lambda line: None).train
        true, own = (labels[stored["index"]] for labels in (train.labels, stored["labels"]))
        everything = clustering.agreement(train.labels, stored["labels"])
    of_kept = clustering.agreement(true, own)
    assert {name: clusters[name] for name in of_kept} == of_kept != everything
    assert "tasks.balance`: truncate" in (tmp_path / "report.md").read_text()
    code, out, _ = programs.run_here(tmp_path, **SMOKE, **fields)
    assert code == 0 and "cluster: reuses" in out


@pytest.mark.slow
def test_run_with_refilled_clusters(tmp_path):
    out, results = smoke(tmp_path, tasks__balance="augment", tasks__balance_size=40)
    assert "padded sizes [40]" in out
    assert results["clustering"]["size_min"] < 40


@pytest.mark.slow
def test_run_with_gamma(tmp_path):
    smoke(tmp_path / "gamma", tasks__balance="loss")
    programs.succeed(tmp_path / "plain", "--stage=train", call=programs.run_here, **SMOKE)
    losses = [
        [record["train/loss"] for record in programs.records(workdir) if "train/loss" in record]
        for workdir in (tmp_path / "gamma", tmp_path / "plain")
    ]
    assert losses[0] and losses[0] != losses[1]


@pytest.mark.slow
def test_run_of_an_oracle_needs_no_embedding(tmp_path):
    out, results = smoke(tmp_path, tasks__labels="true", learner="oml")
    assert "embed: not needed" in out and not (tmp_path / "embeddings.npz").exists()
    assert results["oracle"] is True and results["embedding"] is None
    assert results["clustering"]["labels"] == "true" and results["clustering"]["purity"] == 1.0
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# oracle oml on glyphs") and "from: true labels (oracle)" in text
