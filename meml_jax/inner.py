"""The inner loop: eq. 3 and, with other rows of the table, that of every other method."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meml_jax import losses
from meml_jax.learners import Learner, Phase
from meml_jax.networks import Network
from meml_jax.pooling import pool
from meml_jax.types import Array, Batch, Params


class InnerInfo(NamedTuple):
    """What one may want to look at.

    Attributes:
      loss: float [T], cross-entropy before each step.
      stepped: bool [T], False where all rows of a step were padding.
    """

    loss: Array
    stepped: Array


def inner_loop(
    loss_fn: Callable[[Params, Batch], tuple[Array, Array]],
    fast: Params,
    batches: Batch,
    tx: optax.GradientTransformation,
    *,
    opt_state: optax.OptState | None = None,
) -> tuple[tuple[Params, optax.OptState], InnerInfo]:
    """Take one optimizer step a batch: psi <- psi - tx(grad_psi loss), eq. (3).

    Args:
      loss_fn: (fast, batch) -> (loss to descend [], cross-entropy to report []).
      fast: psi, any pytree.
      batches: leaves with leading [T].
      tx: inner optimizer.
      opt_state: state to go on from; a fresh one where None.

    Returns:
      ((psi, optimizer state) after T steps, InnerInfo). A step whose rows are all masked leaves
      both unchanged, bit for bit.
    """

    def step(carry, batch):
        fast, opt_state = carry
        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(fast, batch)
        updates, new_state = tx.update(grads, opt_state, fast)
        new = (optax.apply_updates(fast, updates), new_state)
        stepped = jnp.any(batch.mask)
        carry = jax.tree.map(lambda a, b: jnp.where(stepped, a, b), new, carry)
        return carry, InnerInfo(loss, stepped)

    opt_state = tx.init(fast) if opt_state is None else opt_state
    return lax.scan(step, (fast, opt_state), batches)


def inner_batches(support: Batch, phase: Phase) -> Batch:
    """Arrange support rows [K, ...] as the steps of a phase, leaves [T, rows a step, ...]."""
    if phase.rows == "each":
        return jax.tree.map(lambda x: x[:, None], support)
    if phase.rows == "first":
        return jax.tree.map(lambda x: x[:1][None], support)
    return jax.tree.map(lambda x: x[None], support)


def pooled_logits(
    params: Params, p: Array, batch: Batch, *, network: Network, pooling: str
) -> tuple[Array, Array, Array]:
    """Pool pre-activations p [N, D] as asked and classify: (logits [M, C], label [M], mask [M])."""
    features = network.activate(p)
    if pooling == "none":
        return network.classify(params, features), batch.label, batch.mask
    scores = network.score(params, p) if pooling == "attention" else jnp.zeros_like(features[:, 0])
    meta_example, _ = pool(scores, features, jnp.zeros_like(batch.label), batch.mask, 1)
    return network.classify(params, meta_example), batch.label[:1], jnp.any(batch.mask)[None]


def adapt(
    params: Params,
    support: Batch,
    *,
    network: Network,
    learner: Learner,
    tx: optax.GradientTransformation,
    weight: Array | float = 1.0,
) -> tuple[Params, InnerInfo]:
    """Adapt the fast roles of `params` to a support set, eqs (1)-(3), Sec. 3.

    Args:
      params: phi by role.
      support: inputs are pre-activations P [K, D] or, where the learner's encoder is fast, images
        [K, H, W, C]; label [K]; mask [K]. The first row must be a real one.
      network: pure functions.
      learner: row of the table.
      tx: inner optimizer, `optax.sgd(inner_lr)` in the paper.
      weight: [], multiplies the inner losses (released code with balancing).

    Returns:
      (params with the fast roles adapted, InnerInfo of all phases, in order).

    Differs from the paper: nothing for `meml`. `meml_released` first steps on one support image.
    """
    slow = {role: value for role, value in params.items() if role not in learner.fast}
    fast = {role: params[role] for role in learner.fast}
    opt_state = tx.init(fast)
    infos = []
    for phase in learner.phases:

        def loss_fn(fast: Params, batch: Batch, phase: Phase = phase) -> tuple[Array, Array]:
            merged = slow | fast
            p = network.encode(merged, batch.inputs) if learner.encoder_is_fast else batch.inputs
            logits, label, mask = pooled_logits(
                merged, p, batch, network=network, pooling=phase.pool
            )
            loss = losses.cross_entropy(logits, label, mask)
            return weight * loss, loss

        (fast, opt_state), info = inner_loop(
            loss_fn, fast, inner_batches(support, phase), tx, opt_state=opt_state
        )
        infos.append(info)
    info = jax.tree.map(lambda *x: jnp.concatenate(x), *infos)
    return slow | fast, info
