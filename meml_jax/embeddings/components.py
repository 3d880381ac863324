"""Principal components of features, whitened, then scaled to length 1."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from meml_jax.types import Array, Params

FLOOR = 1e-6  # of the largest variance: a smaller one is rounding and is not blown up


def fit_whitening(features: Array, dim: int) -> Params:
    """Find the linear map after which features [N, D] have the identity as their covariance.

    Inside the compiled training, where scikit-learn cannot be called.

    Args:
      features: float32 [N, D].
      dim: number of components that are kept, the largest ones; at most D.

    Returns:
      {'mean' [D], 'components' [D, dim]}, for `whiten`.
    """
    mean = jnp.mean(features, axis=0)
    centred = features - mean[None]
    covariance = centred.T @ centred / len(features)
    variance, directions = jnp.linalg.eigh(covariance)  # ascending
    variance, directions = variance[::-1][:dim], directions[:, ::-1][:, :dim]
    scale = lax.rsqrt(jnp.maximum(variance, FLOOR * variance[0]) + jnp.finfo(jnp.float32).tiny)
    return {"mean": mean, "components": directions * scale[None]}


def whiten(whitening: Params, features: Array) -> Array:
    """Project features [N, D] on the whitened components, [N, dim]."""
    return (features - whitening["mean"][None]) @ whitening["components"]


def normalize(x: Array) -> Array:
    """Scale each row [N, D] to length 1."""
    return x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True) + 1e-12)
