"""Masked cross-entropy and accuracy, and Gamma, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meml_jax import losses

RNG = np.random.default_rng(0)
LOGITS = np.float32(RNG.normal(size=(6, 4)) * 3)
LABEL = np.int32([0, 3, 2, 1, 1, 0])


def cross_entropy_by_hand(logits, label):
    logits = np.float64(logits)
    return np.mean([np.log(np.exp(x).sum()) - x[y] for x, y in zip(logits, label, strict=True)])


@pytest.mark.parametrize("rows", [[0], [1, 4], [0, 2, 3, 5], list(range(6))])
def test_cross_entropy_and_accuracy_of_the_rows_in_the_mask(rows):
    mask = np.isin(np.arange(6), rows)
    loss = losses.cross_entropy(jnp.asarray(LOGITS), jnp.asarray(LABEL), jnp.asarray(mask))
    np.testing.assert_allclose(loss, cross_entropy_by_hand(LOGITS[rows], LABEL[rows]), rtol=1e-5)
    accuracy = losses.accuracy(jnp.asarray(LOGITS), jnp.asarray(LABEL), jnp.asarray(mask))
    expected = np.mean(LOGITS[rows].argmax(axis=1) == LABEL[rows])
    np.testing.assert_allclose(accuracy, expected, rtol=1e-6)


def test_padding_changes_neither_loss_nor_gradient():
    value_and_grad = jax.value_and_grad(losses.cross_entropy)
    loss, grad = value_and_grad(jnp.asarray(LOGITS), jnp.asarray(LABEL), jnp.ones(6, bool))
    padded = jnp.asarray(np.append(LOGITS, np.full((3, 4), 1e4, np.float32), axis=0))
    label, mask = jnp.asarray(np.append(LABEL, [9, -1, 0])), jnp.arange(9) < 6
    found, found_grad = value_and_grad(padded, jnp.clip(label, 0, 3), mask)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    np.testing.assert_allclose(found_grad[:6], grad, rtol=1e-6)
    assert np.all(found_grad[6:] == 0)


def test_no_valid_row_gives_0_and_a_finite_gradient():
    nothing = jnp.zeros(6, bool)
    loss, grad = jax.value_and_grad(losses.cross_entropy)(
        jnp.asarray(LOGITS), jnp.asarray(LABEL), nothing
    )
    assert loss == 0 and np.all(grad == 0)
    assert losses.accuracy(jnp.asarray(LOGITS), jnp.asarray(LABEL), nothing) == 0
    assert losses.masked_mean(jnp.full(6, jnp.nan), nothing) == 0


def test_gamma_by_hand():
    # Sizes 2, 4, 10 with epsilon 1: raw = 8/1, 8/3, 8/9; minus 8/9, over 8 - 8/9.
    raw = np.array([8.0, 8 / 3, 8 / 9])
    expected = (raw - raw.min()) / (raw.max() - raw.min())
    np.testing.assert_allclose(losses.gamma(jnp.array([2, 4, 10])), expected, rtol=1e-6)
    sharp = losses.gamma(jnp.array([2, 4, 10]), epsilon=1e-3)
    assert sharp[0] == 1 and sharp[2] == 0 and 0 < sharp[1] < expected[1]


def test_gamma_prefers_small_clusters_and_stays_in_0_1():
    size = jnp.asarray(RNG.integers(2, 500, size=100))
    gamma = np.asarray(losses.gamma(size))
    assert gamma.min() == 0 and gamma.max() == 1
    order = np.argsort(size)
    assert np.all(np.diff(gamma[order]) <= 0)
    np.testing.assert_array_equal(gamma[size == size.min()], 1)


def test_gamma_of_equal_sizes_is_1():
    np.testing.assert_array_equal(losses.gamma(jnp.full(4, 20)), np.ones(4, np.float32))
