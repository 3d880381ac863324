"""FiLM layers: the identity at first, by hand, and what they do in both loops and at meta-test."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import tiny
from jax import lax

from meml_jax import continual, film, heads, losses, meta_train, updates
from meml_jax.config import InnerConfig, OuterConfig
from meml_jax.inner import adapt
from meml_jax.layers import CONTEXT_SIZE, STRIDES
from meml_jax.learners import LEARNERS, Learner, Phase
from meml_jax.networks import after_stem
from meml_jax.types import Batch, TrainState

LEARNER = LEARNERS["oml_film"]


def images_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(size=(count, *tiny.CONV_IMAGE)), jnp.float32)


def test_it_is_the_identity_at_first():
    net, plain = (tiny.network(name, dense=False) for name in ("oml_film", "oml"))
    params = jax.jit(net.init)(jax.random.key(0))
    assert params["context"]["z"].shape == (CONTEXT_SIZE,)
    assert {x.shape for x in jax.tree.leaves(params["film"])} == {(CONTEXT_SIZE, 8), (8,)}
    x = images_of(3)
    encode = jax.jit(net.encode)
    expected = jax.jit(plain.encode)(params, x)
    np.testing.assert_array_equal(encode(params, x), expected)
    # The generator is no identity by itself: another context gives another representation.
    moved = params | {"context": {"z": np.ones(CONTEXT_SIZE, np.float32)}}
    assert np.max(np.abs(encode(moved, x) - expected)) > 0.1


def test_at_the_identity_the_first_update_of_the_cln_is_that_of_oml():
    net, plain = (tiny.network(name, dense=False) for name in ("oml_film", "oml"))
    params = jax.jit(net.init)(jax.random.key(0))
    one = Batch(images_of(1), jnp.array([2]), jnp.ones(1, bool))

    def update(name, network):
        def run(params, one):
            support = dataclasses.replace(one, inputs=network.stem(params, one.inputs))
            learner, tx = LEARNERS[name], optax.sgd(0.3)
            return adapt(params, support, network=network, learner=learner, tx=tx, ways=1)[0]["cln"]

        return jax.jit(run)(params, one)

    tiny.assert_close(update("oml_film", net), update("oml", plain))


def test_two_layers_after_the_last_two_convolutions_by_hand():
    net = tiny.network("oml_film", dense=False)
    params = tiny.parameters(net)  # biases and context are not 0
    weights = jax.tree.map(np.asarray, params)
    expected = jax.jit(by_hand)(weights, images_of(2))
    found = jax.jit(net.encode)(params, images_of(2))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # What is kept out of the inner loop is the fifth convolution; nothing there depends on FiLM.
    stem = jax.jit(net.stem)({"fen": params["fen"]}, images_of(2))
    np.testing.assert_allclose(jax.jit(net.tail)(params, stem), found, rtol=1e-6)


def by_hand(weights, x):
    for layer, stride in enumerate(STRIDES):
        conv = weights["fen"][f"Conv_{layer}"]
        x = lax.conv_general_dilated(
            jnp.maximum(x, 0.0) if layer else x, conv["kernel"], (stride, stride), "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ) + conv["bias"].reshape(1, 1, 1, -1)  # fmt: skip
        if layer >= 4:
            linear = weights["film"][f"layer_{layer - 4}"]
            out = weights["context"]["z"] @ linear["kernel"] + linear["bias"]
            gamma, beta = 1 + out[:4], out[4:]
            x = gamma.reshape(1, 1, 1, -1) * x + beta.reshape(1, 1, 1, -1)
    return x.reshape(x.shape[0], -1)


def test_with_a_fast_encoder_all_of_it_adapts():
    learner = dataclasses.replace(LEARNER, fast=("fen", *LEARNER.fast))
    net = tiny.network(learner, dense=False)
    params = jax.jit(net.init)(jax.random.key(0))
    support = Batch(images_of(2), jnp.array([2, 2]), jnp.ones(2, bool))
    run = functools.partial(adapt, network=net, learner=learner, tx=optax.sgd(0.3), ways=1)
    adapted, _ = jax.jit(run)(params, support)
    for name, layer in params["fen"].items():
        assert np.any(adapted["fen"][name]["kernel"] != layer["kernel"]), name


def test_the_inner_loop_starts_at_context_0_and_moves_film_and_context_alone_of_the_encoder():
    net = tiny.network("oml_film")
    params = tiny.parameters(net)
    task = tiny.first(tiny.tasks())
    support = Batch(net.stem(params, task.support.inputs), task.support.label, task.support.mask)
    options = {"network": net, "learner": LEARNER, "tx": optax.sgd(0.3), "ways": 1}
    run = jax.jit(functools.partial(adapt, **options))
    adapted, _ = run(params, support)
    zero = params | {"context": {"z": np.zeros(CONTEXT_SIZE, np.float32)}}
    tiny.assert_same(run(zero, support)[0], adapted)
    tiny.assert_same(adapted["fen"], params["fen"])
    for role in ("cln", "film", "context"):
        pairs = zip(jax.tree.leaves(adapted[role]), jax.tree.leaves(zero[role]), strict=True)
        assert max(np.max(np.abs(np.asarray(a) - np.asarray(b))) for a, b in pairs) > 1e-3


@pytest.mark.slow
def test_the_outer_loop_leaves_the_context_at_0():
    net = tiny.network("oml_film")
    params = tiny.parameters(net) | {"context": {"z": jnp.zeros(CONTEXT_SIZE)}}
    outer = OuterConfig(lr=0.1)
    tx = meta_train.outer_optimizer(outer)
    settings = {"network": net, "learner": LEARNER, "inner": InnerConfig(), "outer": outer}
    settings["ways"] = 1

    @jax.jit
    def step(params, tasks):
        grads, _ = meta_train.meta_grad(params, tasks, **settings)
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    new = step(params, tiny.tasks())
    assert not np.any(new["context"]["z"])
    assert np.any(new["film"]["layer_0"]["kernel"] != params["film"]["layer_0"]["kernel"])


def learned_by_hand(net, params, stems, label, rate):
    """One Adam step an image; where the class changes, the context and its optimizer start anew."""
    adam = optax.adam(rate)
    zero = jax.tree.map(jnp.zeros_like, params["context"])

    @jax.jit
    def step(fast, context, x, y):
        def loss(trees):
            merged = params | trees[0] | {"context": trees[1]}
            logits = net.classify(merged, net.activate(net.tail(merged, x[None])))
            return losses.cross_entropy(logits, y[None], jnp.ones(1, bool))

        grads = jax.grad(loss)((fast[0], context[0]))
        moved = []
        for (value, state), grad in zip((fast, context), grads, strict=True):
            updates, state = adam.update(grad, state, value)
            moved.append((optax.apply_updates(value, updates), state))
        return moved

    trees = {role: params[role] for role in ("cln", "film")}
    fast, context = (trees, adam.init(trees)), (zero, adam.init(zero))
    for i, y in enumerate(label):
        if i == 0 or y != label[i - 1]:
            context = (zero, adam.init(zero))
        fast, context = step(fast, context, stems[i], jnp.asarray(y))
    return params | fast[0] | {"context": zero}


@pytest.mark.parametrize("label", [[0, 0, 1, 1, 1], [2, 0, 2, 2, 1]])
def test_the_stream_of_the_meta_test_by_hand(label):
    net = tiny.network("oml_film")
    params = tiny.parameters(net)
    stems = jax.jit(net.stem)(params, tiny.first(tiny.tasks(support=5)).support.inputs)
    expected = learned_by_hand(net, params, stems, label, 0.05)
    none = jnp.zeros((5, 0), jnp.int32), jnp.zeros((5, 0), bool)
    learn = functools.partial(heads.learn_stream, network=after_stem(net), learning_rate=0.05)
    found = jax.jit(learn)(params, stems, jnp.array(label), none)
    tiny.assert_close(found, expected, 1e-4)
    tiny.assert_same(found["fen"], params["fen"])
    assert np.any(found["film"]["layer_1"]["bias"] != params["film"]["layer_1"]["bias"])
    assert not np.any(found["context"]["z"])


def test_the_context_alone_may_be_fast():
    """As in CAVIA: what makes gamma and beta of it is meta-learned, and adapts to nothing."""
    learner = Learner(("cln", "context"), (Phase("each"),))
    net = tiny.network(learner)
    zero = {"context": {"z": jnp.zeros(CONTEXT_SIZE)}}
    params, tasks = tiny.parameters(net) | zero, tiny.tasks()
    outer = OuterConfig(lr=0.1)
    tx = meta_train.outer_optimizer(outer)

    @jax.jit
    def run(params, tasks):
        support = tiny.first(meta_train.encode_tasks(params, tasks, net)).support
        adapted, _ = adapt(params, support, network=net, learner=learner, tx=optax.sgd(0.3), ways=1)
        grads, _ = meta_train.meta_grad(
            params, tasks, network=net, learner=learner, inner=InnerConfig(), outer=outer, ways=1
        )
        state = TrainState(jnp.int32(0), params, tx.init(params))
        return adapted, updates.apply_gradients(state, grads, tx).params, support.inputs

    adapted, trained, stems = run(params, tasks)
    tiny.assert_same(adapted["film"], params["film"])
    assert np.any(adapted["context"]["z"])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(trained))
    for name, layer in trained["film"].items():
        assert np.any(layer["bias"] != params["film"][name]["bias"]), name
    assert not np.any(trained["context"]["z"])

    assert net.stream_roles == ("cln", "context")
    none = jnp.zeros((4, 0), jnp.int32), jnp.zeros((4, 0), bool)
    learn = functools.partial(heads.learn_stream, network=after_stem(net), learning_rate=0.05)
    learned = jax.jit(learn)(trained, stems, jnp.array([0, 0, 1, 1]), none)
    for role in ("fen", "film", "context"):
        tiny.assert_same(learned[role], trained[role])
    assert np.any(learned["cln"]["hidden"]["kernel"] != trained["cln"]["hidden"]["kernel"])


def test_reset_context_touches_nothing_else():
    params = {"cln": jnp.ones(2), "context": {"z": jnp.ones(3)}}
    tx = optax.partition(
        {role: optax.adam(0.1) for role in params}, {role: role for role in params}
    )
    _, state = tx.update(params, tx.init(params), params)
    fresh = tx.init(params)
    (reset, reset_state), (kept, kept_state) = (
        film.reset_context((params, state), fresh=flag) for flag in (True, False)
    )
    tiny.assert_same(reset, params | {"context": {"z": jnp.zeros(3)}})
    tiny.assert_same(reset_state.inner_states["context"], fresh.inner_states["context"])
    tiny.assert_same(reset_state.inner_states["cln"], state.inner_states["cln"])
    tiny.assert_same((kept, kept_state), (params, state))


@pytest.mark.slow
def test_a_run_of_oracle_oml_film(tmp_path):
    lines = programs.succeed(
        tmp_path, learner="oml_film", tasks__labels="true", test__heads="sgd,sgd_reservoir"
    )
    results = programs.results(tmp_path)
    assert results["learner"] == "oml_film" and results["oracle"]
    heads = [c["head"] for c in (results["meta_test"], *results["comparisons"])]
    assert heads[:2] == ["sgd", "sgd_reservoir"], lines
    trained = continual.ContinualClassifier.load(tmp_path).params
    assert all(np.any(layer["bias"]) for layer in trained["film"].values())  # no identity now
    assert not np.any(trained["context"]["z"])
