"""Masked cross-entropy and accuracy, and the balancing parameter Gamma of eqs 5-6."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from meml_jax.types import Array


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean of values [N] over the rows of mask [N]; 0 where the mask is empty."""
    count = jnp.maximum(jnp.sum(mask), 1)
    return jnp.sum(jnp.where(mask, values, 0)) / count.astype(values.dtype)


def cross_entropy(logits: Array, label: Array, mask: Array) -> Array:
    """Mean cross-entropy, in nats, of logits [N, C] and label [N] over the rows of mask [N]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return masked_mean(losses, mask)


def accuracy(logits: Array, label: Array, mask: Array) -> Array:
    """Share of the rows of mask [N] on which the largest of logits [N, C] is at label [N]."""
    correct = jnp.argmax(logits, axis=-1) == label
    return masked_mean(correct.astype(logits.dtype), mask)


def gamma(size: Array, *, epsilon: float = 1.0) -> Array:
    """Balancing parameter of each cluster, eqs (5)-(6), supplement.

        Gamma_c = (C_max - C_min) / (C_c - C_min + epsilon), then scaled to [0, 1] by its min and
        max

    Args:
      size: int [C], images of each cluster.
      epsilon: images; the paper gives no value. Near 0 only the very smallest clusters keep a
        weight.

    Returns:
      float32 [C] in [0, 1]; all 1 where all sizes are equal.
    """
    size = jnp.asarray(size, jnp.float32)
    low, high = jnp.min(size), jnp.max(size)
    raw = (high - low) / (size - low + epsilon)
    spread = jnp.max(raw) - jnp.min(raw)
    return jnp.where(spread > 0, (raw - jnp.min(raw)) / jnp.where(spread > 0, spread, 1.0), 1.0)
