"""Episodes: what is drawn, how it is judged, and the program on them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import tiny

from meml_jax import encoding, episodes, few_shot, inner, meta_train, paper, report, tasks
from meml_jax.config import Config, InnerConfig, OuterConfig
from meml_jax.learners import LEARNERS
from meml_jax.settings import override
from meml_jax.types import Split, TrainState, UserError

SIZES = np.array([3, 4, 6, 9, 14, 30])


def table_of(sizes):
    """Classes whose images lie scattered over the data set: (table, class of each position)."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    table, _ = tasks.table_from_labels(labels, min_size=2)
    return jax.tree.map(jnp.asarray, table), labels


def draw(spec, table, count=40):
    keys = jax.random.split(jax.random.key(0), count)
    return jax.jit(jax.vmap(lambda key: episodes.sample_episode(key, table, spec=spec)))(keys)


def episodes_of(drawn, count):
    """Yield (support positions, labels, query positions, labels) of the real rows of some."""
    drawn = jax.tree.map(np.asarray, drawn)
    for i in range(count):
        parts = []
        for rows in (drawn.support, drawn.query):
            mask = np.asarray(rows.mask[i])
            parts += [np.asarray(rows.inputs[i])[mask], np.asarray(rows.label[i])[mask]]
        yield parts


def test_balanced_episodes():
    table, labels = table_of(SIZES + 6)
    spec = episodes.make_spec(table.size, ways=4, shots=3, queries=5)
    drawn = draw(spec, table, count=1500)
    seen = set()
    for support, support_label, query, query_label in episodes_of(drawn, 40):
        assert np.bincount(support_label).tolist() == [3] * 4
        assert np.bincount(query_label).tolist() == [5] * 4
        assert len({*support, *query}) == 4 * 8  # no image twice
        classes = [set(labels[support[support_label == way]]) for way in range(4)]
        assert all(len(c) == 1 for c in classes) and len(set.union(*classes)) == 4
        for way in range(4):
            assert set(labels[query[query_label == way]]) == classes[way]
        seen |= {(min(c), way) for way, c in enumerate(classes)}
    assert len(seen) == 6 * 4  # every class has had every label
    # All images of a class are used alike: 4 of 6 classes, and 3 of its images, in an episode.
    used = np.bincount(np.asarray(drawn.support.inputs).ravel(), minlength=len(labels))
    mean = 1500 * (4 / 6) * 3 / np.asarray(table.size)[labels]
    assert np.all(np.abs(used - mean) < 5 * np.sqrt(mean))


def test_unbalanced_episodes_follow_the_sizes():
    table, labels = table_of(SIZES)
    spec = episodes.make_spec(SIZES, ways=6, shots=4, queries=5, balanced=False)
    # 4 x size / 11, from 1 to 8 and leaving one image for the query.
    expected = {3: (1, 2), 4: (1, 3), 6: (2, 4), 9: (3, 5), 14: (5, 5), 30: (8, 5)}
    for support, support_label, query, query_label in episodes_of(draw(spec, table), 40):
        assert len({*support, *query}) == len(support) + len(query)
        for way in range(6):
            own = support[support_label == way]
            size = int(SIZES[labels[own[0]]])
            assert (len(own), int((query_label == way).sum())) == expected[size]
    # No padding for images that no cluster has.
    assert episodes.make_spec(SIZES, ways=6, shots=99, queries=5, balanced=False).most_shots == 29
    equal = episodes.make_spec(np.full(6, 20), ways=6, shots=4, queries=5, balanced=False)
    for size in range(2, 300):  # equal clusters of any size: the numbers asked for
        alike = episodes.make_spec(np.full(6, size), ways=6, shots=15, queries=5, balanced=False)
        support, query = episodes.episode_counts(jnp.full(3, size), alike)
        assert set(support.tolist()) == {min(15, size - 1)}, size
        assert set(query.tolist()) == {min(5, size - min(15, size - 1))}, size
    # Equal clusters: the numbers asked for.
    counts = episodes.episode_counts(jnp.full(3, 20), equal)
    assert [x.tolist() for x in counts] == [[4] * 3, [5] * 3]


@pytest.mark.parametrize(
    "message, settings",
    [
        ("expected at least 2 ways", {"ways": 1}),
        ("expected at least 2 ways, 1 shot", {"shots": 0}),
        ("there are 6 clusters or classes; lower the ways", {"ways": 7}),
        ("smallest cluster or class has 3 images, expected at least 9.*balance_size=9", {}),
    ],
)
def test_errors_of_episodes(message, settings):
    with pytest.raises(UserError, match=message):
        episodes.make_spec(SIZES, **({"ways": 5, "shots": 4, "queries": 5} | settings))


CONFIG = override(Config(), {"episodes.ways": 5, "test.ways_shots": ((5, 1),), "test.queries": 3})


@pytest.mark.parametrize(
    "field, value",
    [
        ("test.episodes", 1), ("test.ways_shots", ((5,),)), ("test.ways_shots", ()),
        ("test.ways_shots", ((6, 1),)), ("test.queries", 30), ("test.inner_steps", 0),
    ],
)  # fmt: skip
def test_errors_of_the_evaluation(field, value):
    images = np.zeros((60, 1, 1, 1), np.uint8)
    labels = np.repeat(np.arange(6), 10)
    split = Split(images, labels, np.arange(60).astype(str), tuple("abcdef"))
    few_shot.check(CONFIG, split)
    name = "images" if field == "test.queries" else field.split(".")[1]
    with pytest.raises(UserError, match=name):
        few_shot.check(override(CONFIG, {field: value}), split)


@pytest.mark.parametrize(
    "field, value", [("tasks.balance", "augment"), ("tasks.balance", "loss"),
                     ("tasks.query_from", "coreset"), ("tasks.query_from", "bogus")],
)  # fmt: skip
def test_what_episodes_do_not_have(field, value):
    with pytest.raises(UserError, match=f"{field}='{value}'.*episodes.ways=5"):
        episodes.episode_sampler(override(CONFIG, {field: value}), np.full(6, 10))


def test_accuracies_by_hand():
    """Class means of features that give the class away, and of noise."""
    table, labels = table_of(np.full(8, 12))
    spec = episodes.make_spec(table.size, ways=5, shots=2, queries=4)
    keys = jax.random.split(jax.random.key(1), 200)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(len(labels), 8)).astype(np.float32)
    for scale, low, high in ((20.0, 1.0, 1.0), (0.0, 0.12, 0.25)):
        features = scale * np.eye(8, dtype=np.float32)[labels] + noise
        found = few_shot.prototype_accuracies(jnp.asarray(features), table, keys, spec=spec)
        assert found.shape == (200,) and low <= float(found.mean()) <= high
    sample = jax.jit(
        lambda key: episodes.sample_episode(jax.random.split(key)[0], table, spec=spec)
    )
    for i in range(3):
        task = sample(keys[i])
        support = features[np.asarray(task.support.inputs)].reshape(5, 2, 8).mean(axis=1)
        query = features[np.asarray(task.query.inputs)]
        nearest = np.linalg.norm(query[:, None] - support[None], axis=2).argmin(axis=1)
        assert float(found[i]) == pytest.approx(np.mean(nearest == np.repeat(np.arange(5), 4)))


def test_rows_that_pad_a_query_do_not_count():
    """Accuracies of unbalanced episodes are shares of their real query images."""
    table, labels = table_of(SIZES)
    spec = episodes.make_spec(SIZES, ways=tiny.CLASSES, shots=4, queries=5, balanced=False)
    keys = jax.random.split(jax.random.key(1), 8)
    net = tiny.network("anil")
    params = tiny.parameters(net)
    images = np.random.default_rng(0).normal(size=(len(labels), *tiny.IMAGE)).astype(np.float32)
    features = jax.jit(net.stem)(params, images)
    means = few_shot.prototype_accuracies(features, table, keys, spec=spec)
    # With a rate of 0 nothing is adapted.
    adapted = few_shot.adapted_accuracies(
        params, features, table, keys, spec=spec, network=net, learner=LEARNERS["anil"],
        options=InnerConfig(lr=0.0), episodes_at_once=4,
    )  # fmt: skip
    logits = np.asarray(net.classify(params, net.activate(features)))
    features, padded = np.asarray(features), []
    sample = jax.jit(
        lambda key: episodes.sample_episode(jax.random.split(key)[0], table, spec=spec)
    )
    for i, key in enumerate(keys):
        task = jax.tree.map(np.asarray, sample(key))
        real, label = task.query.mask, task.query.label
        support = [
            features[task.support.inputs[task.support.mask & (task.support.label == way)]]
            for way in range(tiny.CLASSES)
        ]
        x = features[task.query.inputs]
        distances = [np.linalg.norm(x - rows.mean(axis=0), axis=1) for rows in support]
        nearest = np.argmin(distances, axis=0) == label
        likeliest = logits[task.query.inputs].argmax(axis=1) == label
        assert float(means[i]) == pytest.approx(nearest[real].mean())
        assert float(adapted[i]) == pytest.approx(likeliest[real].mean())
        padded.append([x[real].mean() != x.mean() for x in (nearest, likeliest)])
    assert np.any(padded, axis=0).all()  # they would have counted


@pytest.mark.parametrize("name", ["meml", "maml"])
def test_adaptation_learns_the_episode(name):
    """Inner steps alone, from random parameters, tell apart images that differ much."""
    table, labels = table_of(np.full(8, 12))
    spec = episodes.make_spec(table.size, ways=tiny.CLASSES, shots=3, queries=4)
    learner = LEARNERS[name]
    net = tiny.network(name, channels=16, hidden=32)
    params = tiny.parameters(net)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, *tiny.IMAGE))[labels] + 0.1 * rng.normal(size=(96, *tiny.IMAGE))
    inputs = jax.jit(net.stem)(params, jnp.asarray(images, jnp.float32))
    found = few_shot.adapted_accuracies(
        params, inputs, table, jax.random.split(jax.random.key(2), 20), spec=spec, network=net,
        learner=learner, options=InnerConfig(lr=0.3, steps=30), episodes_at_once=5,
    )  # fmt: skip
    assert found.shape == (20,)
    assert float(found.mean()) > 0.9


@pytest.mark.parametrize(
    ("name", "ways", "rate"),
    [("meml_few_shot", 5, 0.5), ("maml", 3, 0.5 * 3 / 5), ("oml_single", 3, 0.5)],
)
def test_an_adapted_accuracy_by_hand(name, ways, rate):
    """One update on the support set, then the arg max of the logits of each query image.

    Of 3 classes in place of the 5 that the CLN has outputs for, with 3 / 5 of the rate where the
    inner loss is a mean over the classes. `oml_single` sees one of them only.
    """
    table, labels = table_of(np.full(8, 12))
    spec = episodes.make_spec(table.size, ways=ways, shots=3, queries=4)
    net, options = tiny.network(name), InnerConfig(lr=0.5)
    learner = dataclasses.replace(LEARNERS[name], resets_class_row=False)
    assert net.num_classes == 5
    params = tiny.parameters(net)
    images = np.random.default_rng(0).normal(size=(len(labels), *tiny.IMAGE)).astype(np.float32)
    keys = jax.random.split(jax.random.key(2), 6)
    found = few_shot.adapted_accuracies(
        params, jax.jit(net.stem)(params, images), table, keys, spec=spec, network=net,
        learner=learner, options=options, episodes_at_once=2,
    )  # fmt: skip

    @jax.jit
    def logits(key):
        task = episodes.sample_episode(jax.random.split(key)[0], table, spec=spec)
        support, query = (
            dataclasses.replace(rows, inputs=net.stem(params, jnp.asarray(images)[rows.inputs]))
            for rows in (task.support, task.query)
        )
        adapted, _ = inner.adapt(
            params, support, network=net, learner=learner, tx=optax.sgd(rate), ways=ways
        )
        p = net.tail(adapted, query.inputs)
        return net.classify(adapted, net.activate(p))[:, :ways], query.label

    expected = [np.mean(np.argmax(a, axis=1) == b) for a, b in map(logits, keys)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.std(expected) > 0


@pytest.mark.parametrize("name", ["maml", "meml_few_shot"])
def test_training_on_episodes_teaches_to_adapt(name):
    """New classes, told apart by three pixels behind six of noise, after training and before it."""
    rng = np.random.default_rng(0)
    classes, each = 40, 12
    images = rng.normal(size=(classes, 1, 9)) * np.repeat([80.0, 0.0], [3, 6])
    images = images + rng.normal(size=(classes, each, 9)) * np.repeat([8.0, 40.0], [3, 6])
    images = np.clip(128 + images, 0, 255).astype(np.uint8).reshape(-1, *tiny.IMAGE)
    sizes = np.full(classes, each)
    config = override(Config(), {"episodes.ways": tiny.CLASSES, "episodes.shots": 1})
    net = tiny.network(name, channels=16, hidden=16, cln_relu=False)
    learner, options, outer = LEARNERS[name], InnerConfig(lr=1.0), OuterConfig(1e-2, meta_batch=4)
    call = meta_train.make_train_call(
        network=net, learner=learner, inner=options, outer=outer,
        sampler=episodes.episode_sampler(config, sizes[:30]), steps_per_call=1600,
    )  # fmt: skip
    fresh = tiny.parameters(net)
    state = TrainState(jnp.int32(0), fresh, meta_train.outer_optimizer(outer).init(fresh))
    table = tasks.table_from_labels(np.repeat(np.arange(30), each), min_size=2)[0]
    data = (jnp.asarray(images[: 30 * each]), jax.tree.map(jnp.asarray, table), jnp.ones(30))
    state, _ = jax.jit(call)(state, jnp.int32(1600), *data, jax.random.key(1))

    held = tasks.table_from_labels(np.repeat(np.arange(10), each), min_size=2)[0]
    spec = episodes.make_spec(held.size, ways=tiny.CLASSES, shots=1, queries=5)

    def accuracy(params):
        inputs = net.stem(params, encoding.to_float(jnp.asarray(images[30 * each :])))
        return float(few_shot.adapted_accuracies(
            params, inputs, jax.tree.map(jnp.asarray, held),
            jax.random.split(jax.random.key(2), 100), spec=spec, network=net, learner=learner,
            options=options, episodes_at_once=10,
        ).mean())  # fmt: skip

    # 0.2 to 0.25 before, 0.7 to 0.8 after; guessing gives 0.2.
    assert accuracy(fresh) < 0.35
    assert accuracy(state.params) > 0.6


def test_the_report_has_the_rows_of_the_paper():
    def series(name, head, accuracy):
        points = [
            {"num_classes": w, "shots": s, "runs": 600, "accuracy": accuracy, "std": 0.1,
             "ci95": 0.008, "chance": 1 / w, "accuracies": [accuracy]}
            for w, s in ((5, 1), (20, 5))
        ]  # fmt: skip
        return {"protocol": "few_shot", "head": head, "points": points, "name": name}

    config = dataclasses.asdict(override(Config(), {"episodes.ways": 20, "episodes.shots": 5}))
    text = report.render(
        {
            "dataset": "omniglot", "learner": "maml", "config": config,
            "meta_test": series(None, "adapted", 0.9125),
            "comparisons": [series("pixel means", "pixels", 0.5)],
        }
    )  # fmt: skip
    for line in (
        "| ways,shots | 5,1 | 20,5 |", "| maml 20,5 | 91.3 ± 0.8 | 91.3 ± 0.8 |",
        "| pixel means | 50.0 ± 0.8 | 50.0 ± 0.8 |", "| MEML 20,1 (paper) | 97.50 | 99.37 |",
        "| CACTUs-MAML unbalanced 20,15 (paper) | 72.00 | 66.25 |", "| chance | 20.0 | 5.0 |",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert len(paper.few_shot_rows("omniglot")) == 8 and paper.few_shot_rows("glyphs") == {}


WIDE = {"episodes__shots": 8, "episodes__queries": 5, "test__ways_shots": "((2,1),)"}


@pytest.mark.parametrize(("rotations", "most"), [(False, 12), (True, 48)])
def test_more_ways_than_clusters_are_refused_before_the_embedding(tmp_path, rotations, most):
    """Of 12 clusters of 400 images."""
    fields = WIDE | {"tasks__rotations": rotations}
    error = programs.refuse(tmp_path / "run", episodes__ways=most + 1, **fields)
    times = " times 4 (tasks.rotations)" if rotations else ""
    assert (
        f"episodes.ways={most + 1}, expected at most clustering.num_clusters=12{times}; lower it"
        in error
    )
    assert not (tmp_path / "run" / "embeddings.npz").exists()
    fields |= {"episodes__ways": most, "call": programs.run_here}
    lines = programs.succeed(tmp_path / "run", "--stage=embed", **fields)
    assert lines[-1].startswith("embed: pca")


FIELDS = {
    "episodes__ways": 4, "episodes__shots": 2, "episodes__queries": 3, "test__queries": 5,
    "test__ways_shots": "((2,1),(4,2))", "test__episodes": 30, "outer__meta_batch": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["maml", "meml", "cactus_unbalanced", "cactus_balanced"])
def test_runs(tmp_path, preset):
    """The presets of the config file, on generated characters."""
    learner = "meml_few_shot" if preset == "meml" else "maml"
    fields = FIELDS | {"config": f"configs/few_shot_omniglot.py:{preset},smoke"}
    fields["data__name"] = "glyphs"
    if preset == "cactus_balanced":
        fields["tasks__balance_size"] = 8
    lines = programs.succeed(tmp_path, **fields)
    assert any("4-way 2-shot episodes" in line for line in lines)
    results = programs.results(tmp_path)
    assert (results["meta_test"]["protocol"], results["learner"]) == ("few_shot", learner)
    heads = [c["head"] for c in (results["meta_test"], *results["comparisons"])]
    assert heads == ["adapted", "prototype", "pixels", "untrained"]
    for curve in (results["meta_test"], *results["comparisons"]):
        at = [(p["num_classes"], p["shots"], p["runs"], len(p["accuracies"]))
              for p in curve["points"]]  # fmt: skip
        assert at == [(2, 1, 30, 30), (4, 2, 30, 30)]
        assert all(p["ci95"] > 0 for p in curve["points"])
    assert all(p["accuracy"] > p["chance"] for p in results["comparisons"][1]["points"])
    assert (
        f"| {'oracle ' * ('cactus' not in preset)}{learner} 4,2 |"
        in (tmp_path / "report.md").read_text()
    )
    again = programs.succeed(tmp_path, **fields)
    assert any(line.startswith("test: reuses 8") for line in again)
    refused = programs.refuse(tmp_path, **(fields | {"episodes__shots": 1}))
    assert "episodes.shots is 2 there, 1 now" in refused
