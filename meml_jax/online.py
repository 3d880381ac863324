"""Heads that learn one image at a time on frozen features, as pure functions of a state.

They are those of the meta-test: the nearest class mean, and the CLN by Adam with or without
rehearsal; a state carries from image to image what a stream of the meta-test does.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from meml_jax import pooling, rehearsal
from meml_jax.inner import inner_step, rows_loss
from meml_jax.keys import keys_of_run
from meml_jax.networks import Network, reset_class_rows
from meml_jax.types import Array, Batch, Params

SHARPNESS = 10.0
"""Of the prototype head. Held-out likelihood is best at 6 to 12 for 2 to 100 classes
of 1 to 15 images (generated characters, the network of the quickstart); at 10 the expected
calibration error is 0.03 to 0.17."""


class Classes(NamedTuple):
    """What is known of each class: the mean of its features, and how far they are from it.

    Attributes:
      seen: int32 [capacity], n_c images learned; 0 for a class to come.
      mean: float32 [capacity, D], m_c.
      scatter: float32 [capacity], sum of |R - m_c|^2 over the images of c.
    """

    seen: Array
    mean: Array
    scatter: Array


class Stream(NamedTuple):
    """What the sgd heads carry from image to image.

    Attributes:
      fast: {'cln'}, with `capacity` outputs.
      opt_state: Adam's.
      memory: reservoir of (feature [D], label []); None without rehearsal.
      seed: uint32 [], from which the reservoir draws.
    """

    fast: Params
    opt_state: optax.OptState
    memory: rehearsal.Reservoir | None
    seed: Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["classes", "stream"],
    meta_fields=["labels", "owner"],
)
@dataclasses.dataclass(frozen=True)
class State:
    """All that was learned; a pytree.

    Attributes:
      labels: the user's names of the classes, in the order in which they came.
      classes: of the prototype head and of `score`.
      stream: of the sgd heads, None for the prototype head.
      owner: digest of the classifier that made it; no other one reads it.
    """

    labels: tuple[Hashable, ...]
    classes: Classes
    stream: Stream | None
    owner: str = ""

    def __repr__(self) -> str:
        """Say what was learned in a line; the arrays would fill a page."""
        try:
            images = str(np.asarray(self.classes.seen).sum().item())
        except (TypeError, AttributeError):  # abstract, as within `jax.jit`
            images = "?"
        return f"State({len(self.labels)} classes {reprlib.repr([*self.labels])}, {images} images)"


def init(
    params: Params,
    *,
    network: Network,
    learning_rate: float | None,
    reservoir_size: int | None,
    seed: int,
) -> State:
    """Start without classes.

    Args:
      params: meta-trained; their output layer is drawn anew, as in a run of the meta-test whose key
        is `jax.random.key(seed)`.
      network: pure functions; has an output for each class that there may be.
      learning_rate: Adam's; None: prototypes only, no sgd head.
      reservoir_size: images kept for rehearsal; None: no rehearsal.
      seed: of output layer and rehearsal.
    """
    width, capacity = network.num_features, network.num_classes
    classes = Classes(
        jnp.zeros((capacity,), jnp.int32), jnp.zeros((capacity, width)), jnp.zeros((capacity,))
    )
    if learning_rate is None:
        return State((), classes, None)
    fast = {"cln": _draw_outputs(params, np.uint32(seed))["cln"]}
    memory = None
    if reservoir_size is not None:
        item = (np.zeros(width, np.float32), np.int32(0))
        memory = rehearsal.init(reservoir_size, item)
    opt_state = optax.adam(learning_rate).init(fast)
    return State((), classes, Stream(fast, opt_state, memory, jnp.uint32(seed)))


@jax.jit
def _draw_outputs(params: Params, seed: Array) -> Params:
    """Draw the output layer as a run of the meta-test with that key does."""
    everything = jnp.arange(params["cln"]["output"]["bias"].shape[0])
    key = keys_of_run(jax.random.key(seed)).outputs
    return reset_class_rows(key, params, everything, reset_bias=True)


@functools.partial(jax.jit, static_argnames=("network", "num_replayed"))
def learn(
    classes: Classes,
    stream: Stream | None,
    features: Array,
    count: Array | int,
    label: Array | int,
    learning_rate: Array | float | None,
    *,
    network: Network,
    num_replayed: int,
) -> tuple[Classes, Stream | None]:
    """Learn the first `count` rows of features [N, D], one after another, all of one class.

    Args:
      classes: left as they are, and so is the stream.
      stream: None for the prototype head.
      features: float32 [N, D], R.
      count: int32 [], traced, as are label and rate: one program serves all.
      label: int32 [], the class's place.
      learning_rate: Adam's; not used for the prototype head.
      network: pure functions.
      num_replayed: images replayed with each one, where there is rehearsal.

    Returns:
      (classes, stream) after the last row.
    """

    def step(i: Array, values: tuple[Classes, Stream | None]) -> tuple[Classes, Stream | None]:
        classes, stream = values
        if stream is not None:
            stream = _descend(
                stream,
                features[i],
                label,
                optax.adam(learning_rate),
                network=network,
                num_replayed=num_replayed,
            )
        return _add(classes, features[i], label), stream

    return lax.fori_loop(0, count, step, (classes, stream))


def _add(classes: Classes, feature: Array, label: Array | int) -> Classes:
    """Take one more feature [D] into mean and scatter of its class (Welford's update)."""
    count = classes.seen[label] + 1
    before = feature - classes.mean[label]
    mean = classes.mean[label] + before / count
    return Classes(
        classes.seen.at[label].set(count),
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
        ((old_rows, old_labels), real), memory = rehearsal.replay_beside(
            keys_of_run(jax.random.key(stream.seed)).reservoir,
            memory,
            (feature, labels[0]),
            num_replayed,
        )
        batch = Batch(
            jnp.concatenate([rows, old_rows]),
            jnp.concatenate([labels, old_labels]),
            jnp.concatenate([mask, real]),
        )
    else:
        batch = Batch(rows, labels, mask)

    loss_fn = functools.partial(rows_loss, network=network)
    (fast, opt_state), _ = inner_step(loss_fn, (stream.fast, stream.opt_state), batch, tx)
    return Stream(fast, opt_state, memory, stream.seed)


@functools.partial(jax.jit, static_argnames="network")
def probabilities(
    classes: Classes, stream: Stream | None, features: Array, *, network: Network
) -> Array:
    """Probabilities [N, capacity] of the known classes for features [N, D]; 0 for the others.

    sgd: the softmax of the CLN over the known classes. prototype: p_c ~ exp(-SHARPNESS |R - m_c|^2
    / mean over known j of |R - m_j|^2), which is free of the features' scale.
    """
    known = jnp.broadcast_to(classes.seen > 0, (len(features), len(classes.seen)))
    if stream is not None:
        logits = network.classify(stream.fast, features)
    else:
        square = pooling.square_distances(features, classes.mean)
        scale = jnp.mean(square, axis=1, keepdims=True, where=known)
        logits = -SHARPNESS * square / jnp.where(scale > 0, scale, 1.0)
    return jax.nn.softmax(jnp.where(known, logits, -jnp.inf), axis=1)


@jax.jit
def novelty(classes: Classes, features: Array) -> Array:
    """Score features [N, D] by `pooling.novelty`: float32 [N]."""
    return pooling.novelty(features, classes.mean, classes.seen, classes.scatter)
