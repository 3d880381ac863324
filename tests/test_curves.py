"""Points of the accuracy curves: which of them a change of settings makes anew."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meml_jax import curves, encoding, meta_test, trajectories
from meml_jax.config import Config
from meml_jax.config import TestConfig as Settings
from meml_jax.learners import get_learner
from meml_jax.networks import make_network
from meml_jax.results import points_version
from meml_jax.settings import override
from meml_jax.types import Dataset, Split, TrainState

SETTINGS = Settings(num_classes=(2, 4))


def changed(name, **fields):
    new = dataclasses.replace(SETTINGS, **fields)
    return curves.depends_on(name, new) != curves.depends_on(name, SETTINGS)


@pytest.mark.parametrize("name", curves.VERSIONS)
def test_points_depend_on_what_draws_the_streams_and_not_on_other_curves(name):
    for fields in ({"runs": 9}, {"shots": 9}, {"queries": 9}, {"protocol": "released"}):
        assert changed(name, **fields)
    assert changed(name, num_classes=(2, 5))  # shorter streams are the beginning of the longest
    others = {"heads": ("prototype",), "num_classes": (4, 3), "episodes": 9, "checkpoint": "best"}
    assert not changed(name, **others)


def test_points_of_the_sgd_head_depend_on_its_search():
    for name in curves.VERSIONS:
        sgd = name in ("sgd", "sgd_reservoir")
        for fields in ({"learning_rates": (0.1,)}, {"trajectories": 9}, {"iid": False}):
            assert changed(name, **fields) == sgd
        assert changed(name, reservoir_size=9) == (name == "sgd_reservoir")


OF_STREAMS = ("protocol", "runs", "shots", "queries", "num_classes")
OF_SGD = (*OF_STREAMS, "learning_rates", "trajectories", "iid", "num_outputs")
OF_RESERVOIR = (*OF_SGD, "reservoir_size", "reservoir_batch")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Settings)])
def test_points_depend_on_these_settings_and_no_others(field):
    value = getattr(SETTINGS, field)
    another = {str: "other", int: 99, bool: not value, type(None): 99, tuple: (9,)}[type(value)]
    for name in curves.VERSIONS:
        own = {"sgd": OF_SGD, "sgd_reservoir": OF_RESERVOIR}.get(name, OF_STREAMS)
        assert changed(name, **{field: another}) == (field in own)


def test_points_of_other_fingerprints_are_made_anew_and_all_are_kept(tmp_path):
    calls, lines = [], []

    def evaluator(name):
        def evaluate(n):
            calls.append((name, n))
            return {"accuracy": 0.7305, "ci95": 0.0105, "learning_rate": None}

        return evaluate

    def run(fingerprints, at):
        calls.clear()
        lines.clear()
        points = curves.evaluate(
            {name: evaluator(name) for name in fingerprints},
            at,
            path=tmp_path / "points.json",
            fingerprint=fingerprints.__getitem__,
            say=lines.append,
        )
        assert sorted(points) == sorted(f"{name}/{n}" for name in fingerprints for n in at)
        return list(calls)

    assert run({"one": "a", "two": "b"}, (2, 4)) == [
        ("one", 2), ("one", 4), ("two", 2), ("two", 4)
    ]  # fmt: skip
    # Rounded as in the report; the binary 0.7305 is a little less.
    assert lines[-1].startswith("test 4/4: two, 4 classes: 73.1 ± 1.1 %, ")
    assert run({"one": "a", "two": "b"}, (2, 4)) == []
    assert lines == [f"test: reuses 4 finished points of {tmp_path / 'points.json'}"]
    assert run({"one": "a", "two": "c"}, (2, 4)) == [("two", 2), ("two", 4)]
    # A curve that is not asked for keeps its points, as long as they hold.
    assert run({"one": "a", "new": "d"}, (2,)) == [("new", 2)]
    assert lines[0].startswith("test: reuses 1 finished points")
    assert run({"one": "a", "two": "c"}, (2, 4)) == []
    assert run({"one": "b"}, (2,)) == [("one", 2)]
    assert run({"one": "b", "two": "e"}, (2,)) == [("two", 2)]
    # Settings that come back find their points.
    assert run({"one": "a", "two": "b"}, (2, 4)) == run({"two": "c"}, (2, 4)) == []
    path = tmp_path / "points.json"
    for damage in ("{}", '{"accuracy": NaN, "ci95": 0, "seconds": 1}'):
        spoilt = {key: json.loads(damage) for key in json.loads(path.read_text())}
        path.write_text(json.dumps(spoilt))
        assert run({"one": "a"}, (2,)) == [("one", 2)]
    (tmp_path / "points.json").write_text("[]")
    assert run({"one": "a"}, (2,)) == [("one", 2)]


# Which part of the data set serves what (B15).

WIDTH, WAYS = 4, 3
HARMLESS, LEARNING = 1e-7, 0.1
CONFIG = override(
    Config(),
    {
        "network.channels": WIDTH,
        "network.hidden": 6,
        "test.num_classes": (WAYS,),
        "test.shots": 4,
        "test.queries": 3,
        "test.runs": 2,
        "test.trajectories": 5,
        "test.learning_rates": (HARMLESS, LEARNING),
        "test.heads": ("sgd",),
    },
)


def part(name, *, told=True):
    """Images whose class can be told from their first pixels, or not at all."""
    labels = np.arange(WAYS).repeat(8)
    images = np.zeros((len(labels), 28, 28, 1), np.uint8)
    images[np.arange(len(labels)), 0, labels, 0] = 255 * told
    ids = np.array([f"{name}/{i}" for i in range(len(labels))])
    return Split(images, labels, ids, tuple(f"{name}{c}" for c in range(WAYS)))


@pytest.fixture
def features(monkeypatch):
    """Features that are the first pixels, in place of those of a network."""

    def first_pixels(images):
        return jnp.asarray(images[:, 0, :WIDTH, 0], jnp.float32) / 64

    monkeypatch.setattr(encoding, "frozen_features", lambda w, x, source, network: first_pixels(x))
    monkeypatch.setattr(encoding, "encode", lambda params, x, network: first_pixels(x))


@pytest.fixture(scope="module")
def trained():
    network = make_network(
        CONFIG.network, get_learner("meml"), image_shape=(28, 28, 1), num_classes=WAYS
    )
    return network, network.init(jax.random.key(0))


def dataset(**told):
    parts = {name: part(name, told=told.get(name, True)) for name in ("validation", "test")}
    return Dataset("pixels", part("train"), *parts.values(), "digest")


@pytest.mark.parametrize(
    ("protocol", "chosen_on", "other"),
    [("clean", "validation", "test"), ("released", "test", "validation")],
)
def test_a_run_chooses_the_rate_on_the_part_that_its_protocol_names(
    features, trained, protocol, chosen_on, other
):
    network, params = trained
    config = override(CONFIG, {"test.protocol": protocol})

    def sgd(data):
        every = curves.evaluators(
            config, data, network=network, params=params, initial_params=params
        )
        return every["sgd"](WAYS)

    point = sgd(dataset())
    assert point["learning_rate"] == pytest.approx(LEARNING) and point["accuracy"] > 1 / WAYS
    assert sgd(dataset(**{chosen_on: False}))["learning_rate"] == pytest.approx(HARMLESS)
    blind = sgd(dataset(**{other: False}))
    assert blind["search_accuracy"] == point["search_accuracy"]
    assert (blind["accuracy"] == point["accuracy"]) == (other == "validation")


@pytest.mark.parametrize("protocol", ["clean", "released"])
def test_run_r_of_each_curve_has_the_same_classes_images_and_order(
    features, trained, monkeypatch, protocol
):
    """So that a report and a table may subtract curves from each other run by run."""
    network, params = trained
    heads = ("sgd", "sgd_reservoir", "prototype")
    values = {"test.heads": heads, "test.protocol": protocol, "test.num_classes": (2, WAYS)}
    every = curves.evaluators(
        override(CONFIG, values), dataset(), network=network, params=params, initial_params=params
    )
    draw, drawn = trajectories.draw_trajectories, []

    def record(*args, **settings):
        drawn.append(draw(*args, **settings))
        return drawn[-1]

    monkeypatch.setattr(meta_test, "draw_trajectories", record)
    of_curves = []
    for evaluate in every.values():
        drawn.clear()
        evaluate(2)
        of_curves.append(drawn[0])  # what the sgd heads choose their rate on comes later
    assert len(of_curves) == 5 and len(of_curves[0].stream) == 2
    for other in of_curves[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, of_curves[0])


@pytest.mark.parametrize("name", ["sgd", "sgd_reservoir"])
def test_a_rate_is_chosen_on_streams_as_long_as_those_tested(features, trained, monkeypatch, name):
    """Two validation classes: for more, these rotated by 90, 180 and 270 degrees join them."""
    network, params = trained
    whole = part("validation")
    validation = dataclasses.replace(  # the third class goes; 7 images a class are needed
        whole, images=whole.images[:16], labels=whole.labels[:16], ids=whole.ids[:16],
        class_names=whole.class_names[:2],
    )  # fmt: skip
    data = dataclasses.replace(dataset(), validation=validation)
    pools = []

    def sgd_point(key, params, test, validation, config, *, num_classes, **rest):
        pools.append(validation)
        return {}

    monkeypatch.setattr(curves.meta_test, "sgd_point", sgd_point)

    def pool_of(num_classes, protocol="clean"):
        config = override(CONFIG, {"test.protocol": protocol, "test.heads": (name,)})
        every = curves.evaluators(
            config, data, network=network, params=params, initial_params=params
        )
        every[name](num_classes)
        return pools.pop()

    def first_pixels(images):
        return images[:, 0, :WIDTH, 0] / 64

    enough = pool_of(2)
    assert enough.table.size.tolist() == [8, 8]
    np.testing.assert_array_equal(enough.features, first_pixels(validation.images))
    more = pool_of(3)
    assert more.table.size.tolist() == [7] * 8
    kept = validation.images[np.arange(16) % 8 < 7]
    for turn in range(4):
        np.testing.assert_array_equal(
            more.features[14 * turn : 14 * (turn + 1)],
            first_pixels(np.rot90(kept, turn, axes=(1, 2))),
        )
    assert pool_of(3, "released").table.size.tolist() == [8] * WAYS


def test_a_rate_that_was_chosen_on_too_short_streams_is_said(tmp_path):
    def line(**point):
        lines = []
        curves.evaluate(
            {"sgd": lambda n: {"accuracy": 0.5, "ci95": 0.1, "num_classes": n} | point},
            (9,),
            path=tmp_path / "points.json",
            fingerprint=lambda name: str(point),
            say=lines.append,
        )
        return lines[-1]

    assert ", rate 0.1, 0.0 s" in line(learning_rate=0.1, search_classes=9)
    said = ", rate 0.1 (chosen on only 8 classes: may be too high for more), 0.0 s"
    assert said in line(learning_rate=0.1, search_classes=8)
    assert "rate" not in line(learning_rate=None)


def test_results_say_by_what_version_their_heads_were_judged():
    def version(*heads):
        return points_version(override(CONFIG, {"test.heads": heads}))

    assert version("prototype") == 4
    assert version("prototype", "sgd") == version("sgd_reservoir") == 5


def test_a_training_is_judged_on_validation_classes(features, trained):
    network, params = trained
    state = TrainState(jnp.int32(0), params, ())

    def accuracy(data):
        return curves.validation(CONFIG, data, network=network)(state)

    assert accuracy(dataset()) == accuracy(dataset(test=False)) == 1
    assert accuracy(dataset(validation=False)) < 1
