"""Balanced assignment: the plan against references, the rounding against the optimum."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from meml_jax.embeddings import sinkhorn as sinkhorn_module
from meml_jax.embeddings.sinkhorn import balanced_labels, sinkhorn

find = jax.jit(sinkhorn, static_argnames=("sharpness", "tolerance", "max_iterations"))
round_ = jax.jit(balanced_labels)


def log_probabilities(rows, columns, *, spread=2.0, seed=0):
    logits = spread * np.random.default_rng(seed).normal(size=(rows, columns))
    logits += np.linspace(0, 3, columns)  # some labels are liked by all
    return np.array(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


def reference(scores, sharpness, iterations=3000):
    """Plain Sinkhorn-Knopp in float64: rows and columns scaled in turn."""
    plan = np.exp(sharpness * (scores.astype(np.float64) - scores.max(axis=1, keepdims=True)))
    for _ in range(iterations):
        plan /= plan.sum(axis=0, keepdims=True) * plan.shape[1]
        plan /= plan.sum(axis=1, keepdims=True) * plan.shape[0]
    return plan


@pytest.mark.parametrize(("rows", "columns"), [(60, 6), (61, 6), (7, 7)])
@pytest.mark.parametrize("sharpness", [1.0, 5.0])
def test_marginals_and_plan(rows, columns, sharpness):
    scores = log_probabilities(rows, columns)
    log_plan, info = find(scores, sharpness=sharpness, tolerance=1e-5)
    plan = np.exp(log_plan)
    np.testing.assert_allclose(plan.sum(axis=1) * rows, 1, rtol=1e-5)
    np.testing.assert_allclose(plan.sum(axis=0) * columns, 1, rtol=2e-5)
    assert info.error <= 1e-5 and 0 < info.iterations < 1000
    np.testing.assert_allclose(plan, reference(scores, sharpness), rtol=1e-2, atol=1e-5 / rows)


def test_equipartition_holds_to_one_per_cent_at_the_sharpness_of_the_paper():
    log_plan, info = find(log_probabilities(400, 8, spread=4.0), sharpness=25.0)
    assert info.error <= 0.01 and np.isfinite(log_plan).all()
    np.testing.assert_allclose(np.exp(log_plan).sum(axis=0) * 8, 1, rtol=0.0101)


def test_the_scores_of_a_sharp_classifier(monkeypatch):
    """The raised sharpness and the longer steps change how fast the plan is found, not the plan."""
    rng = np.random.default_rng(0)
    centres, weights = rng.normal(size=(60, 32)), rng.normal(size=(32, 100)) / np.sqrt(32)
    features = centres[rng.integers(0, 60, 1000)] + 0.7 * rng.normal(size=(1000, 32))
    scores = jax.nn.log_softmax(jnp.asarray(8 * features @ weights, jnp.float32))
    log_plan, info = find(scores, sharpness=25.0)
    assert info.error <= 0.01 and info.iterations < 400
    monkeypatch.setattr(sinkhorn_module, "SHARES", (1,))
    monkeypatch.setattr(sinkhorn_module, "RELAXATION", 1.0)
    plain = jax.jit(functools.partial(sinkhorn, sharpness=25.0, max_iterations=10_000))
    by_plain, plain_info = plain(scores)
    assert plain_info.error <= 0.01 and plain_info.iterations > 2 * info.iterations
    difference = np.abs(np.exp(log_plan) - np.exp(by_plain)).sum()
    assert difference < 0.02  # of a total mass of 1; both are within 1 % of their marginals


def test_scores_whose_exponentials_underflow():
    scores = log_probabilities(50, 5) * 100
    assert (np.exp(np.float32(25) * scores) == 0).any(axis=0).all()
    log_plan, _ = find(scores, sharpness=25.0)
    assert np.isfinite(log_plan).all()
    np.testing.assert_allclose(np.exp(log_plan).sum(axis=1) * 50, 1, rtol=1e-3)


def test_equal_scores_are_shared_equally_and_a_shift_changes_nothing():
    log_plan, info = find(jnp.zeros((6, 3)), sharpness=25.0)
    np.testing.assert_allclose(log_plan, np.full((6, 3), -np.log(18)), rtol=1e-6)
    assert info.iterations == 0
    scores = log_probabilities(40, 5)
    shift = np.random.default_rng(1).normal(size=(40, 1)).astype(np.float32)
    one, other = (find(s, sharpness=2.0, tolerance=1e-5)[0] for s in (scores, scores + shift))
    np.testing.assert_allclose(np.exp(one), np.exp(other), atol=1e-6)


def test_it_stops_where_it_is_told_and_where_scores_are_no_numbers():
    scores = log_probabilities(60, 6)
    assert find(scores, sharpness=25.0, tolerance=1e-7, max_iterations=3)[1].iterations == 3
    scores[0, 0] = np.nan
    assert find(scores, sharpness=25.0)[1].iterations == 0


def test_the_plan_is_that_of_ott():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxopt, which it imports
        geometry = pytest.importorskip("ott.geometry.geometry")
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import sinkhorn as ott_sinkhorn
    scores = log_probabilities(30, 5)
    problem = linear_problem.LinearProblem(
        geometry.Geometry(cost_matrix=jnp.asarray(-scores), epsilon=1 / 4)
    )
    with jax.numpy_rank_promotion("allow"):
        theirs = ott_sinkhorn.Sinkhorn(threshold=1e-6, max_iterations=5000)(problem)
    assert theirs.converged
    log_plan, _ = find(scores, sharpness=4.0, tolerance=1e-6)
    np.testing.assert_allclose(np.exp(log_plan), theirs.matrix, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize(("rows", "columns"), [(60, 6), (61, 6), (65, 6), (5, 5), (3, 5), (7, 1)])
def test_labels_are_used_equally_often(rows, columns):
    scores = log_probabilities(rows, columns)
    for plan in (find(scores, sharpness=25.0)[0], jnp.zeros((rows, columns)), scores):
        labels = np.asarray(round_(plan))
        assert labels.dtype == np.int32 and labels.min() >= 0 and labels.max() < columns
        size = np.bincount(labels, minlength=columns)
        assert size.max() - size.min() <= 1


def test_labels_are_nearly_the_best_balanced_ones():
    scores = log_probabilities(120, 6, spread=3.0)
    labels = np.asarray(round_(find(scores, sharpness=25.0)[0]))
    seats = np.repeat(np.arange(6), 20)  # the optimum, as a problem with one seat an image
    rows, chosen = linear_sum_assignment(-scores[:, seats])
    best = scores[rows, seats[chosen]].mean()
    unplanned = scores[np.arange(120), np.asarray(round_(scores))].mean()
    got = scores[np.arange(120), labels].mean()
    assert unplanned < got <= best + 1e-6  # the prices of the plan are what helps
    arbitrary = scores[np.arange(120), seats].mean()
    assert best - got < 0.02 * (best - arbitrary)


def test_labels_that_need_no_balance_are_the_likeliest():
    wanted = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 5))
    scores = np.where(np.arange(4)[None] == wanted[:, None], 0.0, -9.0).astype(np.float32)
    np.testing.assert_array_equal(round_(find(scores, sharpness=25.0)[0]), wanted)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_plans_that_are_not_finite_end_too(value):
    labels = np.asarray(round_(jnp.full((10, 5), value)))
    np.testing.assert_array_equal(np.bincount(labels, minlength=5), 2)
