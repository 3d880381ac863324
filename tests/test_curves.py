"""Points of the accuracy curves: which of them a change of settings makes anew."""

import dataclasses

import pytest

from meml_jax import curves
from meml_jax.config import TestConfig as Settings

SETTINGS = Settings(num_classes=(2, 4))


def changed(name, **fields):
    new = dataclasses.replace(SETTINGS, **fields)
    return curves.depends_on(name, new) != curves.depends_on(name, SETTINGS)


@pytest.mark.parametrize("name", curves.NAMES)
def test_points_depend_on_what_draws_the_streams_and_not_on_other_curves(name):
    for fields in ({"runs": 9}, {"shots": 9}, {"queries": 9}, {"protocol": "released"}):
        assert changed(name, **fields)
    assert changed(name, num_classes=(2, 5))  # shorter streams are the beginning of the longest
    others = {"heads": ("prototype",), "num_classes": (4, 3), "episodes": 9, "checkpoint": "best"}
    assert not changed(name, **others)


def test_points_of_the_sgd_head_depend_on_its_search():
    for name in curves.NAMES:
        sgd = name in ("sgd", "sgd_reservoir")
        for fields in ({"learning_rates": (0.1,)}, {"trajectories": 9}, {"iid": False}):
            assert changed(name, **fields) == sgd
        assert changed(name, reservoir_size=9) == (name == "sgd_reservoir")


def test_points_of_other_fingerprints_are_made_anew_and_the_rest_is_kept(tmp_path):
    calls, lines = [], []

    def evaluator(name):
        def evaluate(n):
            calls.append((name, n))
            return {"accuracy": 0.5, "ci95": 0.1, "learning_rate": None}

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
    assert run({"one": "a", "two": "b"}, (2, 4)) == []
    assert lines == [f"test: reuses 4 finished points of {tmp_path / 'points.json'}"]
    assert run({"one": "a", "two": "c"}, (2, 4)) == [("two", 2), ("two", 4)]
    # A curve that is not asked for keeps its points, as long as they hold.
    assert run({"one": "a", "new": "d"}, (2,)) == [("new", 2)]
    assert lines[0].startswith("test: reuses 1 finished points")
    assert run({"one": "a", "two": "c"}, (2, 4)) == []
    assert run({"one": "b"}, (2,)) == [("one", 2)]
    assert run({"one": "b", "two": "e"}, (2,)) == [("two", 2)]
    (tmp_path / "points.json").write_text("[]")
    assert run({"one": "a"}, (2,)) == [("one", 2)]
