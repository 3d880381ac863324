"""Equations (1) and (2) and their refinements, by hand, and what must not change a result."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from meml_jax import meta_train, pooling
from meml_jax.config import InnerConfig, OuterConfig
from meml_jax.learners import LEARNERS
from meml_jax.pooling import pool
from meml_jax.types import UserError

ROWS, DIM, GROUPS = 7, 3, 3  # fixed, so that every example runs one compiled function
pooled = jax.jit(pool, static_argnums=4)
examples = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def rows(draw):
    """Scores, features, groups and mask; few valid rows are as likely as many."""
    scores = draw(st.lists(st.floats(-30, 30, width=32), min_size=ROWS, max_size=ROWS))
    group = draw(st.lists(st.integers(0, GROUPS - 1), min_size=ROWS, max_size=ROWS))
    mask = draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    seed = draw(st.integers(0, 1000))
    features = np.random.default_rng(seed).normal(size=(ROWS, DIM)).astype(np.float32)
    return np.float32(scores), features, np.int32(group), np.array(mask)


def by_hand(scores, features, group, mask, num_groups):
    alpha = np.zeros((num_groups, len(scores)))
    for g in range(num_groups):
        members = [k for k in range(len(scores)) if group[k] == g and mask[k]]
        total = sum(np.exp(np.float64(scores[k])) for k in members)
        for k in members:
            alpha[g, k] = np.exp(np.float64(scores[k])) / total
    return alpha @ features, alpha


@examples
@given(rows())
def test_equals_equations_1_and_2(example):
    meta_example, alpha = pooled(*example, GROUPS)
    expected, expected_alpha = by_hand(*example, GROUPS)
    np.testing.assert_allclose(alpha, expected_alpha, rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(meta_example, expected, rtol=1e-4, atol=1e-5)
    _, _, group, mask = example
    filled = [np.any(mask & (group == g)) for g in range(GROUPS)]
    np.testing.assert_allclose(alpha.sum(axis=1), filled, rtol=1e-6)
    assert np.all(alpha[:, ~mask] == 0)


@examples
@given(rows(), st.permutations(range(ROWS)))
def test_order_of_rows_does_not_matter(example, order):
    meta_example, alpha = pooled(*example, GROUPS)
    moved, moved_alpha = pooled(*(x[np.array(order)] for x in example), GROUPS)
    np.testing.assert_allclose(moved, meta_example, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moved_alpha, alpha[:, np.array(order)], rtol=1e-5, atol=1e-12)


@examples
@given(rows(), st.floats(-(2.0**99), 2.0**99, width=32))
def test_padding_does_not_matter(example, garbage):
    scores, features, group, mask = example
    padded = (
        np.append(scores, np.float32([garbage, -garbage])),
        np.append(features, np.full((2, DIM), garbage, np.float32), axis=0),
        np.append(group, np.int32([0, GROUPS - 1])),
        np.append(mask, [False, False]),
    )
    meta_example, alpha = pooled(*example, GROUPS)
    found, found_alpha = pooled(*padded, GROUPS)
    np.testing.assert_allclose(found, meta_example, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found_alpha[:, :ROWS], alpha, rtol=1e-6)
    assert np.all(found_alpha[:, ROWS:] == 0)


@functools.partial(jax.jit, static_argnums=4)
def gradients(scores, features, group, mask, num_groups):
    def loss(scores, features):
        meta_example, alpha = pool(scores, features, group, mask, num_groups)
        return jnp.sum(jnp.sin(meta_example)) + jnp.sum(alpha**2)

    return jax.grad(loss, argnums=(0, 1))(scores, features)


@pytest.mark.parametrize("valid", [0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_gradients_are_finite(valid, scale):
    rng = np.random.default_rng(0)
    scores = np.float32(rng.normal(size=ROWS) * scale)
    features = np.float32(rng.normal(size=(ROWS, DIM)))
    mask = np.arange(ROWS) < valid
    for value in gradients(scores, features, np.zeros(ROWS, np.int32), mask, 2):
        assert np.all(np.isfinite(value))
        assert np.all(value[valid:] == 0)
    meta_example, alpha = pooled(scores, features, np.zeros(ROWS, np.int32), mask, 2)
    assert np.all(meta_example[1] == 0) and np.all(alpha[1] == 0)
    if valid == 0:
        assert np.all(meta_example == 0) and np.all(alpha == 0)
    if valid == 1:
        assert alpha[0, 0] == 1
        np.testing.assert_allclose(meta_example[0], features[0], rtol=1e-6)


@pytest.mark.slow
def test_second_derivative_of_an_empty_group_is_finite():
    def loss(scores):
        features = jnp.ones((ROWS, DIM)) * scores[:, None]
        empty = jnp.zeros(ROWS, bool)
        return jnp.sum(pool(scores, features, jnp.zeros(ROWS, jnp.int32), empty, 1)[0])

    hessian = jax.hessian(loss)(jnp.arange(ROWS, dtype=jnp.float32))
    assert np.all(hessian == 0)


def test_equal_scores_give_the_mean_and_a_shift_changes_nothing():
    rng = np.random.default_rng(1)
    features = np.float32(rng.normal(size=(ROWS, DIM)))
    group, mask = np.zeros(ROWS, np.int32), np.ones(ROWS, bool)
    mean, alpha = pooled(np.full(ROWS, 3.5, np.float32), features, group, mask, 1)
    np.testing.assert_allclose(alpha, np.full((1, ROWS), 1 / ROWS), rtol=1e-6)
    np.testing.assert_allclose(mean[0], features.mean(axis=0), rtol=1e-5, atol=1e-6)
    scores = np.float32(rng.normal(size=ROWS))
    for shift in (-200.0, 50.0):
        shifted = np.float32(scores + shift)
        found = pooled(shifted, features, group, mask, 1)[1]
        np.testing.assert_allclose(found, pooled(scores, features, group, mask, 1)[1], rtol=1e-3)


def test_wrong_shapes_fail_at_trace_time():
    with pytest.raises(AssertionError):
        pool(jnp.zeros(3), jnp.zeros((3, 2)), jnp.zeros(2, jnp.int32), jnp.ones(3, bool), 1)


# Outliers.

fewer = settings(max_examples=25, deadline=None, derandomize=True)

inliers = jax.jit(
    pooling.inliers, static_argnums=3, static_argnames=("keep_nearest", "max_distance")
)


def inliers_by_hand(features, group, mask, num_groups, keep_nearest, max_distance):
    kept = mask.copy()
    for g in range(num_groups):
        rows = np.flatnonzero(mask & (group == g))
        if len(rows) == 0:
            continue
        x = np.float64(features[rows])
        distance = np.linalg.norm(x - x.mean(axis=0), axis=1)
        limit = np.sort(distance)[max(int(np.ceil(keep_nearest * len(rows) - 1e-4)), 1) - 1]
        limit = min(limit, max_distance * np.sqrt(np.mean(distance**2)))
        kept[rows] = distance <= limit * (1 + 5e-5)
    return kept


@fewer
@given(rows(), st.sampled_from([(1.0, 1.0), (1.0, 1.3), (0.5, 9.0), (0.34, 1.2)]))
def test_inliers_equal_their_definition(example, limits):
    _, *example = example
    keep, distance = limits
    found = inliers(*example, GROUPS, keep_nearest=keep, max_distance=distance)
    np.testing.assert_array_equal(found, inliers_by_hand(*example, GROUPS, keep, distance))
    _, group, mask = example
    assert not np.any(found & ~mask)
    for g in range(GROUPS):
        rows = mask & (group == g)
        if np.sum(rows) <= 2:  # both of two are equally far away
            np.testing.assert_array_equal(np.asarray(found)[rows], True)
        else:
            assert 1 <= np.sum(np.asarray(found)[rows])


@fewer
@given(rows(), st.permutations(range(ROWS)), st.floats(-(2.0**60), 2.0**60, width=32))
def test_order_and_padding_do_not_change_the_choice(example, order, garbage):
    _, features, group, mask = example
    settings = {"keep_nearest": 0.5, "max_distance": 1.3}
    found = np.asarray(inliers(features, group, mask, GROUPS, **settings))
    order = np.array(order)
    moved = inliers(features[order], group[order], mask[order], GROUPS, **settings)
    np.testing.assert_array_equal(moved, found[order])
    padded = (
        np.append(features, np.full((2, DIM), garbage, np.float32), axis=0),
        np.append(group, np.int32([0, GROUPS - 1])),
        np.append(mask, [False, False]),
    )
    np.testing.assert_array_equal(inliers(*padded, GROUPS, **settings)[:ROWS], found)


def test_one_far_image_is_discarded_and_the_rest_is_pooled_as_if_it_were_not_there():
    rng = np.random.default_rng(0)
    features = np.float32(rng.normal(size=(ROWS, DIM)))
    features[2] += 20
    group, mask = np.zeros(ROWS, np.int32), np.ones(ROWS, bool)
    others = mask & (np.arange(ROWS) != 2)
    expected = pool(features[:, 0], features, group, others, 1)
    for options in (InnerConfig(keep_nearest=6 / 7), InnerConfig(max_distance=2.0)):
        found = pooling.aggregate(lambda x: x[:, 0], features, group, mask, 1, options=options)
        tiny.assert_same(found, expected)


# Sub-groups.


def hierarchy_by_hand(score, features, group, mask, num_groups, size):
    whole, alpha = np.zeros((num_groups, features.shape[1])), np.zeros((num_groups, len(group)))
    for g in range(num_groups):
        rows = np.flatnonzero(mask & (group == g))
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        inner = [np.exp(score(features[part])) for part in parts]
        inner = [weight / weight.sum() for weight in inner]
        examples = np.array([w @ features[part] for w, part in zip(inner, parts, strict=True)])
        if len(parts):
            outer = np.exp(score(examples))
            outer /= outer.sum()
            whole[g] = outer @ examples
            for beta, weight, part in zip(outer, inner, parts, strict=True):
                alpha[g, part] = beta * weight
    return whole, alpha


def nonlinear_score(x):
    """What a network may compute, in numpy and in JAX."""
    return (x * np.float32([[1.0, -0.5, 0.3]])).sum(axis=1) ** 2 / 4


hierarchical = jax.jit(
    functools.partial(pooling.hierarchical_pool, nonlinear_score),
    static_argnums=3,
    static_argnames="sub_group_size",
)


@fewer
@given(rows(), st.sampled_from([1, 2, 3, ROWS, 50]))
def test_sub_groups_equal_their_definition_and_both_ends_are_plain_attention(example, size):
    _, *example = example
    found = hierarchical(*example, GROUPS, sub_group_size=size)
    expected = hierarchy_by_hand(nonlinear_score, *example, GROUPS, size)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if size in (1, ROWS, 50):
        plain = pooled(nonlinear_score(example[0]), *example, GROUPS)
        for a, b in zip(found, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@fewer
@given(rows(), st.integers(0, ROWS), st.floats(-(2.0**20), 2.0**20, width=32))
def test_padding_anywhere_does_not_shift_the_sub_groups(example, place, garbage):
    _, features, group, mask = example
    whole, alpha = hierarchical(features, group, mask, GROUPS, sub_group_size=2)
    found, found_alpha = hierarchical(
        np.insert(features, place, np.float32(garbage), axis=0),
        np.insert(group, place, 1),
        np.insert(mask, place, False),
        GROUPS,
        sub_group_size=2,
    )
    np.testing.assert_allclose(found, whole, rtol=1e-6, atol=1e-6)
    assert np.all(found_alpha[:, place] == 0)
    np.testing.assert_allclose(np.delete(found_alpha, place, axis=1), alpha, rtol=1e-6)


def test_equal_scores_give_the_mean_of_the_sub_groups_means():
    features = np.float32(np.arange(5)[:, None] * np.ones(DIM))
    whole, alpha = pooling.hierarchical_pool(
        lambda x: jnp.zeros(len(x)), features, np.zeros(5, np.int32), np.ones(5, bool), 1,
        sub_group_size=2,
    )  # fmt: skip
    np.testing.assert_allclose(whole[0], (0.5 + 2.5 + 4) / 3, rtol=1e-6)
    np.testing.assert_allclose(alpha[0], np.array([1, 1, 1, 1, 2]) / 6, rtol=1e-6)


# Both in the inner loop.

REFINED = InnerConfig(lr=0.5, keep_nearest=0.7, max_distance=1.5, sub_group_size=2)
METHODS = {
    "outliers": InnerConfig(lr=0.5, keep_nearest=0.6, max_distance=1.05),
    "sub_groups": InnerConfig(lr=0.5, sub_group_size=2),
}


@jax.jit
def refined_derivatives(features, mask):
    def loss(features):
        whole, alpha = pooling.aggregate(
            nonlinear_score, features, np.zeros(ROWS, np.int32), mask, 2, options=REFINED
        )
        return jnp.sum(jnp.sin(whole)) + jnp.sum(alpha**2)

    return jax.grad(loss)(features), jax.hessian(loss)(features)


@pytest.mark.parametrize("valid", [0, 1, 2])
def test_gradients_of_the_refinements_are_finite(valid):
    features = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    gradient, hessian = refined_derivatives(features, np.arange(ROWS) < valid)
    assert np.all(np.isfinite(gradient)) and np.all(np.isfinite(hessian))
    assert np.all(gradient[valid:] == 0)
    if valid:
        assert np.any(gradient[:valid] != 0)


@functools.cache
def meta_grad(options):
    """Parameters, the gradient of the meta-loss of MEML by roles, and the loss as a function."""
    net = tiny.network("meml", dtype=jnp.float64)
    run = jax.jit(
        functools.partial(
            meta_train.meta_grad,
            tasks=tiny.tasks(3, support=7, dtype=np.float64),
            network=net,
            learner=LEARNERS["meml"],
            inner=options,
            outer=OuterConfig(weight_on="inner"),  # the metric `loss` is then the meta-loss itself
            ways=1,
        )
    )
    params = jax.tree.map(np.asarray, tiny.parameters(net, 0, np.float64))
    grads = jax.tree.map(np.asarray, run(params)[0])
    return params, grads, lambda params: float(run(params)[1]["loss"])


@pytest.mark.parametrize("method", METHODS)
def test_meta_gradient_equals_central_differences(method, x64):
    params, grads, loss = meta_grad(METHODS[method])
    plain = meta_grad(InnerConfig(lr=0.5))[1]
    rng, step, worst = np.random.default_rng(0), 1e-6, 0.0
    for role, grad in grads.items():
        norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(grad)))
        moved = jax.tree.map(lambda a, b: a - b, grad, plain[role])
        assert max(np.abs(x).max() for x in jax.tree.leaves(moved)) > 1e-4 * norm  # it acts
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), grad)

        def at(scale, role=role, direction=direction):
            new = jax.tree.map(lambda p, d: p + scale * d, params[role], direction)
            return loss(params | {role: new})

        products = jax.tree.map(lambda g, d: np.sum(g * d), grad, direction)
        slope = (at(step) - at(-step)) / (2 * step)
        worst = max(worst, abs(slope - sum(jax.tree.leaves(products))) / norm)
    print(f"max relative error {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"sub_group_size": 1},
        {"keep_nearest": 0.99, "max_distance": 100.0, "sub_group_size": 7},
    ],
    ids=str,
)
def test_what_changes_nothing_is_plain_meml(options, x64):
    _, expected, _ = meta_grad(InnerConfig(lr=0.5))
    _, found, _ = meta_grad(InnerConfig(lr=0.5, **options))
    for role in found:
        if role == "attention":  # a softmax ignores a shift: the output's bias has rounding of 0
            for layer, name in (("hidden", "kernel"), ("hidden", "bias"), ("output", "kernel")):
                tiny.assert_close(found[role][layer][name], expected[role][layer][name], 1e-9)
        else:
            tiny.assert_close(found[role], expected[role], 1e-9)


@pytest.mark.parametrize(
    "options, learner, expected",
    [
        ({"keep_nearest": 0.0}, "meml", "above 0"),
        ({"keep_nearest": 1.5}, "meml_mean", "at most 1"),
        ({"max_distance": 0.9}, "meml", "at least 1"),
        ({"sub_group_size": 0}, "meml", "at least 1"),
        ({"sub_group_size": 4}, "oml", "pools nothing"),
    ],
)
def test_options_out_of_range_or_without_effect_are_refused(options, learner, expected):
    with pytest.raises(UserError, match=expected):
        pooling.check(InnerConfig(**options), LEARNERS[learner])


# Out-of-distribution score.


def test_novelty_equals_its_definition():
    rng = np.random.default_rng(0)
    classes = [rng.normal(size=(n, DIM)) for n in (3, 1, 5)]
    x = rng.normal(size=(4, DIM))
    variance = sum(np.sum((c - c.mean(axis=0)) ** 2) for c in classes) / (2 + 0 + 4)
    expected = [
        min(np.sum((r - c.mean(axis=0)) ** 2) / (variance * (1 + 1 / len(c))) for c in classes)
        for r in x
    ]
    absent = np.zeros((1, DIM))  # a class to come lies nowhere
    mean = np.concatenate([absent, *(c.mean(axis=0, keepdims=True) for c in classes)])
    scatter = [0, *(np.sum((c - c.mean(axis=0)) ** 2) for c in classes)]
    count = np.array([0, 3, 1, 5])
    found = pooling.novelty(*map(np.float32, (x, mean)), count, np.float32(scatter))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("shots", [2, 15])
def test_novelty_is_one_for_known_classes_and_above_for_a_new_one(shots):
    rng = np.random.default_rng(1)
    means = 20 * rng.normal(size=(20, 1, 8))
    known = 3 * (means + rng.normal(size=(20, shots + 200, 8)))  # any scale
    seen, later = np.split(np.float32(known), [shots], axis=1)
    mean = seen.mean(axis=1)
    scatter = np.sum((seen - mean[:, None]) ** 2, axis=(1, 2))
    count = np.full(20, shots)
    score = pooling.novelty(later.reshape(-1, 8), mean, count, scatter)
    assert abs(np.mean(score) - 1) < 0.1
    new = np.float32(3 * (20 * rng.normal(size=8) + rng.normal(size=(200, 8))))
    assert np.mean(pooling.novelty(new, mean, count, scatter)) > 10
