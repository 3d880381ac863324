"""Attention pooling of a cluster into its meta-example, eqs 1-2."""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jax import lax

from meml_jax.types import Array


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
    member = (group[None, :] == jnp.arange(num_groups)[:, None]) & mask[None, :]
    floor = (
        jnp.finfo(scores.dtype).min / 2
    )  # finite, so that an empty group subtracts floor - floor
    top = lax.stop_gradient(
        jnp.max(scores[None, :], axis=1, keepdims=True, where=member, initial=floor)
    )
    # The inner `where` keeps exp of masked rows at 1: no overflow, so no 0 * inf in the gradient.
    weight = jnp.where(member, jnp.exp(jnp.where(member, scores[None, :] - top, 0.0)), 0.0)
    total = jnp.sum(weight, axis=1, keepdims=True)
    alpha = weight / jnp.where(total > 0, total, 1.0)
    return alpha @ features, alpha
