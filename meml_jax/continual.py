"""A trained workdir as a classifier that learns new classes from a user's own images.

The representation is frozen; a state is a value, and to learn is to make another one:

    classifier = ContinualClassifier.load("runs/quickstart")
    state = classifier.init()
    state = classifier.learn(state, images, "cat")
    labels, probabilities = classifier.predict(state, more_images)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meml_jax import checkpoints, meta_train, online, saved_states
from meml_jax.config import Config
from meml_jax.data import own_images
from meml_jax.heads import HEADS, encode
from meml_jax.learners import LEARNERS, get_learner
from meml_jax.networks import Network, blank_outputs, make_network
from meml_jax.online import State
from meml_jax.settings import from_dict
from meml_jax.types import Array, Params, UserError
from meml_jax.workdir import fingerprint

CHUNK = 16  # images a call of the compiled functions, the last ones padded: one program for any N


@dataclasses.dataclass(frozen=True, eq=False)
class ContinualClassifier:
    """A frozen network and how new classes are learned on it; all its methods are pure.

    Attributes:
      network: pure functions, with `capacity` outputs.
      params: meta-trained; the output layer is drawn by `init`.
      config: settings of the run: images, rehearsal, precision.
      head: `prototype`, `sgd` or `sgd_reservoir`.
      capacity: most classes of a state.
      learning_rate: Adam's, of the sgd heads; None for prototypes that were given none.
      identity: digest of network and image size; states carry it.
    """

    network: Network
    params: Params
    config: Config
    head: str
    capacity: int
    learning_rate: float | None
    identity: str

    @classmethod
    def load(
        cls,
        workdir: str | os.PathLike[str],
        *,
        head: str = "prototype",
        capacity: int = 100,
        learning_rate: float | None = None,
    ) -> ContinualClassifier:
        """Load the network that a run has trained.

        Args:
          workdir: `--workdir` of the run, trained at least up to one checkpoint.
          head: `prototype`, the nearest class mean of the features; `sgd`, the CLN by Adam, one
            step an image, as in the paper; `sgd_reservoir`, the same with rehearsal
            (`test.reservoir_size` and `test.reservoir_batch` of the run).
          capacity: most classes a state can hold. The sgd heads have as many outputs.
          learning_rate: of the sgd heads; None: what the run's meta-test chose for this head, at
            the number of classes nearest to `capacity`.

        Returns:
          The classifier.

        Raises:
          UserError: no trained workdir, an argument out of range, or no learning rate.
        """
        workdir = Path(workdir).expanduser()
        if head not in HEADS:
            raise UserError(f"head={head!r}, expected one of {HEADS}")
        if capacity < 1:
            raise UserError(f"capacity={capacity}, expected at least 1")
        if learning_rate is not None and not learning_rate > 0:
            raise UserError(f"learning_rate={learning_rate}, expected above 0, or None")
        config = _read_config(workdir)
        if config.learner not in LEARNERS:
            raise UserError(
                f"{workdir}: trained with the learner {config.learner!r}, which LEARNERS does not "
                "have; import the module that adds it, then load"
            )
        learner = get_learner(config.learner)
        if head != "prototype" and learner.uses_film:
            raise UserError(
                f"head={head!r} would have to adapt the FiLM layers of {config.learner!r} too, "
                "expected 'prototype' with this learner"
            )
        if head != "prototype" and learning_rate is None:
            learning_rate = _chosen_rate(workdir, head, capacity)
        trained = functools.partial(
            make_network,
            config.network,
            learner,
            image_shape=(config.data.image_size, config.data.image_size, config.data.channels),
        )
        params = _restore_params(workdir, config, trained)
        return cls(
            network=trained(num_classes=capacity),
            params=blank_outputs(params, capacity),
            config=config,
            head=head,
            capacity=capacity,
            learning_rate=learning_rate,
            identity=_identity(params, config),
        )

    def init(self, seed: int = 0) -> State:
        """Start without classes; `seed` draws the sgd heads' output layer and their rehearsal."""
        return online.init(
            self.params,
            network=self.network,
            learning_rate=None if self.head == "prototype" else self.learning_rate,
            reservoir_size=(
                self.config.test.reservoir_size if self.head == "sgd_reservoir" else None
            ),
            seed=seed,
        )

    def learn(self, state: State, images: Any, label: Hashable) -> State:
        """Learn images of one class, one after another, in their order.

        Args:
          state: left as it is.
          images: see `own_images.fit_images`.
          label: any hashable value; equal ones are the same class. An unknown one adds a class.

        Returns:
          The state that knows them too. To learn images in one call or in several is the same.

        Raises:
          UserError: images that cannot be used, an unhashable label, or no room for a class.
        """
        label = saved_states.checked_label(label)
        labels = state.labels if label in state.labels else (*state.labels, label)
        if len(labels) > self.capacity:
            raise UserError(
                f"label {label!r} would be class {len(labels)}, but capacity={self.capacity}; load "
                "with a larger capacity and learn anew"
            )
        values = (state.classes, state.stream)
        for features, count in self._features(images):
            with jax.default_matmul_precision(self.config.precision):
                values = online.learn(
                    *values,
                    features,
                    count,
                    labels.index(label),
                    self.learning_rate,
                    network=self.network,
                    num_replayed=self.config.test.reservoir_batch,
                )
        return State(labels, *values)

    def predict(self, state: State, images: Any) -> tuple[list[Hashable], np.ndarray]:
        """Name the class of each image.

        Args:
          state: knows K classes.
          images: N of them, see `own_images.fit_images`; a single one is N = 1.

        Returns:
          (labels [N], probabilities float32 [N, K] in the order of `state.labels`). An image's
          result does not depend on what other images come with it.

        Raises:
          UserError: images that cannot be used, or a state without classes.
        """
        self._check_not_empty(state)
        rows = []
        for features, count in self._features(images):
            with jax.default_matmul_precision(self.config.precision):
                found = online.probabilities(
                    state.classes, state.stream, features, network=self.network
                )
            rows.append(np.asarray(found)[:count, : len(state.labels)])
        probabilities = np.concatenate(rows)
        return [state.labels[i] for i in probabilities.argmax(axis=1)], probabilities

    def score(self, state: State, images: Any) -> np.ndarray:
        """Score how foreign images are to the known classes (`pooling.novelty`), by either head.

        Args:
          state: knows some class by two different images or more.
          images: N of them, see `own_images.fit_images`.

        Returns:
          float32 [N]: 1 or less for most images of known classes, more for those of other
          classes. The score of a class is the mean over its images.

        Raises:
          UserError: images that cannot be used, or too little learned.
        """
        self._check_not_empty(state)
        if not np.any(np.asarray(state.classes.scatter) > 0):
            raise UserError(
                "no class has two different images, so how far apart images of a class are is not "
                "known; learn a second image of a class"
            )
        rows = []
        for features, count in self._features(images):
            with jax.default_matmul_precision(self.config.precision):
                found = online.novelty(state.classes, features)
            rows.append(np.asarray(found)[:count])
        return np.concatenate(rows)

    def save(self, state: State, path: str | os.PathLike[str]) -> None:
        """Write a state as npz, whole or not at all.

        Raises:
          UserError: a label that is no string, number, bool, None or tuple of these.
        """
        saved_states.save(Path(path), state, self._owner())

    def restore(self, path: str | os.PathLike[str]) -> State:
        """Read a state, bit for bit as it was saved.

        Raises:
          UserError: no such file, no state, or a state of another network, head or capacity.
        """
        return saved_states.restore(Path(path), self.init(), self._owner())

    def _features(self, images: Any) -> Iterator[tuple[Array, int]]:
        """Yield the features of `CHUNK` images [CHUNK, D], and how many of them are real."""
        data = self.config.data
        fitted = own_images.fit_images(
            images,
            image_size=data.image_size,
            channels=data.channels,
            light_ink=data.name in own_images.LIGHT_INK,
        )
        for start in range(0, len(fitted), CHUNK):
            part = fitted[start : start + CHUNK]
            padded = np.zeros((CHUNK, *part.shape[1:]), np.uint8)
            padded[: len(part)] = part
            with jax.default_matmul_precision(self.config.precision):
                features = encode(self.params, padded, network=self.network, chunk=CHUNK)
            yield features, len(part)

    def _check_not_empty(self, state: State) -> None:
        if not state.labels:
            raise UserError("the state knows no class yet; call learn(state, images, label) first")

    def _owner(self) -> dict[str, Any]:
        """List what a state must share with the classifier that reads it."""
        return {"network": self.identity, "head": self.head, "capacity": self.capacity}


def _read_config(workdir: Path) -> Config:
    path = workdir / "config.json"
    try:
        config = from_dict(json.loads(path.read_text()))
    except OSError:
        raise UserError(
            f"{workdir}: got no readable config.json, expected the --workdir of a run of "
            "experiments/run.py"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not the settings of a run ({error})") from None
    if config.seeds > 1:
        raise UserError(f"{workdir}: runs of {config.seeds} seeds; load one of its folders seed<k>")
    if not (config.data.image_size and config.data.channels):
        raise UserError(f"{workdir}: nothing is trained there; run the train stage first")
    return config


def _restore_params(workdir: Path, config: Config, network: Callable[..., Network]) -> Params:
    """Restore the checkpoint that `test.checkpoint` names."""
    if not (workdir / "tasks.npz").exists():
        raise UserError(f"{workdir}: nothing is trained there; run the train stage first")
    tasks = saved_states.read(workdir / "tasks.npz", "the clusters of a run")
    rehearses = config.tasks.query_from == "coreset" and not config.episodes.ways
    start = functools.partial(
        meta_train.init_state,
        network=network(num_classes=config.episodes.ways or len(tasks.get("kept_labels", ()))),
        tx=meta_train.outer_optimizer(config.outer),
        coreset_size=config.tasks.coreset_size if rehearses else None,
    )
    template = jax.eval_shape(start, jax.random.key(0))
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, _ = checkpoints.restore(manager, template, config.test.checkpoint)
    return state.params


def _chosen_rate(workdir: Path, head: str, capacity: int) -> float:
    """Look up the learning rate that the run's meta-test chose for a head."""
    try:
        results = json.loads((workdir / "results.json").read_text())
        curves = [results["meta_test"], *results["comparisons"]]
        points = [p for curve in curves if curve["head"] == head for p in curve["points"]]
        rates = {p["num_classes"]: p["learning_rate"] for p in points}
        return float(rates[min(rates, key=lambda n: abs(n - capacity))])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{workdir}: no learning rate was chosen for the head {head!r}; run the test stage "
            f"with it in test.heads, or give learning_rate"
        ) from None


def _identity(params: Params, config: Config) -> str:
    """Digest of what gives images their features, and of the CLN that learning starts from."""
    used = {role: tree for role, tree in params.items() if role not in ("attention", "cln")}
    leaves = map(np.asarray, jax.tree.leaves((used, params["cln"]["hidden"])))
    data = config.data
    return fingerprint(config.network, data.name, data.image_size, data.channels, *leaves)
