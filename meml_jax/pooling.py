"""Attention pooling of a cluster into its meta-example, eqs 1-2, and its refinements."""

from __future__ import annotations

import math
from collections.abc import Callable

import chex
import jax.numpy as jnp
from jax import lax

from meml_jax.config import InnerConfig
from meml_jax.learners import Learner
from meml_jax.types import Array, UserError

# Distances that differ by rounding only, as those of two images, are kept or not as one.
_TIE = 1e-4


def pool(
    scores: Array, features: Array, group: Array, mask: Array, num_groups: int
) -> tuple[Array, Array]:
    """Pool the rows of each group into one meta-example, eqs (1)-(2), Sec. 3.

        alpha_{g,k} = exp(s_k) / sum_{j in g} exp(s_j) for k in g, else 0
        ME_g        = sum_k alpha_{g,k} R_k

    One masked softmax and one matmul: no scatter, and it shards under any mesh.

    Args:
      scores: float [N], f_rho(R); all equal gives the mean.
      features: float [N, D], R.
      group: int32 [N] in [0, num_groups).
      mask: bool [N]; False rows have weight 0.
      num_groups: G, static.

    Returns:
      (meta_example [G, D], alpha [G, N]); a group without rows has both 0, with finite gradients.
    """
    chex.assert_rank([scores, features, group, mask], [1, 2, 1, 1])
    chex.assert_equal_shape([scores, group, mask])
    member = members(group, mask, num_groups)
    # Finite, so that an empty group subtracts floor - floor.
    floor = jnp.finfo(scores.dtype).min / 2
    top = lax.stop_gradient(
        jnp.max(scores[None, :], axis=1, keepdims=True, where=member, initial=floor)
    )
    # The inner `where` keeps exp of masked rows at 1: no overflow, so no 0 * inf in the gradient.
    weight = jnp.where(member, jnp.exp(jnp.where(member, scores[None, :] - top, 0.0)), 0.0)
    total = jnp.sum(weight, axis=1, keepdims=True)
    alpha = weight / jnp.where(total > 0, total, 1.0)
    return alpha @ features, alpha


def check(options: InnerConfig, learner: Learner) -> None:
    """Raise UserError where an option of the pooling is out of range, or there is no pooling."""
    if not 0 < options.keep_nearest <= 1:
        raise UserError(f"inner.keep_nearest={options.keep_nearest}, expected above 0, at most 1")
    if options.max_distance is not None and not options.max_distance >= 1:
        # Some image is always within 1, so no cluster is emptied.
        raise UserError(f"inner.max_distance={options.max_distance}, expected at least 1, or None")
    if options.sub_group_size is not None and options.sub_group_size < 1:
        raise UserError(
            f"inner.sub_group_size={options.sub_group_size}, expected at least 1, or None"
        )
    used = (options.keep_nearest, options.max_distance, options.sub_group_size) != (1, None, None)
    if used and all(phase.pool == "none" for phase in learner.phases):
        raise UserError(
            "inner.keep_nearest, inner.max_distance and inner.sub_group_size change how a cluster "
            "is pooled, but this learner pools nothing; leave them out or use another, such as meml"
        )


def aggregate(
    score: Callable[[Array], Array],
    features: Array,
    group: Array,
    mask: Array,
    num_groups: int,
    *,
    options: InnerConfig,
) -> tuple[Array, Array]:
    """Pool each group as `options` say: `inliers`, then `hierarchical_pool`, else plain `pool`.

    Args:
      score: f_rho, from features [M, D] to scores [M]; applied to meta-examples too.
      features: float [N, D], R.
      group: int32 [N] in [0, num_groups).
      mask: bool [N].
      num_groups: G, static.
      options: `keep_nearest`, `max_distance`, `sub_group_size`; static, and all off by default.

    Returns:
      (meta_example [G, D], alpha [G, N]) as from `pool`, to which it reduces with all off.

    Differs from the paper: it names both refinements as future work and gives no formula.
    """
    if options.keep_nearest < 1 or options.max_distance is not None:
        mask = inliers(
            features,
            group,
            mask,
            num_groups,
            keep_nearest=options.keep_nearest,
            max_distance=options.max_distance,
        )
    if options.sub_group_size is not None:
        size = options.sub_group_size
        return hierarchical_pool(score, features, group, mask, num_groups, sub_group_size=size)
    return pool(score(features), features, group, mask, num_groups)


def inliers(
    features: Array,
    group: Array,
    mask: Array,
    num_groups: int,
    *,
    keep_nearest: float = 1.0,
    max_distance: float | None = None,
) -> Array:
    """Tell which rows of each group are no outliers: near to the group's mean feature.

        m_g = mean of R_k over k in g,   d_k = |R_k - m_g|,   rms_g = sqrt(mean of d_k^2 over g)
        k is kept where d_k <= the ceil(keep_nearest |g|)-th smallest d of g
                    and d_k <= max_distance rms_g

    Args:
      features: float [N, D], R; no gradient flows through the choice.
      group: int32 [N] in [0, num_groups).
      mask: bool [N]; False rows have no part in mean, count or distances.
      num_groups: G, static.
      keep_nearest: share in (0, 1], a quantile of the distances; 1 keeps all.
      max_distance: in units of rms_g, at least 1; None keeps all.

    Returns:
      bool [N], a part of `mask` with at least one row of every group that has any. Rows as far
      away as the last one kept are kept, so a group of two is never cut.

    Differs from the paper: it proposes the step ("identify the outliers ... and discard them before
    the self-attention mechanism"), without a rule.
    """
    features = lax.stop_gradient(features)
    member = members(group, mask, num_groups)
    mean, share = pool(jnp.zeros_like(features[:, 0]), features, group, mask, num_groups)
    # Of masked rows 0, so that none of them can overflow into a sum.
    square = jnp.where(mask, jnp.sum((features - mean[group]) ** 2, axis=1), 0)  # d^2, [N]
    kept = mask
    if keep_nearest < 1:
        count = jnp.sum(member, axis=1)
        # What float32 adds to a product that is a whole number must not round it up.
        rank = jnp.maximum(jnp.ceil(keep_nearest * count - _TIE), 1).astype(jnp.int32) - 1
        ordered = jnp.sort(jnp.where(member, square[None, :], jnp.inf), axis=1)
        limit = jnp.take_along_axis(ordered, rank[:, None], axis=1)[:, 0]
        kept &= square <= (1 + _TIE) * limit[group]
    if max_distance is not None:
        limit = max_distance**2 * jnp.sum(share * square[None, :], axis=1)
        kept &= square <= (1 + _TIE) * limit[group]
    return kept


def hierarchical_pool(
    score: Callable[[Array], Array],
    features: Array,
    group: Array,
    mask: Array,
    num_groups: int,
    *,
    sub_group_size: int,
) -> tuple[Array, Array]:
    """Pool sub-groups of each group, then their meta-examples: eqs (1)-(2) twice.

        ME_{g,j} = sum_k alpha_{j,k} R_k      over the j-th `sub_group_size` rows k of g
        ME_g     = sum_j beta_{g,j} ME_{g,j},   beta_g = softmax_j f_rho(ME_{g,j})

    One sub-group (`sub_group_size` at least |g|) and sub-groups of one row each are both plain
    attention: the outer, or the inner, softmax is 1. With equal scores it is the mean of the
    sub-groups' means.

    Args:
      score: f_rho, from features [M, D] to scores [M].
      features: float [N, D], R.
      group: int32 [N] in [0, num_groups).
      mask: bool [N]; False rows are passed over, so padding and discarded rows do not shift the
        others from one sub-group to the next.
      num_groups: G, static.
      sub_group_size: static; rows of a sub-group, in order; the last one may be smaller. Tasks
        draw the order of a cluster's images at random.

    Returns:
      (meta_example [G, D], alpha [G, N]), alpha_{g,k} = beta_{g,j(k)} alpha_{j(k),k}.

    Differs from the paper: it names "hierarchical aggregation techniques" and does not define them.
    """
    each = math.ceil(len(mask) / sub_group_size)  # most sub-groups that a group can have
    member = members(group, mask, num_groups)
    place = jnp.max(jnp.where(member, jnp.cumsum(member, axis=1) - 1, 0), axis=0)
    sub_group = group * each + place // sub_group_size
    owner = jnp.repeat(jnp.arange(num_groups), each)
    parts, inner = pool(score(features), features, sub_group, mask, num_groups * each)
    filled = jnp.any(members(sub_group, mask, num_groups * each), axis=1)
    whole, outer = pool(score(parts), parts, owner, filled, num_groups)
    return whole, outer @ inner


def novelty(features: Array, mean: Array, count: Array, scatter: Array) -> Array:
    """Score how far features are from all known classes: an out-of-distribution score.

        s^2  = sum_c M_c / sum_c (n_c - 1),   M_c = sum of |R_k - m_c|^2 over the n_c images of c
        u(R) = min over c with n_c > 0 of |R - m_c|^2 / (s^2 (1 + 1 / n_c))

    s^2 (1 + 1 / n) is the expected squared distance of one more image of a class to the mean of n
    images, if all classes spread alike: u is about 1 for an image of a known class, whatever the
    number of images and the scale of the features, and larger for one of a new class. The score of
    a new class is the mean of u over its images.

    Args:
      features: float [N, D], R.
      mean: float [C, D], m_c.
      count: int [C], n_c; some n_c must be at least 2, and their images not all equal.
      scatter: float [C], M_c.

    Returns:
      float [N], 0 or above.

    Differs from the paper: it names "an OoD detector" as future work and does not define it.
    """
    variance = jnp.sum(scatter) / jnp.sum(jnp.maximum(count - 1, 0))
    square = square_distances(features, mean)
    scale = variance * (1 + 1 / jnp.maximum(count, 1))
    return jnp.min(square / scale[None], axis=1, where=count[None] > 0, initial=jnp.inf)


def square_distances(x: Array, y: Array) -> Array:
    """Squared Euclidean distances [N, M] of the rows of x [N, D] and y [M, D], 0 or above.

    From the first row of y, so that float32 does not lose small differences of large features. Not
    from the mean, which rows that stand for nothing yet, all 0, would pull away from the others.
    """
    x, y = x - y[:1], y - y[:1]
    cross = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1)[None] - 2 * x @ y.T
    return jnp.maximum(cross, 0)  # rounding can leave less than 0 of what cancels


def members(group: Array, mask: Array, num_groups: int) -> Array:
    """Tell which rows belong to which group: bool [G, N]."""
    return (group[None, :] == jnp.arange(num_groups)[:, None]) & mask[None, :]
