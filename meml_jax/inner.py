"""The inner loop: eq. 3 and, with other rows of the table, that of every other method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from meml_jax import losses
from meml_jax.config import InnerConfig
from meml_jax.learners import Learner, Phase
from meml_jax.networks import Network
from meml_jax.pooling import aggregate, members
from meml_jax.types import Array, Batch, Params


class InnerInfo(NamedTuple):
    """Diagnostics of the inner loop.

    Attributes:
      loss: float [T], cross-entropy before each step.
      stepped: bool [T], False where all rows of a step were padding.
    """

    loss: Array
    stepped: Array


def inner_step(
    loss_fn: Callable[[Params, Batch], tuple[Array, Array]],
    carry: tuple[Params, optax.OptState],
    batch: Batch,
    tx: optax.GradientTransformation,
    *,
    first_order: bool = False,
) -> tuple[tuple[Params, optax.OptState], Array]:
    """Take one optimizer step: psi <- psi - tx(grad_psi loss), eq. (3).

    Args:
      loss_fn: (fast, batch) -> (loss to descend [], cross-entropy to report []).
      carry: (psi, any pytree; optimizer state).
      batch: rows of the step.
      tx: inner optimizer.
      first_order: what is differentiated through takes the gradients as constants.

    Returns:
      (carry after the step, cross-entropy before it []).
    """
    fast, opt_state = carry
    (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(fast, batch)
    grads = lax.stop_gradient(grads) if first_order else grads
    updates, opt_state = tx.update(grads, opt_state, fast)
    return (optax.apply_updates(fast, updates), opt_state), loss


def inner_loop(
    loss_fn: Callable[[Params, Batch], tuple[Array, Array]],
    fast: Params,
    batches: Batch,
    tx: optax.GradientTransformation,
    *,
    opt_state: optax.OptState | None = None,
    first_order: bool = False,
    remat: bool = False,
) -> tuple[tuple[Params, optax.OptState], InnerInfo]:
    """Take one `inner_step` a batch.

    Args:
      loss_fn: (fast, batch) -> (loss to descend [], cross-entropy to report []).
      fast: psi, any pytree.
      batches: leaves with leading [T].
      tx: inner optimizer.
      opt_state: state to go on from; a fresh one where None.
      first_order: what is differentiated through takes the gradients as constants.
      remat: what is differentiated through recomputes a step instead of keeping its intermediate
        values: the same gradients with memory for one step, and not T, at the cost of time.

    Returns:
      ((psi, optimizer state) after T steps, InnerInfo). A step whose rows are all masked leaves
      both unchanged, bit for bit.
    """

    def step(carry, batch):
        new, loss = inner_step(loss_fn, carry, batch, tx, first_order=first_order)
        stepped = jnp.any(batch.mask)
        carry = jax.tree.map(lambda a, b: jnp.where(stepped, a, b), new, carry)
        return carry, InnerInfo(loss, stepped)

    opt_state = tx.init(fast) if opt_state is None else opt_state
    return _scan(step, (fast, opt_state), batches, batches.mask.shape[0], remat=remat)


def inner_batches(support: Batch, phase: Phase) -> Batch:
    """Arrange support rows [K, ...] as the steps of a phase, leaves [T, rows a step, ...]."""
    if phase.rows == "each":
        return jax.tree.map(lambda x: x[:, None], support)
    if phase.rows == "first":
        return jax.tree.map(lambda x: x[:1][None], support)
    return jax.tree.map(lambda x: x[None], support)


def pooled_logits(
    params: Params,
    p: Array,
    batch: Batch,
    *,
    network: Network,
    pooling: str,
    ways: int,
    options: InnerConfig = InnerConfig(),  # noqa: B008
) -> tuple[Array, Array, Array]:
    """Pool pre-activations p [N, D] as asked and classify: (logits [M, C], label [M], mask [M]).

    Pooling gives one meta-example for each of the `ways` (static) classes in the batch, M = ways; a
    class without real rows is masked. Without pooling M = N, and `ways` plays no role. `options`
    refine it (`aggregate`).

    Too few `ways` are no error, as labels are not known while tracing: the classes of the smallest
    labels are pooled, and the rows of all others are left out.
    """
    features = network.activate(p)
    if pooling == "none":
        return network.classify(params, features), batch.label, batch.mask

    def score(r: Array) -> Array:
        return network.score(params, r) if pooling == "attention" else jnp.zeros_like(r[:, 0])

    label = jnp.where(batch.mask, batch.label, batch.label[:1])  # padding makes no class
    classes, group = jnp.unique(label, size=ways, return_inverse=True)
    meta_example, _ = aggregate(score, features, group, batch.mask, ways, options=options)
    real = jnp.any(members(group, batch.mask, ways), axis=1)
    return network.classify(params, meta_example), classes, real


def rows_loss(params: Params, batch: Batch, *, network: Network) -> tuple[Array, Array]:
    """Cross-entropy of features that are classified each by itself, as `inner_step` takes it."""
    logits = network.classify(params, batch.inputs)
    loss = losses.cross_entropy(logits, batch.label, batch.mask)
    return loss, loss


def adapt(
    params: Params,
    support: Batch,
    *,
    network: Network,
    learner: Learner,
    tx: optax.GradientTransformation,
    ways: int,
    weight: Array | float = 1.0,
    options: InnerConfig = InnerConfig(),  # noqa: B008
) -> tuple[Params, InnerInfo]:
    """Adapt the fast roles of `params` to a support set, eqs (1)-(3), Sec. 3.

    Args:
      params: phi by role; the role `context`, if any, is taken as 0.
      support: inputs are what `network.stem` gives [K, ...]: pre-activations P, images where the
        learner's encoder is fast, the fifth convolution where FiLM layers follow it; label [K];
        mask [K]. The first row must be a real one.
      network: pure functions.
      learner: row of the table.
      tx: inner optimizer, `optax.sgd(inner_lr)` in the paper.
      ways: static, number of classes in the support set; each gets its meta-example. Of more
        classes than that, those with the largest labels would silently take no part in a phase
        that pools.
      weight: [], or one for each phase, multiplies the inner losses (released code with balancing).
      options: `steps` is how often each phase is done; `first_order`, which a learner may be by
        itself, and `remat` as in `inner_loop`; those of `pooling.aggregate`. The learning rate is
        that of `tx`.

    Returns:
      (params with the fast roles adapted, InnerInfo of all phases, in order).

    Differs from the paper: nothing for `meml`. `meml_released` first steps on one support image.
    """
    chex.assert_scalar_positive(options.steps)
    if "context" in params:
        params = params | {"context": jax.tree.map(jnp.zeros_like, params["context"])}
    slow = {role: value for role, value in params.items() if role not in learner.fast}
    fast = {role: params[role] for role in learner.fast}
    opt_state = tx.init(fast)
    infos = []
    # A scalar stays what it is: as an array, 1.0 would become float64 where that exists.
    count = len(learner.phases)
    weights: list[Any] = list(jnp.asarray(weight)) if jnp.ndim(weight) else [weight] * count
    for phase, factor in zip(learner.phases, weights, strict=True):

        def loss_fn(
            fast: Params, batch: Batch, phase: Phase = phase, factor: Array = factor
        ) -> tuple[Array, Array]:
            merged = slow | fast
            p = network.tail(merged, batch.inputs)
            rows = pooled_logits(
                merged, p, batch, network=network, pooling=phase.pool, ways=ways, options=options
            )
            loss = losses.cross_entropy(*rows)
            return factor * loss, loss

        loop = functools.partial(
            inner_loop,
            loss_fn,
            batches=inner_batches(support, phase),
            tx=tx,
            first_order=options.first_order or learner.first_order,
            remat=options.remat,
        )

        def one_pass(carry: Any, _: None, loop: Callable[..., Any] = loop) -> Any:
            return loop(carry[0], opt_state=carry[1])

        (fast, opt_state), info = _scan(one_pass, (fast, opt_state), None, options.steps)
        infos.append(jax.tree.map(lambda x: x.reshape(-1), info))
    info = jax.tree.map(lambda *x: jnp.concatenate(x), *infos)
    return slow | fast, info


def _scan(
    step: Callable[[Any, Any], Any], carry: Any, xs: Any, length: int, *, remat: bool = False
) -> Any:
    """`lax.scan`, without the loop where it has one turn: that takes half as long to trace."""
    if length > 1:
        # Nothing is moved out of a scan's body, so the barriers that prevent that would cost only.
        step = jax.checkpoint(step, prevent_cse=False) if remat else step
        return lax.scan(step, carry, xs, length=length)
    step = jax.checkpoint(step) if remat else step
    carry, y = step(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)
