"""Balanced assignment as optimal transport: Sinkhorn-Knopp in log space, and whole assignments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from meml_jax.types import Array

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the sharpness: each starts from the prices of the one before
RELAXATION = 1.5  # of the columns' step; 1 is plain Sinkhorn-Knopp, below 2 it converges


class SinkhornInfo(NamedTuple):
    """How far the iteration came.

    Attributes:
      iterations: int32 [].
      error: float32 [], largest relative error of a column's mass.
    """

    iterations: Array
    error: Array


def sinkhorn(
    scores: Array, *, sharpness: float, tolerance: float = 0.01, max_iterations: int = 2000
) -> tuple[Array, SinkhornInfo]:
    """Find the balanced plan that is best in the scores, less entropy / sharpness (eq. 8).

      max_Q sum_ij Q_ij S_ij + entropy(Q) / sharpness,  sum_j Q_ij = 1/N,  sum_i Q_ij = 1/K

    has the solution Q_ij = exp(sharpness S_ij + f_i + g_j). f and g are found in turn, as sums of
    logarithms: exp(sharpness S) itself underflows for scores below -4 at sharpness 25. How many
    turns it takes grows with the sharpness, so it is raised in steps, and g goes further than to
    where the columns would be right: together a fifth of the turns, for a classifier whose logits
    reach 30.

    Args:
      scores: float [N, K], e.g. log-probabilities of K labels for each of N images.
      sharpness: lambda of Asano et al. (2020), above 0; the larger, the nearer to a whole
        assignment and the more iterations.
      tolerance: of the relative error of a column's mass at which it stops.
      max_iterations: at which it stops, whatever the error.

    Returns:
      (log Q [N, K], of which the rows sum to 1/N to rounding and the columns to 1/K to the
      tolerance, if it was reached; SinkhornInfo).
    """
    num_rows, num_columns = scores.shape

    def plan_at(sharpness: float, g: Array) -> Array:
        kernel = sharpness * scores + g[None]
        return kernel - logsumexp(kernel, axis=1, keepdims=True) - jnp.log(float(num_rows))

    def excess(log_plan: Array) -> Array:
        return logsumexp(log_plan, axis=0) + jnp.log(float(num_columns))

    def error(excess: Array) -> Array:
        return jnp.max(jnp.abs(jnp.expm1(excess)))

    def going(carry: tuple[Array, Array, Array]) -> Array:
        iteration, _, e = carry
        return (error(e) > tolerance) & (iteration < max_iterations)  # False where e is NaN

    iteration, prices = jnp.zeros((), jnp.int32), jnp.zeros((num_columns,), scores.dtype)
    for share in SHARES:  # g = share sharpness prices
        at = functools.partial(plan_at, share * sharpness)

        def improve(
            carry: tuple[Array, Array, Array], at: Callable[[Array], Array] = at
        ) -> tuple[Array, Array, Array]:
            iteration, g, e = carry
            g = g - RELAXATION * e
            return iteration + 1, g, excess(at(g))

        g = share * sharpness * prices
        iteration, g, e = lax.while_loop(going, improve, (iteration, g, excess(at(g))))
        prices = g / (share * sharpness)
    return at(g), SinkhornInfo(iteration, error(e))


def balanced_labels(log_plan: Array) -> Array:
    """Round a plan to whole labels that are used equally often, as the constraint of eq. 8 says.

    Each image asks for the label that is likeliest for it among those with room; a label takes the
    likeliest of those who ask; the others ask again, until all have one.

    Args:
      log_plan: float [N, K], from `sinkhorn`; entries that are not finite count as impossible.

    Returns:
      int32 [N]; each label stands for floor(N / K) or ceil(N / K) images.

    Differs from Asano et al. (2020): they take each image's likeliest label, which keeps the sizes
    equal only roughly.
    """
    num_rows, num_columns = log_plan.shape
    each, rest = divmod(num_rows, num_columns)
    lowest = jnp.finfo(log_plan.dtype).min  # above -inf, which closed labels have
    plan = jnp.maximum(jnp.nan_to_num(log_plan, nan=lowest, neginf=lowest), lowest)

    def ask(labels: Array) -> Array:
        free = labels < 0
        count = jnp.bincount(jnp.where(free, num_columns, labels), length=num_columns)
        # The last `rest` images find all labels with the same number and go to different ones.
        room = each + (jnp.sum(free) <= rest) - count
        open_plan = jnp.where(room[None] > 0, plan, -jnp.inf)
        wanted = jnp.where(free, jnp.argmax(open_plan, axis=1), num_columns)
        order = jnp.lexsort((-jnp.max(open_plan, axis=1), wanted))
        demand = jnp.bincount(wanted, length=num_columns + 1)
        start = jnp.cumsum(demand) - demand
        place = jnp.zeros_like(labels).at[order].set(jnp.arange(num_rows, dtype=labels.dtype))
        taken = place - start[wanted] < jnp.append(room, 0)[wanted]
        return jnp.where(free & taken, wanted, labels).astype(labels.dtype)

    unlabelled = jnp.full((num_rows,), -1, jnp.int32)
    return lax.while_loop(lambda labels: jnp.any(labels < 0), ask, unlabelled)
