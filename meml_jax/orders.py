"""Random orders of rows of which the last ones may be padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meml_jax.types import Array


def random_order(key: Array, count: Array | int, padded: int) -> Array:
    """Draw a random order of the rows 0, ..., count - 1, all equally likely.

    Args:
      key: random key.
      count: int32 [...], real rows.
      padded: static, rows with the padding.

    Returns:
      int32 [..., padded], the padding behind all real rows.
    """
    count = jnp.asarray(count)
    shape = (*count.shape, padded)
    real = lax.broadcasted_iota(jnp.int32, shape, count.ndim) < count[..., None]
    return jnp.argsort(jnp.where(real, jax.random.uniform(key, shape, jnp.float32), 2.0), axis=-1)
