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
import io
import json
import os
import zipfile
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from meml_jax import checkpoints, losses, meta_train, pooling, rehearsal
from meml_jax.config import Config, from_dict
from meml_jax.data import own_images
from meml_jax.files import write_atomic
from meml_jax.inner import inner_loop
from meml_jax.learners import get_learner
from meml_jax.meta_test import HEADS, encode
from meml_jax.networks import Network, make_network, reset_class_rows
from meml_jax.types import Array, Batch, Params, UserError
from meml_jax.workdir import fingerprint

CHUNK = 16  # images a call of the compiled functions, the last ones padded: one program for any N
SHARPNESS = 10.0
"""Of the prototype head's probabilities. Held-out likelihood is best at 8 to 12 from 2 classes of 5
images to 100 of 15 (generated characters, quickstart's network); at 10 confidence and accuracy
differ by 0.03 to 0.2, least where each class has 5 images or more."""


class Classes(NamedTuple):
    """What is known of each class: the mean of its features, and how far they are from it.

    Attributes:
      count: int32 [capacity], n_c images learned; 0 for a class to come.
      mean: float32 [capacity, D], m_c.
      scatter: float32 [capacity], sum of |R - m_c|^2 over the images of c.
    """

    count: Array
    mean: Array
    scatter: Array


class Stream(NamedTuple):
    """What the sgd heads carry from image to image.

    Attributes:
      fast: {'cln'}, with `capacity` outputs.
      opt_state: Adam's.
      memory: reservoirs of features [size, D] and of their labels [size]; None without rehearsal.
      seed: uint32 [], from which the reservoir draws.
    """

    fast: Params
    opt_state: optax.OptState
    memory: tuple[rehearsal.Reservoir, rehearsal.Reservoir] | None
    seed: Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["classes", "stream"], meta_fields=["labels"]
)
@dataclasses.dataclass(frozen=True)
class State:
    """All that was learned; a pytree.

    Attributes:
      labels: the user's names of the classes, in the order in which they came.
      classes: of the prototype head and of `score`.
      stream: of the sgd heads, None for the prototype head.
    """

    labels: tuple[Hashable, ...]
    classes: Classes
    stream: Stream | None


@dataclasses.dataclass(frozen=True, eq=False)
class ContinualClassifier:
    """A frozen network and how new classes are learned on it; all its methods are pure.

    Attributes:
      network: pure functions, with `capacity` outputs.
      params: meta-trained; the output layer is drawn by `init`.
      config: settings of the run: images, rehearsal, precision.
      head: `prototype`, `sgd` or `sgd_reservoir`.
      capacity: most classes of a state.
      learning_rate: Adam's, of the sgd heads.
      identity: digest of network and image size; states carry it.
    """

    network: Network
    params: Params
    config: Config
    head: str
    capacity: int
    learning_rate: float
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
        if head != "prototype" and learning_rate is None:
            learning_rate = _chosen_rate(workdir, head, capacity)
        trained = functools.partial(
            make_network,
            config.network,
            get_learner(config.learner),
            image_shape=(config.data.image_size, config.data.image_size, config.data.channels),
        )
        params = _restore_params(workdir, config, trained)
        output = jax.tree.map(
            lambda x: jnp.zeros((*x.shape[:-1], capacity), x.dtype), params["cln"]["output"]
        )
        return cls(
            network=trained(num_classes=capacity),
            params=params | {"cln": params["cln"] | {"output": output}},
            config=config,
            head=head,
            capacity=capacity,
            learning_rate=learning_rate or 0.0,
            identity=_identity(params, config),
        )

    def init(self, seed: int = 0) -> State:
        """Start without classes; `seed` draws the sgd heads' output layer and their rehearsal."""
        width, capacity = self.network.num_features, self.capacity
        classes = Classes(
            jnp.zeros((capacity,), jnp.int32),
            jnp.zeros((capacity, width)),
            jnp.zeros((capacity,)),
        )
        if self.head == "prototype":
            return State((), classes, None)
        fast = {"cln": _draw_outputs(self.params, np.uint32(seed))["cln"]}
        memory = None
        if self.head == "sgd_reservoir":
            size, seen = self.config.test.reservoir_size, jnp.zeros((), jnp.int32)
            memory = (
                rehearsal.Reservoir(jnp.zeros((size, width)), seen),
                rehearsal.Reservoir(jnp.zeros((size,), jnp.int32), seen),
            )
        opt_state = optax.adam(self.learning_rate).init(fast)
        return State((), classes, Stream(fast, opt_state, memory, jnp.uint32(seed)))

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
        label = _checked_label(label)
        labels = state.labels if label in state.labels else (*state.labels, label)
        if len(labels) > self.capacity:
            raise UserError(
                f"label {label!r} would be class {len(labels)}, but capacity={self.capacity}; load "
                "with a larger capacity and learn anew"
            )
        values = (state.classes, state.stream)
        for features, count in self._features(images):
            with jax.default_matmul_precision(self.config.precision):
                values = _learn(
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
                found = _probabilities(state.classes, state.stream, features, network=self.network)
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
                found = _novelty(state.classes, features)
            rows.append(np.asarray(found)[:count])
        return np.concatenate(rows)

    def save(self, state: State, path: str | os.PathLike[str]) -> None:
        """Write a state as npz, whole or not at all.

        Raises:
          UserError: a label that is no string, number, bool, None or tuple of these.
        """
        meta = self._meta() | {"labels": state.labels}
        try:
            text = json.dumps(meta)
        except TypeError:
            text = "{}"
        if _tuples(json.loads(text).get("labels")) != state.labels:
            raise UserError(
                f"labels {state.labels!r} cannot be saved, expected strings, numbers, bools, None, "
                "or tuples of these"
            )
        buffer = io.BytesIO()
        np.savez(buffer, meta=text, **{k: np.asarray(v) for k, v in _named(state).items()})
        write_atomic(path, buffer.getvalue())

    def restore(self, path: str | os.PathLike[str]) -> State:
        """Read a state, bit for bit as it was saved.

        Raises:
          UserError: no such file, no state, or a state of another network, head or capacity.
        """
        stored = _read_npz(Path(path), "a state saved by ContinualClassifier")
        meta = json.loads(str(stored.get("meta", "{}")))
        wrong = [
            f"{name} {meta.get(name)!r} instead of {value!r}"
            for name, value in self._meta().items()
            if meta.get(name) != value
        ]
        template = self.init()
        expected = _named(template)
        wrong += [
            f"no {name} of shape {list(leaf.shape)}"
            for name, leaf in expected.items()
            if name not in stored or stored[name].shape != leaf.shape
        ]
        if wrong:
            raise UserError(
                f"{path}: not a state of this classifier, it has {'; '.join(wrong[:3])}; restore "
                "it with the workdir, head and capacity it was saved with"
            )
        leaves = [jnp.asarray(stored[name], leaf.dtype) for name, leaf in expected.items()]
        state = jax.tree.unflatten(jax.tree.structure(template), leaves)
        return dataclasses.replace(state, labels=_tuples(meta["labels"]))

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

    def _meta(self) -> dict[str, Any]:
        """List what a state must share with the classifier that reads it."""
        return {"network": self.identity, "head": self.head, "capacity": self.capacity}


@jax.jit
def _draw_outputs(params: Params, seed: Array) -> Params:
    """Draw the output layer as a run of the meta-test with that key does."""
    reset_key, _, _ = jax.random.split(jax.random.key(seed), 3)
    everything = jnp.arange(params["cln"]["output"]["bias"].shape[0])
    return reset_class_rows(reset_key, params, everything, reset_bias=True)


@functools.partial(jax.jit, static_argnames=("network", "num_replayed"))
def _learn(
    classes: Classes,
    stream: Stream | None,
    features: Array,
    count: Array | int,
    label: Array | int,
    learning_rate: Array | float,
    *,
    network: Network,
    num_replayed: int,
) -> tuple[Classes, Stream | None]:
    """Learn the first `count` rows of features [CHUNK, D], all of the class `label`."""
    tx = optax.adam(learning_rate)

    def step(i: Array, values: tuple[Classes, Stream | None]) -> tuple[Classes, Stream | None]:
        classes, stream = values
        if stream is not None:
            stream = _descend(
                stream, features[i], label, tx, network=network, num_replayed=num_replayed
            )
        return _add(classes, features[i], label), stream

    return lax.fori_loop(0, count, step, (classes, stream))


def _add(classes: Classes, feature: Array, label: Array | int) -> Classes:
    """Take one more feature [D] into mean and scatter of its class (Welford's update)."""
    count = classes.count[label] + 1
    before = feature - classes.mean[label]
    mean = classes.mean[label] + before / count
    return Classes(
        classes.count.at[label].set(count),
        classes.mean.at[label].set(mean),
        classes.scatter.at[label].add(jnp.dot(before, feature - mean)),
    )


def _descend(
    stream: Stream,
    feature: Array,
    label: Array | int,
    tx: optax.GradientTransformation,
    *,
    network: Network,
    num_replayed: int,
) -> Stream:
    """Take the step of the meta-test's stream on one image and those replayed with it."""
    rows, labels = feature[None], jnp.asarray(label, jnp.int32)[None]
    mask = jnp.ones((1,), bool)
    memory = stream.memory
    if memory is not None:
        key = jax.random.split(jax.random.key(stream.seed), 3)[2]
        sample_key, insert_key = jax.random.split(jax.random.fold_in(key, memory[0].seen))
        # With the same key both reservoirs draw the same slots.
        (old_rows, real), (old_labels, _) = (
            rehearsal.sample(sample_key, reservoir, num_replayed) for reservoir in memory
        )
        batch = Batch(
            jnp.concatenate([rows, old_rows]),
            jnp.concatenate([labels, old_labels]),
            jnp.concatenate([mask, real]),
        )
        memory = (
            rehearsal.insert(insert_key, memory[0], feature),
            rehearsal.insert(insert_key, memory[1], labels[0]),
        )
    else:
        batch = Batch(rows, labels, mask)

    def loss_fn(fast: Params, batch: Batch) -> tuple[Array, Array]:
        logits = network.classify(fast, batch.inputs)
        loss = losses.cross_entropy(logits, batch.label, batch.mask)
        return loss, loss

    one_step = jax.tree.map(lambda x: x[None], batch)
    (fast, opt_state), _ = inner_loop(
        loss_fn, stream.fast, one_step, tx, opt_state=stream.opt_state
    )
    return Stream(fast, opt_state, memory, stream.seed)


@functools.partial(jax.jit, static_argnames="network")
def _probabilities(
    classes: Classes, stream: Stream | None, features: Array, *, network: Network
) -> Array:
    """Probabilities [N, capacity] of the known classes for features [N, D]; 0 for the others.

    sgd: the softmax of the CLN over the known classes. prototype: p_c ~ exp(-SHARPNESS |R - m_c|^2
    / mean over known j of |R - m_j|^2), which is free of the features' scale.
    """
    known = jnp.broadcast_to(classes.count > 0, (len(features), len(classes.count)))
    if stream is not None:
        logits = network.classify(stream.fast, features)
    else:
        square = pooling.square_distances(features, classes.mean)
        scale = jnp.mean(square, axis=1, keepdims=True, where=known)
        logits = -SHARPNESS * square / jnp.where(scale > 0, scale, 1.0)
    return jax.nn.softmax(jnp.where(known, logits, -jnp.inf), axis=1)


@jax.jit
def _novelty(classes: Classes, features: Array) -> Array:
    return pooling.novelty(features, classes.mean, classes.count, classes.scatter)


def _checked_label(label: Any) -> Hashable:
    """Return a label that can be looked up; numpy scalars as the plain values they equal."""
    label = label.item() if isinstance(label, np.generic) else label
    try:
        hash(label)
    except TypeError:
        raise UserError(
            f"label of type {type(label).__name__}, expected one hashable value for all images "
            "of the call, such as a string or a number"
        ) from None
    if label != label:
        raise UserError(f"label {label!r} does not equal itself, so it would never be found again")
    return label


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
    if not (config.data.image_size and config.data.channels):
        raise UserError(f"{workdir}: nothing is trained there; run the train stage first")
    return config


def _restore_params(workdir: Path, config: Config, network: Any) -> Params:
    """Restore the checkpoint that `test.checkpoint` names."""
    if not (workdir / "tasks.npz").exists():
        raise UserError(f"{workdir}: nothing is trained there; run the train stage first")
    tasks = _read_npz(workdir / "tasks.npz", "the clusters of a run")
    start = functools.partial(
        meta_train.init_state,
        network=network(num_classes=len(tasks.get("kept_labels", ()))),
        tx=meta_train.outer_optimizer(config.outer),
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
    leaves = [np.asarray(x) for x in jax.tree.leaves((params["fen"], params["cln"]["hidden"]))]
    data = config.data
    return fingerprint(config.network, data.name, data.image_size, data.channels, *leaves)


def _read_npz(path: Path, expected: str) -> dict[str, np.ndarray]:
    try:
        # Opened here, as np.load leaves a broken file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected {expected}") from None
    except (ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        raise UserError(f"{path}: got a damaged or another file, expected {expected}") from None


def _named(state: State) -> dict[str, Any]:
    """Flatten to `classes/mean`, `stream/fast/cln/...`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _tuples(value: Any) -> Any:
    """Turn the lists that JSON makes of tuples back into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
