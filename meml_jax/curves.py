"""Accuracy curves: what is evaluated beside what, each point stored as soon as it is done."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import encoding, environment, meta_test, rotations, trajectories
from meml_jax.config import Config, TestConfig
from meml_jax.data.splits import limited
from meml_jax.files import read_json, write_json
from meml_jax.keys import key_for
from meml_jax.learners import get_learner
from meml_jax.networks import Network, after_stem, blank_outputs, make_network
from meml_jax.rounding import percent
from meml_jax.types import Dataset, Params, TrainState

NAMES = {
    "sgd": "sgd head",
    "sgd_reservoir": "sgd head + reservoir",
    "prototype": "prototype head",
    "adapted": "adapted to the support set",  # of few-shot episodes
    "pixels": "baseline: nearest class mean of raw pixels",
    "untrained": "baseline: nearest class mean of an untrained network",
}
"""Of heads and baselines, in results and reports."""

VERSIONS = {"sgd": 5, "sgd_reservoir": 5, "prototype": 4, "pixels": 4, "untrained": 4}
"""Of what a point of each curve is; a change re-makes the points.

When a curve changes, its version becomes the largest of all plus one, since results keep only the
largest (`results.points_version`)."""
BASELINES = ("pixels", "untrained")  # what learns nothing stands beside every result

Evaluator = Callable[[Any], dict[str, Any]]
"""From a number of classes, or (ways, shots), to one entry of `points` in results.json."""


def evaluators(
    config: Config, dataset: Dataset, *, network: Network, params: Params, initial_params: Params
) -> dict[str, Evaluator]:
    """List the curves of a run by name: the heads asked for, then the baselines.

    Args:
      config: settings.
      dataset: its validation and test parts.
      network: of the meta-training.
      params: meta-trained.
      initial_params: for the untrained network.

    Returns:
      Evaluators that share the frozen features, each computed once, and the streams of a run.
    """
    settings = config.test
    key = key_for("test", config.seed)
    every_class = settings.protocol == "released"
    outputs = settings.num_outputs or (
        dataset.test.num_classes if every_class else max(settings.num_classes)
    )
    learner = get_learner(config.learner)
    head = make_network(
        config.network,
        learner,
        image_shape=dataset.test.images.shape[1:],
        num_classes=outputs,
    )
    head_params = blank_outputs(params, outputs)
    # FiLM layers learn from the stream, so what is frozen ends before them.
    stream, head = ("stem", after_stem(head)) if learner.uses_film else ("trained", head)

    @functools.cache
    def pool(part: str, source: str) -> trajectories.Pool:
        split = dataset.test if part == "test" else dataset.validation
        if part == "rotated":  # of no more images than a stream and its test take
            split = rotations.of_split(limited(split, settings.shots + settings.queries))
        weights = initial_params if source == "untrained" else params
        features = encoding.frozen_features(weights, split.images, source, network=network)
        return trajectories.Pool(features, trajectories.class_table(split))

    def search_part(num_classes: int) -> str:
        """Name the part that a rate for so many classes is chosen on.

        The rate must be that of a stream as long: on 100 validation classes of Omniglot it comes
        out too high for 200. Beyond four times the validation classes it still does, and a point's
        `search_classes` says so.
        """
        if every_class:
            return "test"  # `released` has no validation
        return "validation" if num_classes <= dataset.validation.num_classes else "rotated"

    def prototype(num_classes: int, *, source: str) -> dict[str, Any]:
        point_key = jax.random.fold_in(key, num_classes)
        return meta_test.prototype_point(
            point_key, pool("test", source), settings, num_classes=num_classes
        )

    def sgd(num_classes: int, *, reservoir: tuple[int, int] | None) -> dict[str, Any]:
        return meta_test.sgd_point(
            jax.random.fold_in(key, num_classes),
            head_params,
            pool("test", stream),
            pool(search_part(num_classes), stream),
            settings,
            network=head,
            num_classes=num_classes,
            reservoir=reservoir,
        )

    known: dict[str, Evaluator] = {
        "sgd": functools.partial(sgd, reservoir=None),
        "sgd_reservoir": functools.partial(
            sgd, reservoir=(settings.reservoir_size, settings.reservoir_batch)
        ),
        "prototype": functools.partial(prototype, source="trained"),
        "pixels": functools.partial(prototype, source="pixels"),
        "untrained": functools.partial(prototype, source="untrained"),
    }
    return {name: known[name] for name in (*settings.heads, *BASELINES)}


def depends_on(name: str, test: TestConfig) -> TestConfig:
    """Reset the settings that a curve does not depend on, so that its points outlive changes."""
    own: tuple[str, ...] = ("protocol", "runs", "shots", "queries")
    if name in ("sgd", "sgd_reservoir"):
        own += ("learning_rates", "trajectories", "iid", "num_outputs")
    if name == "sgd_reservoir":
        own += ("reservoir_size", "reservoir_batch")
    values = {field: getattr(test, field) for field in own}
    # Of the longest streams others are the beginning, and the output layer has its width from them.
    return TestConfig(num_classes=(max(test.num_classes),), **values)


def _rate(point: dict[str, Any]) -> str:
    """Say which learning rate was chosen, and where the streams it was chosen on were short."""
    if not point["learning_rate"]:
        return ""
    said = f", rate {point['learning_rate']:g}"
    if (searched := point["search_classes"]) < point["num_classes"]:
        said += f" (chosen on only {searched} classes: may be too high for more)"
    return said


def _is_point(value: Any) -> bool:
    """Tell whether a value of a JSON file is a point, as far as a damaged one is not."""
    if not isinstance(value, dict):
        return False
    numbers = [value.get(name) for name in ("accuracy", "ci95", "seconds")]
    return all(isinstance(number, float | int) and np.isfinite(number) for number in numbers)


def _where(at: Any) -> str:
    return f"{at} classes" if isinstance(at, int) else "{} ways {} shots".format(*at)


def evaluate(
    evaluators: dict[str, Evaluator],
    at: Sequence[Any],
    *,
    path: Path,
    fingerprint: Callable[[str], str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Evaluate every curve at every point, going on from those in `path`.

    Args:
      evaluators: by name.
      at: points of each curve: numbers of classes, or (ways, shots).
      path: JSON file that gets each point when it is done, beside those of other curves and of
        other fingerprints: settings may change and come back.
      fingerprint: of the settings and of what is evaluated, by the curve's name.
      say: prints a line a point.

    Returns:
      {'NAME/POINT': point}; a point has `seconds`, `commit` and `device` beside what its evaluator
      returns.
    """
    stored = read_json(path)
    every_point = stored.items() if isinstance(stored, dict) else ()  # none, or a damaged file
    points: dict[str, Any] = {key: point for key, point in every_point if _is_point(point)}
    made = {"commit": environment.commit(), "device": environment.device_name()}
    every = {f"{name}/{n}": (name, n) for name in evaluators for n in at}
    keys = {name: f"{name} {fingerprint(name)}" for name in evaluators}
    places = {title: f"{keys[name]}/{n}" for title, (name, n) in every.items()}
    todo = [title for title in every if places[title] not in points]
    if len(todo) < len(every):
        say(f"test: reuses {len(every) - len(todo)} finished points of {path}")
    for done, title in enumerate(todo, start=1):
        (name, n), start = every[title], time.monotonic()
        point = evaluators[name](n) | {"seconds": time.monotonic() - start} | made
        points[places[title]] = point
        write_json(path, points)
        say(
            f"test {done}/{len(todo)}: {name}, {_where(n)}: {percent(point['accuracy'])} ± "
            f"{percent(point['ci95'])} %" + _rate(point) + f", {point['seconds']:.1f} s"
        )
    return {title: points[place] for title, place in places.items()}


def validation(
    config: Config, dataset: Dataset, *, network: Network
) -> Callable[[TrainState], float]:
    """Make the function that judges a state: prototype accuracy on the validation classes.

    All of them at once, one draw of images, the same at every call; the labels of training images
    and the test classes play no role.
    """
    split = dataset.validation
    table, key = trajectories.class_table(split), key_for("validate", config.seed)
    settings = dataclasses.replace(config.test, runs=1, protocol="clean")
    count = split.num_classes
    drawn = meta_test.prototype_trajectories(key, table, settings, num_classes=count)
    # Of Mini-ImageNet it takes 320 of 9,600 images: no others are encoded.
    positions = np.concatenate([drawn.stream, drawn.test], axis=1)
    taken, places = np.unique(positions, return_inverse=True)
    stream, test = np.split(places.reshape(positions.shape), [drawn.stream.shape[1]], axis=1)
    drawn = drawn._replace(stream=jnp.asarray(stream), test=jnp.asarray(test))
    images = split.images[taken]

    def validate(state: TrainState) -> float:
        features = encoding.encode(state.params, images, network=network)
        point = meta_test.judge_prototypes(features, drawn, settings, num_classes=count)
        return point["accuracy"]

    return validate
