"""FEN, attention and CLN against their formulas, and the reset of a class's row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax

from meml_jax.config import NetworkConfig
from meml_jax.layers import STRIDES
from meml_jax.learners import LEARNERS
from meml_jax.networks import make_network, reset_class_rows
from meml_jax.types import UserError


def build(learner="meml", image_shape=(28, 28, 1), **config):
    settings = {"channels": 4, "hidden": 6} | config
    return make_network(
        NetworkConfig(**settings), LEARNERS[learner], image_shape=image_shape, num_classes=5
    )


@pytest.mark.parametrize(
    "image_shape, features, last",
    [((27, 27, 1), 4, 1), ((28, 28, 1), 4, 1), ((84, 84, 3), 36, 3), ((64, 64, 3), 16, 3)],
)
def test_sizes(image_shape, features, last):
    net = build(image_shape=image_shape)
    assert net.num_features == features and net.num_classes == 5
    params = jax.eval_shape(net.init, jax.random.key(0))
    assert set(params) == {"fen", "cln", "attention"}
    assert params["fen"]["Conv_0"]["kernel"].shape == (3, 3, image_shape[2], 4)
    assert params["fen"]["Conv_5"]["kernel"].shape == (last, last, 4, 4)
    assert params["attention"]["hidden"]["kernel"].shape == (features, features)
    assert params["cln"]["hidden"]["kernel"].shape == (features, 6)
    assert params["cln"]["output"]["kernel"].shape == (6, 5)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def test_paper_sizes():
    paper = NetworkConfig()
    for image_shape, features in (((28, 28, 1), 256), ((84, 84, 3), 2304)):
        net = make_network(paper, LEARNERS["meml"], image_shape=image_shape, num_classes=1100)
        assert net.num_features == features
        params = jax.eval_shape(net.init, jax.random.key(0))
        assert params["cln"]["hidden"]["kernel"].shape == (features, 1024)


def test_learners_have_the_roles_they_need_and_no_others():
    more = {
        "meml_few_shot": {"attention"},
        "meml": {"attention"},
        "meml_released": {"attention"},
        "oml_film": {"film", "context"},
    }
    for name in LEARNERS:
        roles = set(jax.eval_shape(build(name).init, jax.random.key(0)))
        assert roles == {"fen", "cln"} | more.get(name, set())


def test_fen_is_six_convolutions_with_relu_between():
    net = build()
    params = tiny.parameters(net)
    images = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 28, 28, 1)), jnp.float32)
    x = images
    for layer, stride in enumerate(STRIDES):
        conv = params["fen"][f"Conv_{layer}"]
        x = lax.conv_general_dilated(
            jnp.maximum(x, 0.0),
            conv["kernel"],
            (stride, stride),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x + conv["bias"].reshape(1, 1, 1, -1)
    found = net.encode(params, images)
    np.testing.assert_allclose(found, x.reshape(2, -1), rtol=1e-4, atol=1e-5)
    assert np.any(found < 0), "the last convolution has no ReLU"
    # No image sees another one of its batch.
    np.testing.assert_allclose(net.encode(params, images[:1]), found[:1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("relu", [True, False])
def test_attention_and_cln_by_hand(relu):
    net = build(cln_relu=relu)
    params = tiny.parameters(net)
    p = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    weights = jax.tree.map(np.asarray, params)

    def linear(role, layer, x):
        return x @ weights[role][layer]["kernel"] + weights[role][layer]["bias"]

    hidden = np.tanh(linear("attention", "hidden", np.maximum(p, 0)))
    scores = linear("attention", "output", hidden)[:, 0]
    np.testing.assert_allclose(net.score(params, jnp.asarray(p)), scores, rtol=1e-5, atol=1e-6)
    hidden = linear("cln", "hidden", p)
    logits = linear("cln", "output", np.maximum(hidden, 0) if relu else hidden)
    np.testing.assert_allclose(net.classify(params, jnp.asarray(p)), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "learner, feature, keeps_negative",
    [
        ("meml", "relu", False),
        ("meml", "preactivation", True),
        ("meml_released", "preactivation", True),
        # The released code pools the pre-activation only where there is attention.
        ("meml_mean", "preactivation", False),
        ("oml", "preactivation", False),
    ],
)
def test_which_feature_is_pooled(learner, feature, keeps_negative):
    p = jnp.array([[-1.0, 2.0]])
    expected = [[-1.0 if keeps_negative else 0.0, 2.0]]
    np.testing.assert_array_equal(build(learner, attention_feature=feature).activate(p), expected)


def test_initial_scale():
    net = build(channels=32, hidden=64)
    params = jax.jit(net.init)(jax.random.key(0))
    for role, layer, fan_in in (
        ("fen", "Conv_2", 9 * 32),
        ("attention", "hidden", 32),
        ("cln", "hidden", 32),
    ):
        std = np.std(params[role][layer]["kernel"])
        np.testing.assert_allclose(std, np.sqrt(2 / fan_in), rtol=0.1)
        assert not np.any(params[role][layer]["bias"])


def test_errors():
    with pytest.raises(UserError, match="26x28.*at least 27x27.*data.image_size"):
        build(image_shape=(26, 28, 1))
    with pytest.raises(UserError, match="attention_feature='rleu'.*preactivation.*relu"):
        build(attention_feature="rleu")


@pytest.mark.parametrize("reset_bias", [True, False])
@pytest.mark.parametrize("classes", [[3], [0, 4]])
def test_reset_touches_only_the_rows_of_the_classes(classes, reset_bias):
    params = tiny.parameters(tiny.network("meml"))
    found = reset_class_rows(jax.random.key(1), params, jnp.array(classes), reset_bias=reset_bias)
    for role in ("fen", "attention"):
        tiny.assert_same(found[role], params[role])
    tiny.assert_same(found["cln"]["hidden"], params["cln"]["hidden"])
    old, new = params["cln"]["output"], found["cln"]["output"]
    others = np.setdiff1d(np.arange(tiny.CLASSES), classes)
    np.testing.assert_array_equal(new["kernel"][:, others], old["kernel"][:, others])
    assert np.all(new["kernel"][:, classes] != old["kernel"][:, classes])
    np.testing.assert_array_equal(new["bias"][others], old["bias"][others])
    if reset_bias:
        np.testing.assert_array_equal(new["bias"][jnp.array(classes)], 0)
    else:
        np.testing.assert_array_equal(new["bias"], old["bias"])


def test_reset_draws():
    net = tiny.network("oml", hidden=64)
    params = tiny.parameters(net)

    def rows(seed, classes):
        found = reset_class_rows(jax.random.key(seed), params, classes, reset_bias=True)
        return np.asarray(found["cln"]["output"]["kernel"][:, classes])

    many = np.stack([rows(seed, jnp.array([0, 2])) for seed in range(30)])
    np.testing.assert_allclose(many.std(), np.sqrt(2 / 64), rtol=0.05)
    np.testing.assert_allclose(many.mean(), 0, atol=0.02)
    assert len(np.unique(many)) == many.size, "classes and keys have their own draws"
    # A class that stands twice gets one draw, the one it has alone.
    twice = rows(0, jnp.array([2, 2]))
    np.testing.assert_array_equal(twice[:, 0], many[0][:, 1])
    np.testing.assert_array_equal(twice[:, 1], many[0][:, 1])


def dot_dtypes(text):
    """Dtypes that the matrix products of a printed program give."""
    return {
        line.split("=")[0].split(":")[1].split("[")[0] for line in text if "dot_general" in line
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["meml", "oml_film"])
def test_bfloat16_is_for_the_arithmetic_of_the_convolutions_only(name):
    exact, rounded = (
        tiny.network(name, dense=False, compute_dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    params = tiny.parameters(exact)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        lambda x: x.shape, jax.eval_shape(rounded.init, jax.random.key(0))
    )
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(3, *tiny.CONV_IMAGE)), jnp.float32)
    programs = [str(jax.make_jaxpr(net.encode)(params, x)).splitlines() for net in (exact, rounded)]
    assert dot_dtypes(programs[0]) == {"f32"} and "bf16" in dot_dtypes(programs[1])

    def loss(net, params):
        return jnp.mean(net.encode(params, x) ** 2)

    found = [
        jax.jit(jax.value_and_grad(lambda p, n=n: loss(n, p)))(params) for n in (exact, rounded)
    ]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    (a, da), (b, db) = found
    assert a != b and abs(a - b) < 0.03 * abs(a)
    flat = [jnp.concatenate([v.ravel() for v in jax.tree.leaves(g)]) for g in (da, db)]
    assert jnp.linalg.norm(flat[0] - flat[1]) < 0.05 * jnp.linalg.norm(flat[0])


def test_an_unknown_compute_dtype_is_refused():
    with pytest.raises(UserError, match="network.compute_dtype='float16', expected one of"):
        tiny.network("meml", compute_dtype="float16")
