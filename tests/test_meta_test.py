"""Meta-test: streams, the heads that learn them, and what is reported about them."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from sklearn.neighbors import NearestCentroid

from meml_jax import config as configs
from meml_jax import encoding, heads, intervals, meta_test, rehearsal, trajectories
from meml_jax.config import NetworkConfig
from meml_jax.learners import get_learner
from meml_jax.networks import make_network
from meml_jax.types import Split, UserError

STATIC = ("capacity", "num")
WIDTH = 8  # features
WAYS, SHOTS, QUERIES = 4, 6, 3


def make_split(sizes, seed=0, image_size=27):
    """Classes of the given sizes whose images are mixed up, as in a real data set."""
    labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(labels)
    images = rng.integers(0, 256, (len(labels), image_size, image_size, 1), dtype=np.uint8)
    ids = np.array([f"{i}" for i in range(len(labels))])
    return Split(images, labels, ids, tuple(f"class{c}" for c in range(len(sizes))))


def make_pool(num_classes=7, per_class=12, seed=0, noise=0.3):
    """Features that a linear head can tell apart."""
    split = make_split([per_class] * num_classes, seed, image_size=1)
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(num_classes, WIDTH)) * 2
    features = means[split.labels] + noise * rng.normal(size=(len(split.labels), WIDTH))
    return trajectories.Pool(jnp.asarray(features, jnp.float32), trajectories.class_table(split))


@pytest.fixture(scope="module")
def network():
    """Its CLN has more outputs than there are classes in a stream, as in a run."""
    config = NetworkConfig(channels=WIDTH, hidden=16)
    return make_network(config, get_learner("meml"), image_shape=(27, 27, 1), num_classes=WAYS + 2)


@pytest.fixture(scope="module")
def params(network):
    return jax.jit(network.init)(jax.random.key(0))


SETTINGS = configs.TestConfig(
    shots=SHOTS, queries=QUERIES, runs=3, trajectories=2, learning_rates=(1e-7, 0.02), iid=True
)


def settings(**fields):
    return dataclasses.replace(SETTINGS, **fields)


@functools.partial(jax.jit, static_argnames="largest")
def draw(keys, table, *, largest):
    numbers = {"num_classes": WAYS, "shots": SHOTS, "queries": QUERIES, "largest": largest}
    return jax.vmap(lambda key: trajectories.draw_trajectory(key, table, **numbers))(keys)


def drawn_from(table, runs=3, seed=0):
    keys = jax.random.split(jax.random.key(seed), runs)
    return draw(keys, table, largest=int(table.size.max()))


@functools.partial(jax.jit, static_argnames="network")
def learn(params, features, label, replay, rate, *, network):
    return heads.learn_stream(params, features, label, replay, network=network, learning_rate=rate)


# Streams.


@pytest.fixture(scope="module")
def many():
    """500 trajectories from classes of different sizes, the smallest of which is just enough."""
    split = make_split([9, 9, 14, 11, 30, 9])
    return split, drawn_from(trajectories.class_table(split), 500)


def test_class_table_lists_each_class():
    split = make_split([3, 5, 4])
    split.labels[split.labels == 1] = np.where(np.arange(5) < 2, -1, 1)  # two are unlabelled
    table = jax.tree.map(np.asarray, trajectories.class_table(split))
    np.testing.assert_array_equal(table.size, [3, 3, 4])
    for c in range(3):
        rows = table.index[table.start[c] : table.start[c] + table.size[c]]
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(split.labels == c))


def test_trajectories_bring_new_classes_one_after_another(many):
    split, drawn = many
    np.testing.assert_array_equal(drawn.stream_label, np.tile(np.arange(WAYS).repeat(6), (500, 1)))
    np.testing.assert_array_equal(drawn.test_label, np.tile(np.arange(WAYS).repeat(3), (500, 1)))
    stream = split.labels[np.asarray(drawn.stream)].reshape(500, WAYS, SHOTS)
    test = split.labels[np.asarray(drawn.test)].reshape(500, WAYS, QUERIES)
    assert np.all(stream == stream[..., :1]) and np.all(test == stream[..., :1])
    classes = np.sort(stream[..., 0], axis=1)
    assert np.all(np.diff(classes, axis=1) > 0)  # no class twice
    counts = np.bincount(classes.ravel(), minlength=6)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_stream_and_test_images_are_disjoint_and_all_images_take_part(many):
    split, drawn = many
    both = np.concatenate([drawn.stream, drawn.test], axis=1)
    assert np.all(np.diff(np.sort(both, axis=1), axis=1) > 0)
    for part in (drawn.stream, drawn.test):
        np.testing.assert_array_equal(np.unique(part), np.arange(len(split.labels)))


def test_trajectories_follow_from_the_key():
    table = make_pool().table
    one, two, other = (drawn_from(table, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.stream, two.stream)
    assert np.any(one.stream != other.stream)


# Frozen features (B5, B18).


def test_features_do_not_depend_on_other_images_or_on_the_chunk(network, params):
    images = make_split([5, 5]).images
    features = encoding.encode(params, images, network=network, chunk=4)
    assert features.shape == (10, WIDTH) and features.dtype == jnp.float32
    poisoned = np.where(np.arange(10)[:, None, None, None] == 3, images, 255 - images)
    others = encoding.encode(params, poisoned, network=network, chunk=4)
    np.testing.assert_array_equal(others[3], features[3])
    order = np.random.default_rng(0).permutation(10)
    for x, chunk in ((images[order], 4), (images[order], 1), (images[order], 100)):
        found = encoding.encode(params, x, network=network, chunk=chunk)
        np.testing.assert_allclose(found, features[order], rtol=1e-5, atol=1e-6)


def test_only_the_cln_learns(network, params):
    pool = make_pool()
    drawn = drawn_from(pool.table)
    none = jnp.zeros((24, 0), jnp.int32), jnp.zeros((24, 0), bool)
    features, label = pool.features[drawn.stream[0]], drawn.stream_label[0]
    learned = learn(params, features, label, none, 0.01, network=network)
    assert set(learned) == {"fen", "attention", "cln"}
    for role in ("fen", "attention"):
        jax.tree.map(np.testing.assert_array_equal, learned[role], params[role])
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), learned["cln"], params["cln"])
    assert all(jax.tree.leaves(moved))


# The sgd head.


def adam_by_hand(cln, features, label, replay, rate):
    """Adam (Kingma and Ba, Alg. 1) on a two-layer net, one new image and its replay a step."""
    w = {
        (layer, name): np.array(value)
        for layer, rows in cln.items()
        for name, value in rows.items()
    }
    m, v = ({k: np.zeros_like(x) for k, x in w.items()} for _ in range(2))
    for t in range(len(label)):
        rows = [t, *replay[0][t][replay[1][t]]]
        x, y = features[rows], label[rows]
        pre = x @ w["hidden", "kernel"] + w["hidden", "bias"]
        h = np.maximum(pre, 0)
        z = h @ w["output", "kernel"] + w["output", "bias"]
        p = np.exp(z - z.max(axis=1, keepdims=True))
        d = p / p.sum(axis=1, keepdims=True)
        d[np.arange(len(rows)), y] -= 1
        d /= len(rows)
        back = (d @ w["output", "kernel"].T) * (pre > 0)
        grads = {
            ("hidden", "kernel"): x.T @ back,
            ("hidden", "bias"): back.sum(axis=0),
            ("output", "kernel"): h.T @ d,
            ("output", "bias"): d.sum(axis=0),
        }
        for k, g in grads.items():
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.999 * v[k] + 0.001 * g**2
            first, second = m[k] / (1 - 0.9 ** (t + 1)), v[k] / (1 - 0.999 ** (t + 1))
            w[k] = w[k] - rate * first / (np.sqrt(second) + 1e-8)
    return w


@pytest.mark.parametrize("replayed", [0, 3])
def test_learning_a_stream_is_adam(replayed, x64):
    config = NetworkConfig(channels=5, hidden=7)
    net = make_network(
        config, get_learner("oml"), image_shape=(27, 27, 1), num_classes=4, dtype=jnp.float64
    )
    params = jax.jit(net.init)(jax.random.key(1))
    rng = np.random.default_rng(0)
    features, label = rng.normal(size=(12, 5)), np.repeat(np.arange(4), 3)
    if replayed:
        schedule = jax.jit(rehearsal.replay_schedule, static_argnums=1, static_argnames=STATIC)
        schedule = schedule(jax.random.key(2), 12, capacity=4, num=replayed)
        replay = tuple(np.asarray(x) for x in schedule)
    else:
        replay = np.zeros((12, 0), np.int32), np.zeros((12, 0), bool)
    learned = learn(params, features, label, replay, 0.03, network=net)
    expected = adam_by_hand(params["cln"], features, label, replay, 0.03)
    for (layer, name), value in expected.items():
        np.testing.assert_allclose(learned["cln"][layer][name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("memory", "runs"), [({"bytes_limit": 80}, 2), ({"bytes_limit": 8}, 1), (None, 50), ({}, 50)]
)
def test_runs_share_what_memory_there_is(monkeypatch, memory, runs):
    device = types.SimpleNamespace(memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert heads.runs_that_fit(10) == heads.runs_that_fit(10, rows=11) == runs


def test_shorter_streams_are_the_beginning_of_the_longest():
    pool = make_pool()
    draw_all = functools.partial(
        trajectories.draw_trajectories, jax.random.key(0), pool.table, count=3
    )
    short = draw_all(settings(num_classes=(2, 5)), num_classes=2)
    whole = draw_all(settings(num_classes=(2, 5)), num_classes=5)
    assert short.stream.shape == (3, 2 * SHOTS) and short.test.shape == (3, 2 * QUERIES)
    for a, b in zip(short, whole, strict=True):
        np.testing.assert_array_equal(a, b[:, : a.shape[1]])


def outcomes(params, pool, network, *, rate=0.02, shuffled=False, reservoir=None, **fields):
    drawn = fields.pop("drawn", None)
    drawn = drawn_from(pool.table) if drawn is None else drawn
    runs = len(drawn.stream)
    return heads.sgd_outcomes(
        params,
        pool.features,
        drawn,
        jax.random.split(jax.random.key(7), runs),
        jnp.full((runs,), rate),
        network=network,
        shuffled=shuffled,
        reservoir=reservoir,
        runs_at_once=fields.pop("runs_at_once", 1),
        longest=fields.pop("longest", None),
    )


def test_the_sgd_head_learns_what_is_separable(params, network):
    pool = make_pool()
    found = outcomes(params, pool, network, rate=0.05, shuffled=True, reservoir=(24, 24))
    assert found.test.shape == (3, WAYS * QUERIES) and found.stream.shape == (3, WAYS * SHOTS)
    assert found.test.mean() > 0.85 and found.stream.mean() > 0.85
    still = outcomes(params, pool, network, rate=0.0, shuffled=True)
    assert still.test.mean() < 0.6  # the initial layer knows nothing


@pytest.mark.parametrize("reservoir", [None, (5, 2)])
def test_streams_of_every_length_run_the_same_program(params, network, reservoir):
    pool = make_pool()
    plain = outcomes(params, pool, network, reservoir=reservoir)
    padded = outcomes(params, pool, network, reservoir=reservoir, longest=WAYS + 2)
    jax.tree.map(np.testing.assert_array_equal, padded, plain)
    programs = heads._sgd_chunk._cache_size()
    for ways in (2, 3):
        fewer = jax.tree.map(lambda x: x[:, : ways * x.shape[1] // WAYS], drawn_from(pool.table))  # noqa: B023
        short = outcomes(
            params, pool, network, drawn=fewer, reservoir=reservoir, longest=WAYS + 2, shuffled=True
        )
        assert short.stream.shape == (3, ways * SHOTS) and short.test.shape == (3, ways * QUERIES)
    assert heads._sgd_chunk._cache_size() == programs


def test_the_order_of_the_stream_counts_and_memory_helps(params, network):
    pool = make_pool()
    run = functools.partial(outcomes, params, pool, network, rate=0.1)
    ordered = run()
    np.testing.assert_array_equal(ordered.test, run().test)
    shuffled = run(shuffled=True)
    memory = run(reservoir=(24, 24))
    assert ordered.stream.mean() < shuffled.stream.mean()  # classes in a row are forgotten
    assert ordered.stream.mean() < memory.stream.mean()


def test_a_reservoir_that_holds_the_stream_replays_all_of_it(params, network):
    length = WAYS * SHOTS
    key = jax.random.key(0)
    schedule = jax.jit(rehearsal.replay_schedule, static_argnums=1, static_argnames=STATIC)
    items, mask = (np.asarray(x) for x in schedule(key, length, capacity=length, num=length))
    np.testing.assert_array_equal(mask.sum(axis=1), np.arange(length))
    for t in range(length):
        np.testing.assert_array_equal(np.sort(items[t][mask[t]]), np.arange(t))
    pool = make_pool()
    drawn = drawn_from(pool.table)
    features, label = pool.features[drawn.stream[0]], drawn.stream_label[0]
    everything = np.tile(np.arange(length, dtype=np.int32), (length, 1))
    before = everything < np.arange(length)[:, None]
    learned = [
        learn(params, features, label, replay, 0.01, network=network)["cln"]
        for replay in ((items, mask), (everything, before))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *learned)


def test_runs_side_by_side_are_runs_one_by_one(params, network):
    pool = make_pool()
    drawn = drawn_from(pool.table, 3)
    one, two = (outcomes(params, pool, network, drawn=drawn, runs_at_once=n) for n in (1, 2))
    # Sums in another order may flip a tie, not more.
    assert np.mean(np.asarray(one.test) != np.asarray(two.test)) < 0.03
    assert np.mean(np.asarray(one.stream) != np.asarray(two.stream)) < 0.03
    protos = [
        heads.prototype_outcomes(pool.features, drawn, num_classes=WAYS, runs_at_once=n)
        for n in (1, 3)
    ]
    np.testing.assert_array_equal(protos[0].test, protos[1].test)


# The prototype head.


@pytest.mark.parametrize(("noise", "longest"), [(0.3, None), (3.0, None), (3.0, WAYS + 2)])
def test_prototypes_are_nearest_centroids(noise, longest):
    pool = make_pool(noise=noise)
    drawn = drawn_from(pool.table)
    found = heads.prototype_outcomes(
        pool.features, drawn, num_classes=WAYS, runs_at_once=2, longest=longest
    )
    features = np.asarray(pool.features, np.float64)
    for run in range(3):
        stream, label, test, test_label = (np.asarray(x[run]) for x in drawn)
        model = NearestCentroid().fit(features[stream], label)
        np.testing.assert_array_equal(found.test[run], model.predict(features[test]) == test_label)
        expected = model.predict(features[stream]) == label
        np.testing.assert_array_equal(found.stream[run], expected)
    assert (found.test.mean() > 0.9) == (noise < 1)


# Protocols (B15, B16, B17).


def sgd_point(params, network, test, validation, config, seed=0, num_classes=WAYS):
    return meta_test.sgd_point(
        jax.random.key(seed),
        params,
        test,
        validation,
        config,
        network=network,
        num_classes=num_classes,
        reservoir=None,
    )


def poisoned(pool):
    """Features without a trace of the class: every rate is as bad as the first."""
    return pool._replace(features=jnp.zeros_like(pool.features))


def test_the_clean_learning_rate_does_not_see_test_images(params, network):
    test, validation = make_pool(seed=1), make_pool(seed=2)
    point = sgd_point(params, network, test, validation, settings())
    assert point["learning_rate"] == 0.02 and point["accuracy"] > 2 / WAYS
    order = jax.random.permutation(jax.random.key(0), len(test.features))
    for other in (poisoned(test), test._replace(features=test.features[order])):
        again = sgd_point(params, network, other, validation, settings())
        assert again["learning_rate"] == point["learning_rate"]
        assert again["search_accuracy"] == point["search_accuracy"]
        assert again["accuracy"] < point["accuracy"]
    blind = sgd_point(params, network, test, poisoned(validation), settings())
    assert blind["learning_rate"] == 1e-7  # this is what decides


def test_the_released_learning_rate_is_chosen_on_what_is_reported(params, network):
    test, validation = make_pool(seed=1), make_pool(seed=2)
    released = settings(protocol="released")
    point = sgd_point(params, network, test, validation, released)
    assert point["learning_rate"] == 0.02
    again = sgd_point(params, network, poisoned(test), validation, released)
    assert again["learning_rate"] == 1e-7
    blind = sgd_point(params, network, test, poisoned(validation), released)
    assert blind == point


def test_a_point_says_all_that_it_rests_on(params, network):
    few = make_pool(num_classes=3, seed=2)  # fewer validation classes than are tested
    config = settings()
    point = sgd_point(params, network, make_pool(seed=1), few, config)
    assert point == sgd_point(params, network, make_pool(seed=1), few, config)
    assert point != sgd_point(params, network, make_pool(seed=1), few, config, seed=1)
    assert point["num_classes"] == WAYS and point["runs"] == len(point["accuracies"]) == 3
    assert point["chance"] == 1 / WAYS and len(point["search_accuracy"]) == 2
    assert point["search_classes"] == 3
    assert sgd_point(params, network, make_pool(seed=1), few, settings(iid=False)) == point | {
        "iid_accuracy": None
    }


def test_what_a_point_says_of_stream_and_order_is_by_hand(params, network):
    test, config = make_pool(seed=1, noise=2.0), settings()
    point = sgd_point(params, network, test, make_pool(seed=2), config)
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(3)]
    drawn = trajectories.draw_trajectories(keys[0], test.table, config, num_classes=WAYS, count=3)
    ordered, shuffled = (
        heads.sgd_outcomes(
            params,
            test.features,
            drawn,
            jax.random.split(keys[2], 3),
            np.full(3, point["learning_rate"], np.float32),
            network=network,
            shuffled=shuffled,
            reservoir=None,
            runs_at_once=heads.runs_that_fit(1),  # the program of the point
        )
        for shuffled in (False, True)
    )
    found = [point[name] for name in ("accuracy", "train_accuracy", "iid_accuracy")]
    expected = [np.mean(x) for x in (ordered.test, ordered.stream, shuffled.test)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert min(abs(a - b) for a, b in itertools.combinations(expected, 2)) > 0.02


def test_a_point_may_lie_beyond_those_of_the_settings(params, network):
    """More classes than any of `num_classes`: streams are drawn and padded to that number."""
    test, validation = make_pool(seed=1), make_pool(seed=2)
    few, enough = settings(num_classes=(2,)), settings(num_classes=(2, WAYS))
    asked = [sgd_point(params, network, test, validation, config) for config in (few, enough)]
    assert asked[0] == asked[1]
    asked = [
        meta_test.prototype_point(jax.random.key(0), test, config, num_classes=WAYS)
        for config in (few, enough)
    ]
    assert asked[0] == asked[1]
    with pytest.raises(AssertionError):  # the CLN has WAYS + 2 outputs
        sgd_point(params, network, test, validation, few, num_classes=WAYS + 3)


def test_memory_of_a_run_is_that_of_all_its_images(monkeypatch):
    asked = []
    monkeypatch.setattr(heads, "runs_that_fit", lambda n: asked.append(n) or 1)
    config = settings(num_classes=(2, WAYS))
    meta_test.prototype_point(jax.random.key(0), make_pool(), config, num_classes=2)
    assert asked == [WAYS * (SHOTS + QUERIES) * WIDTH * 4]


def test_classes_are_drawn_anew_each_run_or_once():
    pool = make_pool(noise=3.0)
    config = settings(runs=20)
    clean = meta_test.prototype_point(jax.random.key(0), pool, config, num_classes=WAYS)
    assert len(set(clean["accuracies"])) > 3 and clean["learning_rate"] is None
    # The head is a function of the stream, so one stream gives one accuracy.
    config = settings(runs=20, protocol="released")
    released = meta_test.prototype_point(jax.random.key(0), pool, config, num_classes=WAYS)
    assert len(set(released["accuracies"])) == 1 and released["ci95"] < 1e-12


def test_accuracy_is_correct_by_total_or_a_mean_of_batch_means():
    correct = np.zeros((2, 40), bool)
    correct[0, :16] = True  # 16 of the first batch of 32, none of the last 8
    correct[1, 32:] = True
    np.testing.assert_allclose(meta_test.run_accuracies(correct, protocol="clean"), [0.4, 0.2])
    released = meta_test.run_accuracies(correct, protocol="released")
    np.testing.assert_allclose(released, [(0.5 + 0) / 2, (0 + 1) / 2])


def test_the_interval_is_students():
    values = np.array([0.5, 0.6, 0.55, 0.7, 0.65])
    point = intervals.summarise(values, num_classes=20)
    low, high = scipy.stats.t.interval(0.95, 4, values.mean(), scipy.stats.sem(values))
    assert point["accuracy"] == pytest.approx(values.mean())
    assert point["accuracy"] - point["ci95"] == pytest.approx(low)
    assert point["accuracy"] + point["ci95"] == pytest.approx(high)
    assert point["std"] == pytest.approx(values.std(ddof=1)) and point["chance"] == 0.05
    single = intervals.summarise(values[:1], num_classes=20)
    assert single["std"] == single["ci95"] == 0.0


# What cannot work is refused before anything runs (B8, T2).


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": "cleen"}, "protocol='cleen', expected 'clean' or 'released'"),
        ({"heads": ("sgd", "knn")}, r"heads=\('sgd', 'knn'\), expected one or more of"),
        ({"heads": ()}, "expected one or more of"),
        ({"checkpoint": "first"}, "checkpoint='first', expected 'last' or 'best'"),
        ({"num_classes": (2, 5)}, r"num_classes=\(2, 5\), but the test split has 4 classes"),
        ({"num_classes": (1,)}, "at least 2"),
        ({"num_outputs": 3, "num_classes": (4,)}, "num_outputs=3, .*4"),
        ({"runs": 1}, "test.runs=1, expected at least 2"),
        ({"shots": 0}, "test.shots=0"),
        ({"queries": -1}, "test.queries=-1"),
        ({"trajectories": 0}, "test.trajectories=0"),
        ({"learning_rates": ()}, r"learning_rates=\(\), expected"),
        ({"learning_rates": (0.1, 0.0)}, "expected numbers above 0"),
        ({"heads": ("sgd_reservoir",), "reservoir_size": 0}, "reservoir_size=0"),
        ({"heads": ("sgd_reservoir",), "reservoir_batch": 0}, "reservoir_batch=0"),
    ],
)
def test_settings_that_cannot_work(fields, message):
    config = settings(**({"num_classes": (2, 4)} | fields))
    with pytest.raises(UserError, match=message):
        meta_test.check_settings(config)
        meta_test.check(config, make_split([9] * 4), name="test")


@pytest.mark.parametrize(("shots", "queries", "small"), [(15, 5, 19), (1, 3, 3)])
def test_a_class_with_too_few_images_is_named(shots, queries, small):
    config = settings(shots=shots, queries=queries, num_classes=(2, 3))
    enough = make_split([shots + queries] * 3)
    meta_test.check(config, enough, name="test")
    needed = f"expected at least test.shots . test.queries = {shots + queries}"
    with pytest.raises(
        UserError, match=f"class 'class1' of the validation split has {small} images, {needed}"
    ):
        split = make_split([shots + queries, small, shots + queries])
        meta_test.check(config, split, name="validation")


def test_validation_may_have_fewer_classes_than_are_tested():
    meta_test.check(settings(num_classes=(5,)), make_split([9] * 2), name="validation")
