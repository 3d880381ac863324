"""Learning new classes from one's own images: equal to the meta-test, pure, and hard to misuse."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import tiny
from PIL import Image

from meml_jax import continual, encoding, heads, online, rehearsal, trained, trajectories
from meml_jax.config import Config
from meml_jax.continual import ContinualClassifier
from meml_jax.data import datasets
from meml_jax.learners import get_learner
from meml_jax.networks import make_network, reset_class_rows
from meml_jax.settings import override
from meml_jax.types import UserError

WAYS, SHOTS, QUERIES, SEED = 4, 6, 5, 7
RATE = 0.01
CONFIG = override(
    Config(),
    {
        "data.num_classes": 30,
        "network.channels": 16,
        "network.hidden": 16,
        "test.reservoir_size": 8,  # smaller than the stream
        "test.reservoir_batch": 3,
    },
)


@functools.cache
def load(head="prototype", capacity=WAYS):
    """A classifier as `ContinualClassifier.load` makes it, on a network that tells images apart."""
    network = make_network(
        CONFIG.network, get_learner("meml"), image_shape=(28, 28, 1), num_classes=capacity
    )
    params = tiny.parameters(trained_network())
    output = {"kernel": jnp.zeros((16, capacity)), "bias": jnp.zeros((capacity,))}
    identity = trained.identity(params, CONFIG)
    params = params | {"cln": params["cln"] | {"output": output}}
    return ContinualClassifier(network, params, CONFIG, head, capacity, RATE, identity)


def trained_network():
    return make_network(CONFIG.network, get_learner("meml"), image_shape=(28, 28, 1), num_classes=3)


@functools.cache
def pictures():
    """Generated characters by class, uint8 [C, 20, 28, 28, 1]."""
    split = datasets.load(CONFIG.data, report=lambda line: None).train
    order = np.argsort(split.labels, kind="stable")
    return split.images[order].reshape(split.num_classes, -1, 28, 28, 1)


@functools.cache
def taught(head="prototype", capacity=WAYS):
    """A state that knows classes 0, 1, ... by their first images, learned in class order."""
    classifier = load(head, capacity)
    state = classifier.init(SEED)
    for c in range(WAYS):
        state = classifier.learn(state, pictures()[c, :SHOTS], f"class {c}")
    return state


def queries(classes=WAYS):
    return pictures()[:classes, SHOTS : SHOTS + QUERIES].reshape(-1, 28, 28, 1)


@functools.cache
def stream():
    """What the meta-test sees of the same stream: features, and the trajectory's positions."""
    images = pictures()[:WAYS, : SHOTS + QUERIES].reshape(-1, 28, 28, 1)
    features = encoding.encode(load().params, images, network=load().network)
    places = np.arange(len(images)).reshape(WAYS, -1)
    label = np.arange(WAYS, dtype=np.int32)
    trajectory = trajectories.Trajectory(
        jnp.asarray(places[:, :SHOTS].ravel()),
        jnp.asarray(label.repeat(SHOTS)),
        jnp.asarray(places[:, SHOTS:].ravel()),
        jnp.asarray(label.repeat(QUERIES)),
    )
    return features, jax.tree.map(lambda x: x[None], trajectory)


def correct(head, images, classes):
    labels, _ = load(head).predict(taught(head), images)
    return [name == f"class {c}" for name, c in zip(labels, classes, strict=True)]


# The same as the meta-test, to rounding.


def test_prototypes_are_those_of_the_meta_test():
    features, trajectory = stream()
    outcome = heads.prototype_outcomes(features, trajectory, num_classes=WAYS, runs_at_once=1)
    of_class = np.arange(WAYS)
    found = correct("prototype", queries(), of_class.repeat(QUERIES))
    np.testing.assert_array_equal(found, outcome.test[0])
    learned = pictures()[:WAYS, :SHOTS].reshape(-1, 28, 28, 1)
    found = correct("prototype", learned, of_class.repeat(SHOTS))
    np.testing.assert_array_equal(found, outcome.stream[0])

    rows = np.asarray(features, np.float64).reshape(WAYS, -1, features.shape[1])[:, :SHOTS]
    classes = taught().classes
    tiny.assert_close(classes.mean, rows.mean(axis=1), 1e-6)
    scatter = np.sum((rows - rows.mean(axis=1, keepdims=True)) ** 2, axis=(1, 2))
    np.testing.assert_allclose(classes.scatter, scatter, rtol=1e-5)
    np.testing.assert_array_equal(classes.seen, SHOTS)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["sgd", "sgd_reservoir"])
def test_the_sgd_heads_are_those_of_the_meta_test(head):
    features, trajectory = stream()
    classifier, state = load(head), taught(head)
    # What a run of `sgd_outcomes` with this key starts from and replays.
    reset_key, _, reservoir_key = jax.random.split(jax.random.key(SEED), 3)
    start = reset_class_rows(reset_key, classifier.params, jnp.arange(WAYS), reset_bias=True)
    tiny.assert_close(classifier.init(SEED).stream.fast["cln"], start["cln"], 1e-6)
    length = WAYS * SHOTS
    if head == "sgd":
        replay = jnp.zeros((length, 0), jnp.int32), jnp.zeros((length, 0), bool)
    else:
        replay = rehearsal.replay_schedule(reservoir_key, length, capacity=8, num=3)
        assert int(jnp.sum(replay[1])) == 3 * length - 3 - 2 - 1  # fewer while fewer are stored
    learn_stream = functools.partial(heads.learn_stream, network=classifier.network)
    learned = jax.jit(learn_stream)(
        start,
        features[trajectory.stream[0]],
        trajectory.stream_label[0],
        replay,
        learning_rate=RATE,
    )
    tiny.assert_close(state.stream.fast["cln"], learned["cln"], 1e-6)
    moved = np.abs(learned["cln"]["output"]["kernel"] - start["cln"]["output"]["kernel"])
    assert moved.max() > 5 * RATE  # it did learn
    logits = classifier.network.classify(learned, features[trajectory.test[0]])
    labels, probabilities = classifier.predict(state, queries())
    assert labels == [f"class {c}" for c in jnp.argmax(logits, axis=1)]
    np.testing.assert_allclose(probabilities, jax.nn.softmax(logits), rtol=1e-4, atol=1e-6)


# States are values.


@pytest.mark.parametrize("head", heads.HEADS)
def test_one_call_or_many_are_the_same_and_states_do_not_change(head):
    classifier, images = load(head), pictures()[0]
    start = classifier.init(SEED)
    before = jax.tree.map(np.array, start)
    whole = classifier.learn(start, images, "a")  # more than one chunk
    tiny.assert_same(before, start)
    assert start.labels == ()
    parts = start
    for part in (images[:1], images[1:4], images[4:]):
        parts = classifier.learn(parts, part, "a")
    tiny.assert_same(parts, whole)
    assert int(whole.classes.seen.sum()) == len(images) > continual.CHUNK


@pytest.mark.parametrize("head", heads.HEADS)
def test_a_prediction_does_not_depend_on_the_company(head):
    classifier, state = load(head), taught(head)
    images = np.concatenate([queries(), pictures()[:WAYS, 0]])
    assert len(images) > continual.CHUNK
    labels, probabilities = classifier.predict(state, images)
    scores = classifier.score(state, images)
    assert probabilities.shape == (len(images), WAYS) and scores.shape == (len(images),)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert labels == [state.labels[i] for i in probabilities.argmax(axis=1)]
    for i in (0, 7, 19, 23):
        one, p = classifier.predict(state, images[i])
        assert one == [labels[i]]
        np.testing.assert_allclose(p[0], probabilities[i], rtol=1e-6)
        np.testing.assert_allclose(classifier.score(state, images[i])[0], scores[i], rtol=1e-6)
    turned = classifier.predict(state, images[::-1])[1][::-1]
    np.testing.assert_allclose(turned, probabilities, rtol=1e-6)


def test_classes_and_images_of_any_number_use_the_same_programs():
    classifier = load("sgd", 6)
    functions = (online.learn, online.probabilities, encoding._encode_chunk)
    state, sizes = classifier.init(), None
    for c in range(6):
        state = classifier.learn(state, pictures()[c, : 1 + 3 * c], c)
        labels, probabilities = classifier.predict(state, pictures()[0, : 1 + 3 * c])
        assert probabilities.shape == (len(labels), c + 1)
        sizes = sizes or [f._cache_size() for f in functions]
    assert [f._cache_size() for f in functions] == sizes


def test_room_for_more_classes_changes_no_prediction_of_prototypes():
    small = load().predict(taught(), queries())
    large = load(capacity=9).predict(taught(capacity=9), queries())
    assert small[0] == large[0]
    np.testing.assert_allclose(small[1], large[1], rtol=1e-4, atol=1e-6)


def test_what_is_printed_is_one_line():
    said = f"ContinualClassifier(learner='meml', head='prototype', capacity={WAYS}, learning_rate="
    assert repr(load()) == f"{said}{RATE:g})"
    bare = dataclasses.replace(load(), learning_rate=None)
    assert repr(bare) == said.removesuffix(", learning_rate=") + ")"
    state = load().init()
    assert repr(state) == "State(0 classes [], 0 images)"
    for label in ("cat", ("dog", 2), "cat"):
        state = load().learn(state, pictures()[0][:2], label)
    assert repr(state) == "State(2 classes ['cat', ('dog', 2)], 6 images)"
    many = dataclasses.replace(state, labels=tuple(range(200)))
    assert repr(many) == "State(200 classes [0, 1, 2, 3, 4, 5, ...], 6 images)"
    # Of shapes, and within a transformation, there are no numbers.
    said = []
    jax.jit(lambda state: said.append(repr(state)))(state)
    said.append(repr(jax.eval_shape(lambda state: state, state)))
    assert said == ["State(2 classes ['cat', ('dog', 2)], ? images)"] * 2


def test_a_state_of_another_classifier_is_refused(tmp_path):
    state = load(capacity=3).init()
    for other in (load(capacity=4), load("sgd", capacity=3)):
        for use in (
            lambda c: c.learn(state, queries(), "a"), lambda c: c.predict(state, queries()),
            lambda c: c.score(state, queries()), lambda c: c.save(state, tmp_path / "s.npz"),
        ):  # fmt: skip
            with pytest.raises(UserError, match="state is of another classifier, expected one of"):
                use(other)
    assert not any(tmp_path.iterdir())
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match=f"seed={seed}, expected a whole number, 0 to"):
            load().init(seed)


def test_one_class_is_certain():
    classifier = load()
    state = classifier.learn(classifier.init(), pictures()[0, 0], "only")
    labels, probabilities = classifier.predict(state, pictures()[0, :2])
    assert labels == ["only", "only"]
    np.testing.assert_array_equal(probabilities, np.ones((2, 1)))


def test_paper_of_any_size_and_colour_is_the_drawing_the_network_knows():
    classifier, state = load(), taught()
    drawing = pictures()[1, SHOTS].squeeze()
    expected = classifier.predict(state, drawing)[1]
    colours = np.stack([255 - drawing] * 3, axis=-1)
    np.testing.assert_allclose(classifier.predict(state, colours)[1], expected, rtol=1e-6)
    large = np.kron(255 - drawing, np.ones((4, 4), np.uint8))
    resized = classifier.predict(state, [large, drawing])[1]
    np.testing.assert_allclose(resized[1:], expected, rtol=1e-6)
    # Enlarged and reduced again it is the same drawing but for the filter.
    assert np.abs(resized[0] - expected[0]).max() < 0.1


# Labels.


def test_labels_are_the_users_own():
    classifier = load(capacity=8)
    labels = ["cat", 3, 2.5, None, ("ward", 7), True, frozenset({1}), b"x"]
    state = classifier.init()
    for c, label in enumerate(labels):
        state = classifier.learn(state, pictures()[c, 0], label)
    assert state.labels == tuple(labels)
    assert classifier.predict(state, pictures()[:8, 0])[0] == labels
    again = classifier.learn(state, pictures()[1, 2], np.int64(3))  # equal to 3
    assert again.labels == state.labels
    np.testing.assert_array_equal(again.classes.seen, [1, 2, 1, 1, 1, 1, 1, 1])
    named = classifier.learn(classifier.init(), pictures()[0, 0], np.str_("a"))
    assert type(named.labels[0]) is str
    with pytest.raises(UserError, match="'ninth' would be class 9, but capacity=8"):
        classifier.learn(state, pictures()[0, 0], "ninth")
    for label, expected in ((["a"], "type list"), (np.array([1]), "ndarray"), (np.nan, "itself")):
        with pytest.raises(UserError, match=expected):
            classifier.learn(state, pictures()[0, 0], label)


# The out-of-distribution score.


def test_score_equals_its_definition_with_either_head():
    features, trajectory = stream()
    rows = np.asarray(features, np.float64)[np.asarray(trajectory.stream[0])].reshape(
        WAYS, SHOTS, -1
    )
    mean = rows.mean(axis=1)
    variance = np.sum((rows - mean[:, None]) ** 2) / (WAYS * (SHOTS - 1))
    test = np.asarray(features, np.float64)[np.asarray(trajectory.test[0])]
    square = np.sum((test[:, None] - mean) ** 2, axis=-1)
    expected = square.min(axis=1) / (variance * (1 + 1 / SHOTS))
    for head in ("prototype", "sgd"):
        found = load(head).score(taught(head), queries())
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_too_little_to_go_by_is_said():
    classifier = load()
    for ask in (classifier.predict, classifier.score):
        with pytest.raises(UserError, match="knows no class yet; call learn"):
            ask(classifier.init(), queries())
    same = classifier.learn(classifier.init(), [pictures()[0, 0]] * 2, "a")
    same = classifier.learn(same, pictures()[1, 0], "b")
    with pytest.raises(UserError, match="no class has two different images"):
        classifier.score(same, queries())
    with pytest.raises(UserError, match="expected uint8"):
        classifier.predict(same, np.zeros((28, 28)))


# Saved and restored.


@pytest.mark.parametrize("head", heads.HEADS)
def test_a_restored_state_goes_on_as_if_nothing_had_happened(head, tmp_path):
    classifier, state = load(head), taught(head)
    classifier.save(state, tmp_path / "state.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]
    # As in a new process: another object of the same workdir.
    other = load.__wrapped__(head)
    restored = other.restore(tmp_path / "state.npz")
    assert restored.labels == state.labels
    tiny.assert_same(restored, state)
    images = pictures()[2, SHOTS:]
    tiny.assert_same(
        other.learn(restored, images, "class 2"), classifier.learn(state, images, "class 2")
    )


def test_labels_survive_or_are_refused(tmp_path):
    classifier, path = load(capacity=8), tmp_path / "state.npz"
    state = taught(capacity=8)
    labels = ("cat", 3, None, ("ward", (7, 2.5)))
    classifier.save(dataclasses.replace(state, labels=labels), path)
    before = path.read_bytes()
    assert classifier.restore(path).labels == labels
    for label in (frozenset({1}), b"x", ("a", 1j)):
        with pytest.raises(UserError, match="cannot be saved, expected strings"):
            classifier.save(dataclasses.replace(state, labels=(*labels[:3], label)), path)
    assert path.read_bytes() == before


def test_a_state_of_something_else_is_refused(tmp_path):
    path = tmp_path / "state.npz"
    load().save(taught(), path)
    other = jax.tree.map(lambda x: x + 1, load().params)
    stranger = dataclasses.replace(load(), params=other, identity=trained.identity(other, CONFIG))
    for classifier, expected in (
        (stranger, "network '[0-9a-f]{16}' instead of"),
        (load("sgd"), "head 'prototype' instead of 'sgd'"),
        (load(capacity=9), "capacity 4 instead of 9"),
    ):
        with pytest.raises(UserError, match=f"not a state of this classifier.*{expected}"):
            classifier.restore(path)
    load("sgd").save(taught("sgd"), path)
    faster = dataclasses.replace(load("sgd"), learning_rate=0.5)
    with pytest.raises(UserError, match="learning_rate [0-9.]+ instead of 0.5"):
        faster.restore(path)
    load().save(taught(), path)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="state.npz: got a damaged or another file"):
            load().restore(path)
    np.savez(path, something=np.zeros(3))
    with pytest.raises(UserError, match="not a state of this classifier"):
        load().restore(path)
    path.write_bytes(content)
    with np.load(path) as stored:
        arrays = dict(stored)
    text = str(arrays["meta"])
    for meta in ("<html>", "[]", text.replace("labels", "names")):
        np.savez(path, **arrays | {"meta": meta})
        with pytest.raises(UserError, match="not a state of this classifier"):
            load().restore(path)
    np.savez(path, **arrays | {"classes/mean": arrays["classes/mean"].astype(str)})
    with pytest.raises(UserError, match="no float32 classes/mean of shape"):
        load().restore(path)
    with pytest.raises(UserError, match="none.npz: No such file"):
        load().restore(tmp_path / "none.npz")


# Loading.


def test_loads_the_rate_that_the_meta_test_chose():
    results = programs.results(programs.finished("smoke"))
    points = {p["num_classes"]: p["learning_rate"] for p in results["meta_test"]["points"]}
    assert sorted(points) == [2, 4]
    for capacity, nearest in ((1, 2), (100, 4)):
        classifier = ContinualClassifier.load(
            programs.finished("smoke"), head="sgd", capacity=capacity
        )
        assert classifier.learning_rate == points[nearest]
        assert classifier.network.num_classes == capacity


def without(name, folder):
    """A copy of the finished run without one of its products."""
    shutil.copytree(programs.finished("smoke"), folder)
    target = folder / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return folder


def test_what_is_no_trained_workdir_is_refused_in_one_line(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    smoke = programs.finished("smoke")
    shutil.copytree(smoke, tmp_path / "empty_reservoir")
    config = json.loads((smoke / "config.json").read_text())
    config["test"]["reservoir_size"] = 0
    (tmp_path / "empty_reservoir" / "config.json").write_text(json.dumps(config))
    shutil.copytree(smoke, tmp_path / "seeds")
    config = json.loads((smoke / "config.json").read_text()) | {"seeds": 2}
    (tmp_path / "seeds" / "config.json").write_text(json.dumps(config))
    shutil.copytree(smoke, tmp_path / "old")
    results = json.loads((smoke / "results.json").read_text()) | {"points_version": 4}
    (tmp_path / "old" / "results.json").write_text(json.dumps(results))
    cases = [
        (tmp_path / "seeds", {}, "runs of 2 seeds; load one of its folders"),
        (tmp_path / "nowhere", {}, "no readable config.json, expected the --workdir of a run"),
        (tmp_path / "empty", {}, "no readable config.json"),
        (tmp_path / "foreign", {}, "config.json: not the settings of a run .unknown config field"),
        (tmp_path / "broken", {}, "config.json: not the settings of a run"),
        (without("tasks.npz", tmp_path / "a"), {}, "nothing is trained there; run the train stage"),
        (without("checkpoints", tmp_path / "b"), {}, "run the train stage first"),
        (without("results.json", tmp_path / "c"), {"head": "sgd"}, "or give learning_rate"),
        (tmp_path / "old", {"head": "sgd"}, "was chosen as an earlier version did; run the test"),
        (smoke, {"head": "sgd_reservoir"}, "no learning rate was chosen for the head"),
        (smoke, {"head": "nearest"}, "head='nearest', expected one of"),
        (smoke, {"capacity": 0}, "capacity=0, expected a whole number, at least 1"),
        (smoke, {"capacity": 2.5}, "capacity=2.5, expected a whole number"),
        (smoke, {"head": "sgd", "learning_rate": 0.0}, "learning_rate=0.0 of the head 'sgd'"),
        (smoke, {"head": "sgd", "learning_rate": "0.1"}, "learning_rate='0.1' of the head 'sgd'"),
        (smoke, {"learning_rate": 0.1}, "of the head 'prototype', expected a number above 0 for"),
        (
            tmp_path / "empty_reservoir",
            {"head": "sgd_reservoir", "learning_rate": 0.1},
            "test.reservoir_size=0",
        ),
    ]
    for workdir, arguments, expected in cases:
        with pytest.raises(UserError, match=expected) as error:
            ContinualClassifier.load(workdir, **arguments)
        assert "\n" not in str(error.value)


def test_other_widths_than_the_checkpoints_are_named(tmp_path):
    shutil.copytree(programs.finished("smoke"), tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["network"]["channels"] += 1
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit: params/"):
        ContinualClassifier.load(tmp_path / "run")


def test_the_example_of_the_readme(tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?ContinualClassifier.*?)```", readme, re.DOTALL)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(programs.finished("smoke"))
    for c, name in enumerate(("alpha", "beta")):
        for i in range(3):
            image = 255 - np.kron(pictures()[c, i].squeeze(), np.ones((3, 3), np.uint8))
            Image.fromarray(image).save(tmp_path / f"{name}{i}.png")
    Image.fromarray(pictures()[0, 1].squeeze()).save(tmp_path / "unknown.png")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    assert names["labels"][0] in ("alpha", "beta") and names["probabilities"].shape == (1, 2)
    assert names["state"].labels == ("alpha", "beta") and names["score"].shape == (1,)
    assert (tmp_path / "state.npz").exists()
