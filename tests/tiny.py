"""Networks and tasks small enough that a test compiles and runs in a moment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meml_jax.config import NetworkConfig
from meml_jax.learners import LEARNERS, Learner
from meml_jax.networks import make_network, split_encoder
from meml_jax.types import Batch, Task

IMAGE = (3, 3, 1)  # what the dense encoder reads
CONV_IMAGE = (27, 27, 1)  # the smallest that the FEN reads
CLASSES = 5


def mostly_slow(values, *fast):
    """Parameters of a test, of which the default run of the tests takes those in `fast` only."""
    return [v if v in fast else pytest.param(v, marks=pytest.mark.slow) for v in values]


def learner_of(name) -> Learner:
    return LEARNERS[name] if isinstance(name, str) else name


def network(learner, *, dense=True, channels=4, hidden=6, dtype=jnp.float32, **config):
    """A real network; with `dense` the FEN is one tanh layer, which has both signs and no kinks.

    Where the learner has FiLM layers, the tanh layer stands for the first five convolutions.
    """
    net = make_network(
        NetworkConfig(channels=channels, hidden=hidden, **config),
        learner_of(learner),
        image_shape=CONV_IMAGE,
        num_classes=CLASSES,
        dtype=dtype,
    )
    if not dense:
        return net

    def init(key):
        kernel = jax.random.normal(key, (int(np.prod(IMAGE)), channels), dtype)
        fen = {"kernel": kernel, "bias": jnp.zeros((channels,), dtype)}
        params = net.init(key)
        if learner_of(learner).uses_film:
            fen["Conv_5"] = params["fen"]["Conv_5"]
        return params | {"fen": fen}

    def encode(params, images):
        flat = images.reshape(images.shape[0], -1)
        return jnp.tanh(flat @ params["fen"]["kernel"] + params["fen"]["bias"][None])

    if learner_of(learner).uses_film:
        return net._replace(
            init=init, stem=lambda params, images: encode(params, images)[:, None, None]
        )
    stem, tail = split_encoder(learner_of(learner), encode)
    return net._replace(init=init, stem=stem, tail=tail)


def parameters(net, seed=0, dtype=np.float32):
    """Parameters of the initial scale, drawn without compiling anything.

    Biases are not 0, as they would be at the start, so that a wrong bias shows.
    """
    rng = np.random.default_rng(seed)

    def draw(shape):
        scale = np.sqrt(2 / np.prod(shape[:-1])) if len(shape) > 1 else 0.1
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    return jax.tree.map(lambda x: draw(x.shape), jax.eval_shape(net.init, jax.random.key(0)))


def tasks(seed=0, *, batch=1, support=4, query=6, image=IMAGE, dtype=np.float32):
    """A meta-batch of random images in [0, 1]; the support set of a task has one label."""
    rng = np.random.default_rng(seed)

    def rows(label):
        images = rng.uniform(size=(*label.shape, *image)).astype(dtype)
        mask = jnp.ones(label.shape, bool)
        return Batch(jnp.asarray(images), jnp.asarray(label, jnp.int32), mask)

    own = np.repeat(rng.integers(CLASSES, size=(batch, 1)), support, axis=1)
    return Task(
        rows(own),
        rows(rng.integers(CLASSES, size=(batch, query))),
        jnp.asarray(rng.uniform(0.5, 1.5, size=batch), dtype),
    )


def first(tree):
    """Drop the leading axis of a meta-batch of one."""
    return jax.tree.map(lambda x: x[0], tree)


def assert_same(a, b):
    """Equal bit for bit, leaf by leaf."""
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def assert_close(a, b, tolerance=1e-6):
    def check(x, y):
        scale = max(np.max(np.abs(y), initial=0.0), 1e-30)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)

    jax.tree.map(check, a, b)
