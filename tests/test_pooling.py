"""Equations (1) and (2), by hand, and what padding and order must not change."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meml_jax.pooling import pool

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
