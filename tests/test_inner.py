"""The inner loop: by hand, and what a row of the table reduces to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from meml_jax.inner import adapt, inner_batches, inner_loop
from meml_jax.learners import LEARNERS, Learner, Phase, get_learner
from meml_jax.types import Batch, UserError

LR = 0.3


def support_of(net, params, *, rows=4, seed=0):
    """Pre-activations of a support set with one label."""
    task = tiny.first(tiny.tasks(seed, support=rows))
    p = net.encode(params, task.support.inputs)
    return Batch(p, task.support.label, task.support.mask)


def run(name, support, params, net):
    learner = tiny.learner_of(name)
    return jax.jit(
        lambda params, support: adapt(
            params, support, network=net, learner=learner, tx=optax.sgd(LR)
        )
    )(params, support)


def quadratic(fast, batch):
    loss = 0.5 * jnp.sum((fast - batch.inputs[0]) ** 2)
    return loss, loss


def test_steps_by_hand():
    targets = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 5.0]], np.float32)
    batches = Batch(jnp.asarray(targets)[:, None], jnp.zeros((3, 1), int), jnp.ones((3, 1), bool))
    (fast, _), info = inner_loop(quadratic, jnp.zeros(2), batches, optax.sgd(LR))
    expected, losses = np.zeros(2), []
    for target in targets:
        losses.append(0.5 * np.sum((expected - target) ** 2))
        expected -= LR * (expected - target)
    np.testing.assert_allclose(fast, expected, rtol=1e-6)
    np.testing.assert_allclose(info.loss, losses, rtol=1e-6)


def test_a_masked_step_leaves_parameters_and_optimizer_alone():
    targets = jnp.ones((3, 1, 2))
    mask = jnp.array([[True], [False], [True]])
    label = jnp.zeros((3, 1), int)
    kept = jnp.array([0, 2])
    tx = optax.adam(LR)
    with_gap = inner_loop(quadratic, jnp.zeros(2), Batch(targets, label, mask), tx)
    without = inner_loop(quadratic, jnp.zeros(2), Batch(targets[kept], label[kept], mask[kept]), tx)
    tiny.assert_same(with_gap[0], without[0])
    np.testing.assert_array_equal(with_gap[1].stepped, [True, False, True])


def test_adam_is_finite_at_a_zero_gradient():
    batches = Batch(jnp.zeros((2, 1, 2)), jnp.zeros((2, 1), int), jnp.ones((2, 1), bool))
    (fast, _), _ = inner_loop(quadratic, jnp.zeros(2), batches, optax.adam(LR))
    np.testing.assert_array_equal(fast, np.zeros(2))


@pytest.mark.parametrize(
    "name, steps",
    [("meml", 1), ("meml_mean", 1), ("oml_single", 1), ("oml", 4), ("meml_released", 2)],
)
def test_number_of_updates(name, steps):
    net = tiny.network(name)
    params = tiny.parameters(net)
    _, info = run(name, support_of(net, params), params, net)
    assert int(info.stepped.sum()) == len(info.stepped) == steps


@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_only_fast_roles_move_and_padding_changes_nothing(name):
    net = tiny.network(name)
    params = tiny.parameters(net)
    support = support_of(net, params)
    adapted, _ = run(name, support, params, net)
    for role in params:
        same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), adapted[role], params[role])
        assert all(jax.tree.leaves(same)) == (role not in LEARNERS[name].fast), role
    padded = Batch(
        jnp.concatenate([support.inputs, jnp.full_like(support.inputs[:3], 1e3)]),
        jnp.pad(support.label, (0, 3)),
        jnp.pad(support.mask, (0, 3)),
    )
    tiny.assert_close(run(name, padded, params, net)[0], adapted)


def test_meml_by_hand():
    net = tiny.network("meml")
    params = tiny.parameters(net)
    support = support_of(net, params)
    adapted, info = run("meml", support, params, net)

    def loss(fast):
        merged = params | fast
        r = jax.nn.relu(support.inputs)
        alpha = jax.nn.softmax(net.score(merged, support.inputs))
        logits = net.classify(merged, (alpha @ r)[None])[0]
        return jax.nn.logsumexp(logits) - logits[support.label[0]]

    fast = {role: params[role] for role in ("cln", "attention")}
    value, grads = jax.value_and_grad(loss)(fast)
    expected = jax.tree.map(lambda x, g: x - LR * g, fast, grads)
    tiny.assert_close({role: adapted[role] for role in fast}, expected)
    np.testing.assert_allclose(info.loss, [value], rtol=1e-6)


def test_meml_of_one_image_is_oml_single():
    net = tiny.network("meml")
    params = tiny.parameters(net)
    support = support_of(net, params, rows=1)
    meml, _ = run("meml", support, params, net)
    single, _ = run("oml_single", support, params, net)
    tiny.assert_close(meml["cln"], single["cln"])


def test_meml_of_equal_scores_is_the_mean():
    net = tiny.network("meml")
    params = tiny.parameters(net)
    flat = params["attention"] | {
        "output": jax.tree.map(jnp.zeros_like, params["attention"]["output"])
    }
    params = params | {"attention": flat}
    support = support_of(net, params)
    meml, _ = run("meml", support, params, net)
    mean, _ = run("meml_mean", support, params, net)
    tiny.assert_close(meml["cln"], mean["cln"])


def test_order_matters_to_oml_alone():
    for name in ("meml", "meml_mean", "oml"):
        net = tiny.network(name)
        params = tiny.parameters(net)
        support = support_of(net, params)
        turned = jax.tree.map(lambda x: x[::-1], support)
        a, b = (run(name, s, params, net)[0]["cln"]["hidden"]["kernel"] for s in (support, turned))
        assert bool(jnp.allclose(a, b, rtol=1e-6, atol=1e-7)) == (name != "oml")


def test_a_fast_encoder_is_encoded_in_every_step():
    learner = dataclasses.replace(LEARNERS["oml"], fast=("fen", "cln"))
    net = tiny.network(learner)
    params = tiny.parameters(net)
    task = tiny.first(tiny.tasks())
    adapted, _ = run(learner, task.support, params, net)
    assert not bool(jnp.all(adapted["fen"]["kernel"] == params["fen"]["kernel"]))


def test_batches_of_a_phase():
    support = Batch(jnp.arange(6.0).reshape(3, 2), jnp.arange(3), jnp.ones(3, bool))
    shapes = {
        rows: inner_batches(support, Phase(rows)).inputs.shape for rows in ("each", "first", "all")
    }
    assert shapes == {"each": (3, 1, 2), "first": (1, 1, 2), "all": (1, 3, 2)}


def test_unknown_learner_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'meml_mean'"):
        get_learner("meml_meen")
    assert isinstance(get_learner("oml"), Learner)
