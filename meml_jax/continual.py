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
import math
import numbers
import os
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import meta_test, online, saved_states, trained
from meml_jax.config import Config
from meml_jax.data import own_images
from meml_jax.encoding import encode
from meml_jax.fingerprints import fingerprint
from meml_jax.heads import HEADS
from meml_jax.learners import get_learner
from meml_jax.networks import Network, blank_outputs, make_network
from meml_jax.online import State
from meml_jax.types import Array, Params, UserError

CHUNK = 16  # features a call of the compiled functions, padded: one program for any N


@dataclasses.dataclass(frozen=True, eq=False)
class ContinualClassifier:
    """A frozen network and how new classes are learned on it; no method changes it or a state.

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

    def __repr__(self) -> str:
        """Say what it is in a line; the weights would fill pages."""
        what = f"learner={self.config.learner!r}, head={self.head!r}, capacity={self.capacity}"
        if self.learning_rate is not None:
            what += f", learning_rate={self.learning_rate:g}"
        return f"ContinualClassifier({what})"

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
        if not isinstance(capacity, numbers.Integral) or capacity < 1:
            raise UserError(f"capacity={capacity!r}, expected a whole number, at least 1")
        if learning_rate is not None:
            number = isinstance(learning_rate, numbers.Real) and 0 < learning_rate < math.inf
            if not number or head == "prototype":
                raise UserError(
                    f"learning_rate={learning_rate!r} of the head {head!r}, expected a number "
                    "above 0 for an sgd head, or None"
                )
            learning_rate = float(learning_rate)
        config, capacity = trained.read_config(workdir), int(capacity)
        if head == "sgd_reservoir":
            meta_test.check_reservoir(config.test)
        learner = get_learner(config.learner)
        if head != "prototype" and learner.uses_film:
            raise UserError(
                f"head={head!r} would have to adapt the FiLM layers of {config.learner!r} too, "
                "expected 'prototype' with this learner"
            )
        if head != "prototype" and learning_rate is None:
            learning_rate = trained.chosen_rate(workdir, head, capacity)
        with_outputs = functools.partial(
            make_network,
            config.network,
            learner,
            image_shape=(config.data.image_size, config.data.image_size, config.data.channels),
        )
        params = trained.restore_params(workdir, config, with_outputs)
        return cls(
            network=with_outputs(num_classes=capacity),
            params=blank_outputs(params, capacity),
            config=config,
            head=head,
            capacity=capacity,
            learning_rate=learning_rate,
            identity=trained.identity(params, config),
        )

    def init(self, seed: int = 0) -> State:
        """Start without classes; `seed` draws the sgd heads' output layer and their rehearsal."""
        if not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**32:
            raise UserError(f"seed={seed!r}, expected a whole number, 0 to {2**32 - 1}")
        state = online.init(
            self.params,
            network=self.network,
            learning_rate=None if self.head == "prototype" else self.learning_rate,
            reservoir_size=(
                self.config.test.reservoir_size if self.head == "sgd_reservoir" else None
            ),
            seed=seed,
        )
        return dataclasses.replace(state, owner=self._digest())

    def learn(self, state: State, images: Any, label: Hashable) -> State:
        """Learn images of one class, one after another, in their order.

        Args:
          state: left as it is.
          images: see `own_images.fit_images`.
          label: any hashable value; equal ones are the same class. An unknown one adds a class.

        Returns:
          The state that knows them too. To learn images in one call or in several is the same.

        Raises:
          UserError: images that cannot be used, an unhashable label, no room for a class, or a
            state of another classifier.
        """
        self._check_owner(state)
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
        return State(labels, *values, state.owner)

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
        self._check_owner(state)
        saved_states.save(Path(path).expanduser(), state, self._owner())

    def restore(self, path: str | os.PathLike[str]) -> State:
        """Read a state, bit for bit as it was saved.

        Raises:
          UserError: no such file, no state, or a state of another network, head, capacity,
            learning rate or number of replayed images.
        """
        return saved_states.restore(Path(path).expanduser(), self.init(), self._owner())

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
            with jax.default_matmul_precision(self.config.precision):
                features = encode(self.params, part, network=self.network)
            yield jnp.pad(features, [(0, CHUNK - len(part)), (0, 0)]), len(part)

    def _check_owner(self, state: State) -> None:
        if state.owner != self._digest():
            raise UserError(
                "the state is of another classifier, expected one of the same network, head, "
                "capacity and learning rate; begin with init() of this classifier"
            )

    def _check_not_empty(self, state: State) -> None:
        self._check_owner(state)
        if not state.labels:
            raise UserError("the state knows no class yet; call learn(state, images, label) first")

    def _owner(self) -> dict[str, Any]:
        """List what a state must share with the classifier that reads it."""
        owner: dict[str, Any] = {
            "network": self.identity,
            "head": self.head,
            "capacity": self.capacity,
        }
        if self.head != "prototype":
            owner["learning_rate"] = self.learning_rate
        if self.head == "sgd_reservoir":
            owner["reservoir_batch"] = self.config.test.reservoir_batch
        return owner

    def _digest(self) -> str:
        return fingerprint(self._owner())
