"""Meta-test with FiLM layers: they adapt with the CLN, and each class has its own context."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meml_jax.inner import inner_step, rows_loss
from meml_jax.networks import Network
from meml_jax.types import Array, Batch, Params


def reset_context(tree: Any, fresh: Array | bool) -> Any:
    """Set what belongs to the role `context` to 0 where `fresh`, in parameters or Adam's state."""
    role = jax.tree_util.DictKey("context")

    def reset(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.where(fresh, jnp.zeros_like(leaf), leaf) if role in path else leaf

    return jax.tree_util.tree_map_with_path(reset, tree)


def learn_stream(
    params: Params,
    stems: Array,
    batches: Batch,
    *,
    network: Network,
    learning_rate: Array | float,
    length: Array | int,
) -> Params:
    """Learn a stream with Adam on CLN, FiLM generator and context (supplement, FiLM Layers).

    A step is an inner step of the one mechanism. Where the class of the new image differs from the
    one before, context and its Adam state start at 0 again.

    Args:
      params: parameters whose output layer has been reset.
      stems: float32 [M, H, W, channels], the fifth convolution (`network.stem`), frozen.
      batches: leaves [T, R]; inputs are rows of `stems`, the first one of a step is the new image,
        others are replayed.
      network: `networks.after_stem`.
      learning_rate: Adam's.
      length: [], steps to take, at most T.

    Returns:
      Parameters after the stream, with the context 0: images to classify belong to no known class,
      so no class's context can serve them. The FEN has not changed.

    Differs from the paper: it does not say which context classifies test images.
    """
    roles = ("cln", "film", "context")
    # An optimizer a role: the context's step count starts again with it.
    adam = {role: optax.adam(learning_rate) for role in roles}
    tx = optax.partition(adam, {role: role for role in roles})

    def loss_fn(fast: Params, batch: Batch) -> tuple[Array, Array]:
        return rows_loss(params | fast, batch, network=network)

    label = batches.label[:, 0]
    fresh = jnp.concatenate([jnp.ones((1,), bool), label[1:] != label[:-1]])

    def step(t: Array, carry: Any) -> Any:
        batch = jax.tree.map(lambda x: x[t], batches)
        batch = dataclasses.replace(batch, inputs=stems[batch.inputs])
        return inner_step(loss_fn, reset_context(carry, fresh[t]), batch, tx)[0]

    fast = {role: params[role] for role in roles}
    fast, _ = lax.fori_loop(0, length, step, (fast, tx.init(fast)))
    return params | reset_context(fast, True)
