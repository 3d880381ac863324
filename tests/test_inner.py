"""The inner loop: by hand, and what a row of the table reduces to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from meml_jax import meta_train
from meml_jax.config import InnerConfig, OuterConfig
from meml_jax.inner import adapt, inner_batches, inner_loop, pooled_logits
from meml_jax.learners import LEARNERS, Learner, Phase, get_learner
from meml_jax.types import Batch, UserError

LR = 0.3


def support_of(net, params, *, rows=4, seed=0):
    """What the inner loop gets of a support set with one label."""
    task = tiny.first(tiny.tasks(seed, support=rows))
    x = net.stem(params, task.support.inputs)
    return Batch(x, task.support.label, task.support.mask)


def run(name, support, params, net, *, ways=1, **options):
    learner = tiny.learner_of(name)
    return jax.jit(
        lambda params, support: adapt(
            params, support, network=net, learner=learner, tx=optax.sgd(LR), ways=ways, **options
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


@pytest.mark.parametrize("start, real", [(0.0, True), (1.0, False)])
def test_what_is_differentiated_through_adam_needs_eps_root(start, real):
    """All gradients so far are exactly 0: of steps at the minimum, or of one that is padding."""
    batches = Batch(jnp.zeros((2, 1, 2)), jnp.zeros((2, 1), int), jnp.array([[real], [True]]))

    def masked(fast, batch):
        loss = jnp.where(batch.mask[0], quadratic(fast, batch)[0], 0.0)
        return loss, loss

    def slope(tx):
        run = lambda fast: jnp.sum(inner_loop(masked, fast, batches, tx)[0][0])  # noqa: E731
        return jax.jit(jax.grad(run))(jnp.full(2, start))

    assert np.all(np.isnan(slope(optax.adam(LR))))
    assert np.all(np.isfinite(slope(optax.adam(LR, eps_root=1e-8))))


def test_the_number_of_classes_must_be_said():
    """With a default of 1 an episode would be pooled from one of its classes only."""
    net = tiny.network("meml")
    params = tiny.parameters(net)
    support = support_of(net, params)
    settings = {"network": net, "learner": LEARNERS["meml"]}
    for call in (
        lambda: adapt(params, support, tx=optax.sgd(LR), **settings),
        lambda: pooled_logits(params, support.inputs, support, network=net, pooling="mean"),
        lambda: meta_train.meta_loss(
            params, tiny.tasks(), inner=InnerConfig(), outer=OuterConfig(), **settings
        ),
    ):
        with pytest.raises(TypeError, match="'ways'"):
            call()


@pytest.mark.parametrize(
    "name, steps",
    [
        ("meml", 1), ("meml_mean", 1), ("oml_single", 1), ("oml", 4), ("meml_released", 2),
        ("maml", 1), ("oml_film", 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("repeats", [1, 3])
def test_number_of_updates(name, steps, repeats):
    net = tiny.network(name)
    params = tiny.parameters(net)
    options = InnerConfig(steps=repeats)
    _, info = run(name, support_of(net, params), params, net, options=options)
    steps *= repeats
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


def cln_gradients(cln, features, label):
    """Loss of one row, its gradients by parameter and by the features, for a CLN without ReLU."""
    hidden = features @ cln["hidden"]["kernel"] + cln["hidden"]["bias"]
    logits = hidden @ cln["output"]["kernel"] + cln["output"]["bias"]
    probability = np.exp(logits - logits.max())
    probability /= probability.sum()
    d_logits = probability - np.eye(len(logits))[label]
    d_hidden = cln["output"]["kernel"] @ d_logits
    grads = {
        "hidden": {"kernel": np.outer(features, d_hidden), "bias": d_hidden},
        "output": {"kernel": np.outer(hidden, d_logits), "bias": d_logits},
    }
    return -np.log(probability[label]), grads, cln["hidden"]["kernel"] @ d_hidden


def descend(tree, grads):
    return jax.tree.map(lambda x, g: x - LR * g, tree, grads)


def as_numpy(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def test_meml_by_hand():
    """Equations (1) to (3) and their gradients in numpy."""
    net = tiny.network("meml", cln_relu=False)
    params = tiny.parameters(net)
    support = support_of(net, params)
    adapted, info = run("meml", support, params, net)

    cln, attention = as_numpy(params["cln"]), as_numpy(params["attention"])
    r = np.maximum(as_numpy(support.inputs), 0)
    hidden = np.tanh(r @ attention["hidden"]["kernel"] + attention["hidden"]["bias"])
    scores = (hidden @ attention["output"]["kernel"] + attention["output"]["bias"])[:, 0]
    alpha = np.exp(scores) / np.exp(scores).sum()
    loss, cln_grads, d_example = cln_gradients(cln, alpha @ r, int(support.label[0]))
    d_alpha = r @ d_example
    d_scores = (alpha * (d_alpha - alpha @ d_alpha))[:, None]
    d_inside = d_scores @ attention["output"]["kernel"].T * (1 - hidden**2)
    attention_grads = {
        "hidden": {"kernel": r.T @ d_inside, "bias": d_inside.sum(axis=0)},
        "output": {"kernel": hidden.T @ d_scores, "bias": d_scores.sum(axis=0)},
    }
    np.testing.assert_allclose(info.loss, [loss], rtol=1e-5)
    tiny.assert_close(as_numpy(adapted["cln"]), descend(cln, cln_grads), 1e-5)
    tiny.assert_close(as_numpy(adapted["attention"]), descend(attention, attention_grads), 1e-5)


def test_oml_by_hand():
    """One step an image, in order, in numpy."""
    net = tiny.network("oml", cln_relu=False)
    params = tiny.parameters(net)
    support = support_of(net, params)
    adapted, info = run("oml", support, params, net)
    cln, losses = as_numpy(params["cln"]), []
    for p, label in zip(np.asarray(support.inputs), np.asarray(support.label), strict=True):
        loss, grads, _ = cln_gradients(cln, np.maximum(p, 0), label)
        cln = descend(cln, grads)
        losses.append(loss)
    np.testing.assert_allclose(info.loss, losses, rtol=1e-5)
    tiny.assert_close(as_numpy(adapted["cln"]), cln, 1e-5)


def mean(trees):
    return jax.tree.map(lambda *x: np.mean(x, axis=0), *trees)


def test_maml_by_hand():
    """All rows at once, through the encoder (one tanh layer), in numpy, in each of two steps."""
    net = tiny.network("maml", cln_relu=False)
    params = tiny.parameters(net)
    support = tiny.first(tiny.tasks()).support
    support = dataclasses.replace(support, label=jnp.array([0, 3, 3, 1]))
    cln, fen, losses = as_numpy(params["cln"]), as_numpy(params["fen"]), []
    for steps in (1, 2):
        rows = []
        for image, y in zip(np.asarray(support.inputs), np.asarray(support.label), strict=True):
            p = np.tanh(image.ravel() @ fen["kernel"] + fen["bias"])
            loss, cln_grads, d_features = cln_gradients(cln, np.maximum(p, 0), y)
            d_inside = d_features * (p > 0) * (1 - p**2)
            fen_grads = {"kernel": np.outer(image.ravel(), d_inside), "bias": d_inside}
            rows.append({"loss": loss, "cln": cln_grads, "fen": fen_grads})
        found = mean(rows)
        losses.append(found["loss"])
        cln, fen = descend(cln, found["cln"]), descend(fen, found["fen"])
        options = InnerConfig(steps=steps)
        adapted, info = run("maml", support, params, net, ways=3, options=options)
        np.testing.assert_allclose(info.loss, losses, rtol=1e-5)
        tiny.assert_close(as_numpy(adapted["cln"]), cln, 1e-5)
        tiny.assert_close(as_numpy(adapted["fen"]), fen, 1e-5)


def test_maml_on_the_head_by_hand():
    """ANIL: the first of two steps is the by-hand one, the second starts where it ended."""
    net = tiny.network("anil", cln_relu=False)
    params = tiny.parameters(net)
    support = dataclasses.replace(support_of(net, params), label=jnp.array([0, 3, 3, 1]))
    cln, losses = as_numpy(params["cln"]), []
    for steps in (1, 2):
        rows = [
            cln_gradients(cln, np.maximum(p, 0), y)
            for p, y in zip(as_numpy(support.inputs), np.asarray(support.label), strict=True)
        ]
        losses.append(np.mean([loss for loss, _, _ in rows]))
        cln = descend(cln, mean([grads for _, grads, _ in rows]))
        adapted, info = run("anil", support, params, net, options=InnerConfig(steps=steps))
        np.testing.assert_allclose(info.loss, losses, rtol=1e-5)
        tiny.assert_close(as_numpy(adapted["cln"]), cln, 1e-5)
        tiny.assert_same(adapted["fen"], params["fen"])


def test_one_meta_example_a_class_by_hand():
    """Three classes of one, two and three images, in mixed order: one row of the loss for each."""
    net = tiny.network("meml_mean", cln_relu=False)
    params = tiny.parameters(net)
    support = support_of(net, params, rows=7)
    label = jnp.array([4, 0, 4, 2, 0, 4, 1])
    mask = jnp.array([True] * 6 + [False])  # the class of the padding is none
    adapted, info = run("meml_mean", Batch(support.inputs, label, mask), params, net, ways=3)
    cln, r = as_numpy(params["cln"]), np.maximum(as_numpy(support.inputs), 0)
    rows = [
        cln_gradients(cln, r[:6][np.asarray(label[:6]) == way].mean(axis=0), way)
        for way in (0, 2, 4)
    ]
    np.testing.assert_allclose(info.loss, [np.mean([loss for loss, _, _ in rows])], rtol=1e-5)
    cln = descend(cln, mean([grads for _, grads, _ in rows]))
    tiny.assert_close(as_numpy(adapted["cln"]), cln, 1e-5)


@pytest.mark.parametrize("name", ["meml", "meml_mean"])
def test_one_class_in_room_for_several_is_plain_meml_and_a_missing_class_counts_for_nothing(name):
    net = tiny.network(name)
    params = tiny.parameters(net)
    support = support_of(net, params)
    plain, _ = run(name, support, params, net)
    for ways in (2, 3):
        grouped, info = run(name, support, params, net, ways=ways)
        tiny.assert_close(grouped, plain)
        assert bool(info.stepped.all()) and np.all(np.isfinite(info.loss))


@pytest.mark.parametrize("fields", [("al",), ("all", "atention")])
def test_a_phase_of_no_kind_is_refused(fields):
    with pytest.raises(UserError, match=f"{fields[-1]!r}, expected one of"):
        Phase(*fields)


@pytest.mark.parametrize(
    "fast, phases, message",
    [
        ((), (Phase("each"),), "adapts nothing without"),
        (("cln",), (), "adapts nothing without"),
        (("cln", "cln"), (Phase("each"),), "roles, each once"),
        ("cln", (Phase("each"),), "expected tuples such as"),
        (("cln",), Phase("each"), "expected tuples such as"),
        (("cln",), ("each",), "expected tuples such as"),
    ],
)
def test_a_row_that_cannot_be_is_refused(fast, phases, message):
    with pytest.raises(UserError, match=message):
        Learner(fast, phases)


@pytest.mark.parametrize("role", ["cnl", "attention"])  # no phase pools by attention
def test_a_role_that_the_network_does_not_have_is_refused(role):
    learner = Learner(("cln", role), (Phase("all"),))
    expected = rf"roles \['{role}'\], but the network has \['cln', 'fen'\]"
    with pytest.raises(UserError, match=expected):
        tiny.parameters(tiny.network(learner))


def test_no_step_at_all_is_refused():
    net = tiny.network("meml")
    params = tiny.parameters(net)
    with pytest.raises(AssertionError):
        run("meml", support_of(net, params), params, net, options=InnerConfig(steps=0))


def test_what_a_row_says_is_seen():
    assert len({repr(learner) for learner in LEARNERS.values()}) == len(LEARNERS)


def test_weight_scales_the_inner_step():
    """With plain gradient descent a weight of the loss is one of the learning rate."""
    net = tiny.network("meml")
    params = tiny.parameters(net)
    support = support_of(net, params)
    settings = {"network": net, "learner": LEARNERS["meml"], "ways": 1}
    weighted, info = adapt(params, support, tx=optax.sgd(LR), weight=0.25, **settings)
    slower, plain = adapt(params, support, tx=optax.sgd(0.25 * LR), **settings)
    tiny.assert_close(weighted, slower)
    np.testing.assert_array_equal(info.loss, plain.loss)  # what is reported has no weight
    still, _ = adapt(params, support, tx=optax.sgd(LR), weight=0.0, **settings)
    tiny.assert_same(still, params)


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
