"""Balanced assignment as optimal transport: Sinkhorn-Knopp in log space, and whole assignments."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from meml_jax.types import Array


class SinkhornInfo(NamedTuple):
    """How far the iteration came.

    Attributes:
      iterations: int32 [].
      error: float32 [], largest relative error of a column's mass.
    """

    iterations: Array
    error: Array


def sinkhorn(
    scores: Array, *, sharpness: float, tolerance: float = 0.01, max_iterations: int = 1000
) -> tuple[Array, SinkhornInfo]:
    """Find the balanced plan that is best in the scores, less entropy / sharpness (eq. 8).

      max_Q sum_ij Q_ij S_ij + entropy(Q) / sharpness,  sum_j Q_ij = 1/N,  sum_i Q_ij = 1/K

    has the solution Q_ij = exp(sharpness S_ij + f_i + g_j). f and g are found in turn, as sums of
    logarithms: exp(sharpness S) itself underflows for scores below -4 at sharpness 25.

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
    kernel = sharpness * scores

    def plan(f: Array, g: Array) -> Array:
        return kernel + f[:, None] + g[None]

    def fit_rows(g: Array) -> Array:
        return -jnp.log(float(num_rows)) - logsumexp(kernel + g[None], axis=1)

    def excess(f: Array, g: Array) -> Array:
        return logsumexp(plan(f, g), axis=0) + jnp.log(float(num_columns))

    def error(excess: Array) -> Array:
        return jnp.max(jnp.abs(jnp.expm1(excess)))

    def going(carry: tuple[Array, Array, Array, Array]) -> Array:
        iteration, _, _, e = carry
        return (error(e) > tolerance) & (iteration < max_iterations)  # False where e is NaN

    def improve(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        iteration, _, g, e = carry
        g = g - e
        f = fit_rows(g)
        return iteration + 1, f, g, excess(f, g)

    g = jnp.zeros((num_columns,), scores.dtype)
    f = fit_rows(g)
    start = (jnp.zeros((), jnp.int32), f, g, excess(f, g))
    iteration, f, g, e = lax.while_loop(going, improve, start)
    return plan(f, g), SinkhornInfo(iteration, error(e))


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
