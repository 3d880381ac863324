"""Meta-training: the meta-loss, the meta-step, and many meta-steps in one compiled call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meml_jax import losses, outer_products, pooling, rehearsal
from meml_jax.config import InnerConfig, OuterConfig
from meml_jax.encoding import to_float
from meml_jax.inner import adapt, pooled_logits
from meml_jax.learners import Learner
from meml_jax.networks import Network, reset_class_rows
from meml_jax.samplers import Sampler
from meml_jax.types import Array, Batch, Metrics, Params, Task, TaskTable, TrainState, UserError
from meml_jax.updates import apply_gradients, repeat

METRICS = ("loss", "accuracy", "inner_loss", "active", "logit_spread")


def outer_optimizer(config: OuterConfig) -> optax.GradientTransformation:
    """Build the outer optimizer: element-wise clip, then Adam (supplement).

    Differs from the paper: it names Adam alone; the clip is the released code's. Where `fen_lr` is
    set, theta has a rate of its own: a FEN that is trained already needs a lower one than a CLN
    that begins at random.
    """
    if config.fen_lr is None:
        return optax.chain(optax.clip(config.clip), optax.adam(config.lr))
    rates = {"fen": optax.adam(config.fen_lr), "others": optax.adam(config.lr)}

    def rate_of(params: Params) -> Params:
        return {role: "fen" if role == "fen" else "others" for role in params}

    return optax.chain(optax.clip(config.clip), optax.partition(rates, rate_of))


def init_state(
    key: Array,
    network: Network,
    tx: optax.GradientTransformation,
    *,
    coreset_size: int | None = None,
) -> TrainState:
    """Draw theta, W and rho at random (Alg. 1, line 3) and start the outer optimizer.

    With `coreset_size`, rehearsal at meta-train starts with an empty coreset of so many images.
    """
    params = network.init(key)
    coreset = None if coreset_size is None else rehearsal.init_coreset(coreset_size)
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), coreset)


def gather_images(images: Array, task: Task) -> Task:
    """Replace the positions in a task by the images [N, H, W, C] (uint8) that lie there."""

    def gather(batch: Batch) -> Batch:
        return dataclasses.replace(batch, inputs=to_float(images[batch.inputs]))

    return Task(gather(task.support), gather(task.query), task.weight)


def encode_tasks(params: Params, tasks: Task, network: Network) -> Task:
    """Replace images by what `network.stem` gives, support and query of all tasks in one pass.

    What lies before the first fast parameter does not change in the inner loop, so it is needed
    once: the meta-gradient is the same as with encoding in every inner step.
    """
    num_support = tasks.support.mask.shape[1]
    images = jnp.concatenate([tasks.support.inputs, tasks.query.inputs], axis=1)
    x = network.stem(params, images.reshape(-1, *images.shape[2:]))
    x = x.reshape(*images.shape[:2], *x.shape[1:])
    support = Batch(x[:, :num_support], tasks.support.label, tasks.support.mask)
    query = Batch(x[:, num_support:], tasks.query.label, tasks.query.mask)
    return Task(support, query, tasks.weight)


def meta_loss(
    params: Params,
    tasks: Task,
    *,
    network: Network,
    learner: Learner,
    inner: InnerConfig,
    outer: OuterConfig,
    ways: int,
) -> tuple[Array, Metrics]:
    """Adapt to each task's support set and judge on its query set: the loss of eq. (4), Sec. 3.

    Args:
      params: phi by role.
      tasks: a meta-batch, leaves with leading [B]; inputs are images [B, K, H, W, C] in [0, 1].
      network: pure functions.
      learner: row of the table.
      inner: inner learning rate, and options of `adapt`.
      outer: where Gamma applies: `weight_on` is `meta` (eq. 7) or `inner`.
      ways: static, classes in a support set; no fewer than there are (`adapt`).

    Returns:
      (meta-loss [], Metrics []: query `loss` and `accuracy`, `inner_loss` over the inner steps,
      `active` share of features above 0 on some query image, `logit_spread` largest standard
      deviation of a logit over the query images). The gradient with respect to `params` goes
      through the inner updates (second order), unless `inner.first_order` or the learner is so.

    Differs from the paper: nothing with `weight_on='meta'`; the released code weights the inner
    losses.
    """
    tasks = encode_tasks(params, tasks, network)
    adapt_to: Callable[..., Any] = functools.partial(
        adapt, tx=learner.optimizer(inner.lr, params), ways=ways
    )
    if outer_products.applies(learner):
        adapt_to = outer_products.adapt  # the same, faster

    def task_loss(task: Task) -> tuple[Array, Metrics]:
        on_inner = outer.weight_on == "inner"
        adapted, info = adapt_to(
            params,
            task.support,
            network=network,
            learner=learner,
            weight=task.weight if on_inner else 1.0,
            options=inner,
        )
        query = task.query
        p = network.tail(adapted, query.inputs)
        logits, label, mask = pooled_logits(
            adapted, p, query, network=network, pooling="none", ways=ways
        )
        loss = losses.cross_entropy(logits, label, mask)
        visible = jnp.any((network.activate(p) > 0) & mask[:, None], axis=0)
        metrics = {
            "loss": loss,
            "accuracy": losses.accuracy(logits, label, mask),
            "inner_loss": losses.masked_mean(info.loss, info.stepped),
            "active": jnp.mean(visible.astype(loss.dtype)),
            # One row alone does not tell whether the logits depend on the image.
            "logit_spread": jnp.where(
                jnp.sum(mask) > 1, jnp.max(jnp.std(logits, axis=0, where=mask[:, None])), jnp.inf
            ),
        }
        return loss * (1.0 if on_inner else task.weight), metrics

    if len(tasks.weight) == 1:  # as in the paper; without `vmap` it is faster to trace
        loss, metrics = task_loss(jax.tree.map(lambda x: x[0], tasks))
    else:
        loss, metrics = jax.vmap(task_loss)(tasks)
    return jnp.mean(loss), jax.tree.map(jnp.mean, lax.stop_gradient(metrics))


def meta_grad(params: Params, tasks: Task, **settings) -> tuple[Params, Metrics]:
    """Gradient of `meta_loss` with respect to phi, through the inner updates, and its Metrics."""
    return jax.grad(functools.partial(meta_loss, **settings), has_aux=True)(params, tasks)


def step_keys(key: Array, step: Array) -> Array:
    """Keys [5] of a step: clusters, new class rows, tasks, views of images, coreset."""
    return jax.random.split(jax.random.fold_in(key, step), 5)


def make_positions(
    sampler: Sampler, *, steps_per_call: int
) -> Callable[[Array, TaskTable, Array], Array]:
    """Build the function that tells which images the steps of a call will use.

    Returns:
      positions(first step int32 [], table, key) -> dataset positions int32 [M] of the tasks of
      `steps_per_call` steps, the same that `make_train_call` samples.
    """

    def of_step(step: Array, table: TaskTable, key: Array) -> Array:
        cluster_key, _, task_key, _, _ = step_keys(key, step)
        tasks, _, _ = sampler.draw(cluster_key, task_key, table, jnp.ones(table.size.shape))
        return jnp.concatenate([tasks.support.inputs.ravel(), tasks.query.inputs.ravel()])

    def positions(step: Array, table: TaskTable, key: Array) -> Array:
        steps = step + jnp.arange(steps_per_call)
        return jax.vmap(of_step, in_axes=(0, None, None))(steps, table, key).ravel()

    return positions


def make_train_call(
    *,
    network: Network,
    learner: Learner,
    inner: InnerConfig,
    outer: OuterConfig,
    sampler: Sampler,
    steps_per_call: int,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Build the function that takes up to `steps_per_call` meta-steps in one call.

    The meta-gradient of every bucket is compiled once and chosen by `lax.switch`, so neither
    cluster sizes nor the number of steps cause a retrace. A run is a function of (key, step): the
    key of a step is `fold_in(key, step)`.

    Returns:
      train_call(state, num_steps, images, table, weights, key) -> (state, Metrics
      [steps_per_call]), to be jitted with the state donated. `num_steps` is int32 [] (traced),
      `images` uint8 [N, H, W, C], `weights` float32 [C]; entries of the metrics past `num_steps`
      are 0.

    Raises:
      UserError: unknown `outer.weight_on`; a meta-batch or number of inner steps under 1; options
        of the pooling that are out of range or without effect.
    """
    if outer.weight_on not in ("meta", "inner"):
        raise UserError(f"outer.weight_on={outer.weight_on!r}, expected 'meta' or 'inner'")
    if outer.meta_batch < 1:
        raise UserError(f"outer.meta_batch={outer.meta_batch}, expected at least 1")
    if inner.steps < 1:
        raise UserError(f"inner.steps={inner.steps}, expected at least 1")
    pooling.check(inner, learner)
    tx = outer_optimizer(outer)

    def grad_in_bucket(trim, params, tasks, images, view_key):
        return meta_grad(
            params,
            sampler.prepare(view_key, gather_images(images, trim(tasks))),
            network=network,
            learner=learner,
            inner=inner,
            outer=outer,
            ways=sampler.ways,
        )

    branches = [functools.partial(grad_in_bucket, trim) for trim in sampler.trims]

    def step(state: TrainState, images: Array, table: TaskTable, weights: Array, key: Array):
        cluster_key, reset_key, task_key, view_key, coreset_key = step_keys(key, state.step)
        # Sampling lies outside the switch: its random bits would be compiled anew in every branch.
        tasks, classes, bucket = sampler.draw(cluster_key, task_key, table, weights)
        params = state.params
        if learner.resets_class_row:
            params = reset_class_rows(reset_key, params, classes, reset_bias=inner.reset_bias)
        coreset = state.reservoir
        if sampler.coreset_batch is not None:
            tasks, coreset = rehearsal.replace_query(
                coreset_key, coreset, tasks, sampler.coreset_batch
            )
        grads, metrics = lax.switch(bucket, branches, params, tasks, images, view_key)
        state = dataclasses.replace(state, params=params, reservoir=coreset)
        return apply_gradients(state, grads, tx), metrics  # eq. (4)

    return repeat(step, METRICS, steps_per_call=steps_per_call)
