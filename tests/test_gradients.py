"""The meta-gradient: against central differences, and what it must and must not depend on."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from meml_jax import losses, meta_train
from meml_jax.config import InnerConfig, OuterConfig
from meml_jax.inner import adapt, inner_batches, inner_loop, pooled_logits
from meml_jax.learners import LEARNERS

STEP = 1e-7  # with larger steps kinks of ReLU fake errors of a few per cent
INNER = InnerConfig(lr=0.5)  # large, so that second-order terms are
OUTER = OuterConfig(weight_on="inner")  # the metric `loss` is then the meta-loss itself
PAPER = {"cln_relu": True, "attention_feature": "relu"}
RELEASED = {"cln_relu": False, "attention_feature": "preactivation"}
VARIANTS = {
    "paper": PAPER,
    "released": RELEASED,
    "relu_linear": PAPER | {"cln_relu": False},
    "preactivation_relu": RELEASED | {"cln_relu": True},
}
CASES = [
    pytest.param(
        name,
        VARIANTS[variant],
        dense,
        id=f"{name}-{variant}-{'dense' if dense else 'fen'}",
        marks=[pytest.mark.slow] if slow else [],
    )
    for name, variant, dense, slow in [
        ("oml", "paper", True, False),
        ("oml", "released", False, True),
        ("oml_single", "paper", True, False),
        ("meml", "paper", True, False),
        ("meml", "paper", False, False),
        ("meml", "released", True, False),
        ("meml", "relu_linear", True, True),
        ("meml", "preactivation_relu", True, True),
        ("meml_released", "paper", True, True),
        ("meml_released", "released", True, False),
        ("meml_mean", "paper", True, True),
        ("meml_mean", "released", True, False),
        ("anil", "paper", True, False),
        ("oml_film", "paper", True, False),
    ]
]
EPISODES = [
    pytest.param("meml_few_shot", PAPER, True, 3, 1, id="meml-3-ways"),
    pytest.param("maml", PAPER, True, 3, 2, id="maml-3-ways-2-steps"),
]
assert {case.values[0] for case in CASES + EPISODES} == {
    # The gradient of a first-order method is the slope of no loss.
    name
    for name, learner in LEARNERS.items()
    if not learner.first_order
}


def make(learner, variant, dense, **sizes):
    net = tiny.network(learner, dense=dense, dtype=jnp.float64, **variant)
    image = tiny.IMAGE if dense else tiny.CONV_IMAGE
    tasks = tiny.tasks(3, image=image, dtype=np.float64, **sizes)
    # Seeds for which no role's gradient is small: a difference is rounded to about 1e-9.
    return net, tiny.parameters(net, 0 if dense else 4, np.float64), tasks


def several_classes(tasks):
    """The same images as a few-shot episode of three classes."""
    label = jnp.arange(tasks.support.label.size, dtype=jnp.int32) % 3
    support = dataclasses.replace(tasks.support, label=label.reshape(tasks.support.label.shape))
    return dataclasses.replace(tasks, support=support)


@pytest.mark.parametrize(
    "learner, variant, dense, ways, steps",
    [pytest.param(*case.values, 1, 1, id=case.id) for case in CASES] + EPISODES,
)
def test_equals_central_differences(learner, variant, dense, ways, steps, x64):
    net, params, tasks = make(learner, variant, dense, support=4 * (1 + ways // 2))
    tasks = tasks if ways == 1 else several_classes(tasks)
    inner = dataclasses.replace(INNER, steps=steps)
    settings = {"network": net, "learner": tiny.learner_of(learner), "inner": inner, "outer": OUTER}
    settings["ways"] = ways
    meta_grad = jax.jit(functools.partial(meta_train.meta_grad, **settings))
    grads, _ = meta_grad(params, tasks)

    # Directions are made with numpy, where each new shape costs no compilation.
    params, grads = jax.tree.map(np.asarray, (params, grads))
    zero = jax.tree.map(np.zeros_like, params)
    rng = np.random.default_rng(0)

    def loss(scale, direction):
        moved = jax.tree.map(lambda p, d: p + scale * d, params, direction)
        return float(meta_grad(moved, tasks)[1]["loss"])

    def slope(direction):
        return (loss(STEP, direction) - loss(-STEP, direction)) / (2 * STEP)

    worst = 0.0
    for role, grad in grads.items():
        leaves, structure = jax.tree.flatten(grad)
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
        if role == "context":  # starts at 0 in every task, so its stored value plays no role
            assert norm == 0 == slope(zero | {role: jax.tree.map(np.ones_like, grad)})
            continue
        assert norm > 1e-3, f"the meta-gradient of {role} is {norm:.1e}, too small to measure"
        directions = [[rng.normal(size=leaf.shape) for leaf in leaves] for _ in range(3)]
        for i, leaf in enumerate(leaves):
            # The largest entry of each array, so that no array hides behind another.
            unit = [np.zeros_like(x) for x in leaves]
            unit[i].flat[np.argmax(np.abs(leaf))] = 1.0
            directions.append(unit)
        for direction in directions:
            expected = sum(np.sum(g * d) for g, d in zip(leaves, direction, strict=True))
            found = slope(zero | {role: jax.tree.unflatten(structure, direction)})
            worst = max(worst, abs(found - expected) / norm)
    print(f"max relative error {worst:.1e}")
    assert worst < 1e-5


def loss_by_hand(params, tasks, *, network, learner, tx):
    """The meta-loss of one task with an inner optimizer of one's choice."""
    encoded = tiny.first(meta_train.encode_tasks(params, tasks, network))
    adapted, _ = adapt(params, encoded.support, network=network, learner=learner, tx=tx, ways=1)
    logits, label, mask = pooled_logits(
        adapted, encoded.query.inputs, encoded.query, network=network, pooling="none", ways=1
    )
    return losses.cross_entropy(logits, label, mask)


@pytest.mark.parametrize(
    "name", tiny.mostly_slow(["oml", "meml", "meml_released", "meml_mean"], "meml")
)
def test_is_second_order(name, x64):
    net, params, tasks = make(name, PAPER, True)
    learner = LEARNERS[name]
    stop = optax.stateless(lambda updates, _: jax.lax.stop_gradient(updates))
    orders = {
        "first": optax.chain(optax.sgd(INNER.lr), stop),
        "second": optax.sgd(INNER.lr),
    }
    grads = {
        order: jax.jit(
            jax.grad(functools.partial(loss_by_hand, network=net, learner=learner, tx=tx))
        )(params, tasks)
        for order, tx in orders.items()
    }
    for role in params:
        first, second = grads["first"][role], grads["second"][role]
        difference = optax.tree.norm(jax.tree.map(jnp.subtract, first, second))
        assert difference > 1e-3 * optax.tree.norm(second)
    if learner.uses_attention:
        # rho acts on the query loss through the inner gradient only.
        assert optax.tree.norm(grads["first"]["attention"]) == 0
        assert optax.tree.norm(grads["second"]["attention"]) > 1e-4


def grad_with(learner, net, params, tasks, **options):
    inner = dataclasses.replace(INNER, **options)
    settings = {"network": net, "learner": LEARNERS[learner], "inner": inner, "outer": OUTER}
    settings["ways"] = 1
    return jax.jit(functools.partial(meta_train.meta_grad, **settings))(params, tasks)[0]


@pytest.mark.parametrize("name, first_order", [("meml", {"first_order": True}), ("fomaml", {})])
def test_first_order_is_the_gradient_at_the_adapted_parameters(name, first_order, x64):
    net, params, tasks = make(name, PAPER, True)
    learner = LEARNERS[name]
    first = grad_with(name, net, params, tasks, **first_order)

    @jax.jit
    def by_hand(params, tasks):
        task = tiny.first(meta_train.encode_tasks(params, tasks, net))
        adapted, _ = adapt(
            params, task.support, network=net, learner=learner, tx=optax.sgd(INNER.lr),
            weight=task.weight, ways=1,
        )  # fmt: skip

        def query_loss(fast):
            merged = adapted | fast
            p = net.tail(merged, task.query.inputs)
            rows = pooled_logits(merged, p, task.query, network=net, pooling="none", ways=1)
            return losses.cross_entropy(*rows)

        return jax.grad(query_loss)({role: adapted[role] for role in learner.fast})

    for role, expected in by_hand(params, tasks).items():
        tiny.assert_close(first[role], expected, 1e-9)
    if learner.uses_attention:  # rho acts on the query loss through the inner gradient only
        assert optax.tree.norm(first["attention"]) == 0


@pytest.mark.parametrize("name", tiny.mostly_slow(["oml", "maml", "meml", "oml_film"], "maml"))
def test_rematerialised_steps_give_the_same_gradient(name, x64):
    net, params, tasks = make(name, PAPER, True)
    plain, remat = (grad_with(name, net, params, tasks, remat=x, steps=2) for x in (False, True))
    tiny.assert_close(remat, plain, 1e-12)


def loss_and_grad(name, net, params, tasks):
    settings = {"network": net, "learner": LEARNERS[name], "inner": INNER, "outer": OUTER}
    settings["ways"] = 1
    loss = functools.partial(meta_train.meta_loss, **settings)
    (value, _), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tasks)
    return value, {role: grad[role] for role in ("fen", "cln")}


def test_meml_of_one_image_is_meta_trained_as_oml_single(x64):
    net, params, tasks = make("meml", PAPER, True, support=1)
    meml, single = (loss_and_grad(name, net, params, tasks) for name in ("meml", "oml_single"))
    tiny.assert_close(meml, single, 1e-11)


def test_meml_of_equal_scores_is_meta_trained_as_the_mean(x64):
    net, params, tasks = make("meml", PAPER, True)
    # The scores are equal, so that rho moves nothing; it has a gradient of its own.
    output = jax.tree.map(jnp.zeros_like, params["attention"]["output"])
    params = params | {"attention": params["attention"] | {"output": output}}
    meml, mean = (loss_and_grad(name, net, params, tasks) for name in ("meml", "meml_mean"))
    tiny.assert_close(meml, mean, 1e-11)


@pytest.mark.parametrize(
    "name, dense",
    [
        ("oml", True),
        pytest.param("meml", False, marks=pytest.mark.slow),
        pytest.param("meml_released", True, marks=pytest.mark.slow),
    ],
)
def test_hoisted_equals_reencoded(name, dense, x64):
    net, params, tasks = make(name, PAPER, dense, support=3, query=4)
    learner = LEARNERS[name]

    def reencoded(params):
        """Encode the images anew in every inner step and for the query."""
        support, query = tiny.first(tasks.support), tiny.first(tasks.query)
        fast = {role: params[role] for role in learner.fast}
        for phase in learner.phases:

            def loss_fn(fast, batch, phase=phase):
                merged = params | fast
                p = net.encode(merged, batch.inputs)
                rows = pooled_logits(merged, p, batch, network=net, pooling=phase.pool, ways=1)
                loss = losses.cross_entropy(*rows)
                return loss, loss

            (fast, _), _ = inner_loop(
                loss_fn, fast, inner_batches(support, phase), optax.sgd(INNER.lr)
            )
        p = net.encode(params, query.inputs)
        rows = pooled_logits(params | fast, p, query, network=net, pooling="none", ways=1)
        return losses.cross_entropy(*rows)

    hoisted = functools.partial(loss_by_hand, network=net, learner=learner, tx=optax.sgd(INNER.lr))
    loss, grad = jax.jit(jax.value_and_grad(reencoded))(params)
    expected_loss, expected = jax.jit(jax.value_and_grad(hoisted))(params, tasks)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    if learner.uses_attention:
        # A softmax ignores a shift: the true gradient is 0, what is left is rounding.
        for tree in (grad, expected):
            assert abs(tree["attention"]["output"].pop("bias")[0]) < 1e-15
    tiny.assert_close(grad, expected, 1e-10)


@pytest.mark.slow
def test_adam_inside_with_a_zero_gradient(x64):
    """One image has attention 1 whatever rho is, so the inner gradient of rho is exactly 0.

    The derivative of Adam's square root is infinite there, and 0 * inf is NaN: a learner that is
    differentiated through Adam must set `eps_root`.
    """
    net, params, tasks = make("meml", PAPER, True, support=1)
    learner = LEARNERS["meml"]

    @jax.jit
    def forward(params):
        support = tiny.first(meta_train.encode_tasks(params, tasks, net)).support
        return adapt(params, support, network=net, learner=learner, tx=optax.adam(0.01), ways=1)

    adapted, info = forward(params)
    tiny.assert_same(adapted["attention"], params["attention"])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((adapted, info)))

    tx = optax.adam(0.01, eps_root=1e-8)
    loss = functools.partial(loss_by_hand, network=net, learner=learner, tx=tx)
    grads = jax.jit(jax.grad(loss))(params, tasks)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(grads))
