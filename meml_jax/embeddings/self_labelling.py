"""Embeddings trained on labels that they make themselves: DeepCluster and SeLa, rows of `RULES`.

In rounds: all images get pseudo-labels, and a network learns to predict them from random views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax

from meml_jax.config import EmbeddingConfig
from meml_jax.data.augment import get_views
from meml_jax.embeddings import alexnet, deepcluster, fitting, sela
from meml_jax.embeddings.alexnet import DENSE, AlexNet
from meml_jax.embeddings.components import fit_whitening, normalize, whiten
from meml_jax.encoding import to_float
from meml_jax.networks import check_image_size
from meml_jax.types import Array, Encode, Info, Metrics, Params, TaskTable, TrainState, UserError
from meml_jax.updates import repeat


class Rule(NamedTuple):
    """How a method makes its pseudo-labels.

    Attributes:
      assign: (key, embeddings [N, dim], log-probabilities [N, K], config) -> (labels int32 [N],
        Metrics [] by the names in `metrics`).
      resets_head: whether the classifier is drawn anew with the labels, because label c of one
        round has nothing to do with label c of the next.
      metrics: what `assign` tells beside the labels, recorded until the next round.
    """

    assign: Callable[[Array, Array, Array, EmbeddingConfig], tuple[Array, Metrics]]
    resets_head: bool
    metrics: tuple[str, ...] = ()


RULES = {
    "deepcluster": Rule(deepcluster.assign, resets_head=True),
    "sela": Rule(sela.assign, resets_head=False, metrics=("marginal_error",)),
}
"""Values of `embedding.name` that `fit` takes."""

TRAINED_BY = (
    "channels", "dim", "views", "num_pseudo_labels", "round_steps", "sharpness", "steps",
    "batch_size", "learning_rate",
)  # fmt: skip
MIN_IMAGE_SIZE = 16  # from which every pooling still sees more than one position
OPTIMIZED = ("network", "head")


def head(config: EmbeddingConfig) -> nn.Dense:
    """Classifier of relu(features), drawn from N(0, 0.01^2)."""
    return nn.Dense(config.num_pseudo_labels, kernel_init=nn.initializers.normal(0.01))


def init_state(
    key: Array, image_shape: tuple[int, int, int], num_images: int, config: EmbeddingConfig
) -> TrainState:
    """Draw the network and the head at random; no image has a pseudo-label yet.

    The state holds all that a resumed training needs: params {'network', 'batch_stats', 'head',
    'clusters'}, of which the last is the TaskTable of the current pseudo-labels, and the rule's
    metrics of the last round.
    """
    network_key, head_key = jax.random.split(key)
    module = AlexNet(config.channels)
    features, network = module.init_with_output(
        network_key, jnp.zeros((1, *image_shape)), train=False
    )
    params = {
        "network": network["params"],
        "batch_stats": network["batch_stats"],
        "head": head(config).init(head_key, features)["params"],
        "clusters": tabulate(jnp.zeros((num_images,), jnp.int32), config.num_pseudo_labels),
    }
    params |= {name: jnp.zeros(()) for name in RULES[config.name].metrics}
    tx = fitting.optimizer(config)
    opt_state = {role: tx.init(params[role]) for role in OPTIMIZED}
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state)


def tabulate(labels: Array, num_labels: int) -> TaskTable:
    """Sort images by label int32 [N], on the device; a label may have no image."""
    size = jnp.bincount(labels, length=num_labels).astype(jnp.int32)
    index = jnp.argsort(labels, stable=True).astype(jnp.int32)
    return TaskTable(index, jnp.cumsum(size) - size, size)


def sample(key: Array, table: TaskTable, batch_size: int) -> tuple[Array, Array]:
    """Draw images so that every pseudo-label is equally likely, whatever the size of its cluster.

    Args:
      key: random key.
      table: images by pseudo-label; those without images are never drawn.
      batch_size: B.

    Returns:
      (positions of images int32 [B], their pseudo-labels int32 [B]); images may stand twice.
    """
    label_key, image_key = jax.random.split(key)
    filled = jnp.argsort(table.size == 0, stable=True)
    labels = filled[jax.random.randint(label_key, (batch_size,), 0, jnp.sum(table.size > 0))]
    place = jax.random.randint(image_key, (batch_size,), 0, table.size[labels])
    return table.index[table.start[labels] + place], labels


def relabel(
    state: TrainState, images: Array, key: Array, rule: Rule, config: EmbeddingConfig
) -> TrainState:
    """Begin a round: make the pseudo-labels anew, from the network as it is.

    Args:
      state: its step gives the round.
      images: uint8 [N, H, W, C], all of them.
      key: random key of the training.
      rule: row of `RULES`.
      config: settings.

    Returns:
      The state with other 'clusters' and metrics and, if the rule says so, with a new 'head'.
    """
    assign_key, head_key = jax.random.split(jax.random.fold_in(key, state.step))
    params, opt_state = dict(state.params), dict(state.opt_state)
    r = alexnet.all_features(params, images, config.channels)
    embeddings = normalize(whiten(fit_whitening(r, config.dim), r))
    logits: Any = head(config).apply({"params": params["head"]}, nn.relu(r))
    labels, told = rule.assign(assign_key, embeddings, jax.nn.log_softmax(logits), config)
    params |= {"clusters": tabulate(labels, config.num_pseudo_labels), **told}
    if rule.resets_head:
        params["head"] = head(config).init(head_key, r[:1])["params"]
        # At the full learning rate, or it would learn less and less of each round's labels.
        opt_state["head"] = fitting.optimizer(config).init(params["head"])
    return TrainState(state.step, params, opt_state)


def make_train_call(
    rule: Rule, config: EmbeddingConfig
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Build the function that takes up to `fitting.STEPS_PER_CALL` steps in one compiled call.

    Returns:
      train_call(state, num_steps, images uint8 [N, H, W, C], key) -> (state, Metrics
      [fitting.STEPS_PER_CALL]). All that is random in a step follows from `fold_in(key, step)`.
      A round begins with a call: `round_steps` is a multiple of the calls' length.
    """
    views, tx = get_views(config.views), fitting.optimizer(config)

    def loss_fn(trained: Params, batch_stats: Params, images: Array, labels: Array, key: Array):
        r, changed = AlexNet(config.channels).apply(
            {"params": trained["network"], "batch_stats": batch_stats},
            images,
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        logits: Any = head(config).apply({"params": trained["head"]}, nn.relu(r))
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        accuracy = jnp.mean(jnp.argmax(logits, axis=1) == labels)
        return loss, (changed["batch_stats"], {"loss": loss, "accuracy": accuracy})

    def step(state: TrainState, images: Array, key: Array) -> tuple[TrainState, Metrics]:
        keys = jax.random.split(jax.random.fold_in(key, state.step), 3)
        table = state.params["clusters"]
        chosen, labels = sample(keys[0], table, config.batch_size)
        batch = views(keys[1], to_float(images[chosen]))
        trained = {role: state.params[role] for role in OPTIMIZED}
        grads, (batch_stats, metrics) = jax.grad(loss_fn, has_aux=True)(
            trained, state.params["batch_stats"], batch, labels, keys[2]
        )
        opt_state = {}
        for role in OPTIMIZED:
            updates, opt_state[role] = tx.update(grads[role], state.opt_state[role], trained[role])
            trained[role] = optax.apply_updates(trained[role], updates)
        params = state.params | trained | {"batch_stats": batch_stats}
        sizes = {"clusters": jnp.sum(table.size > 0), "largest": jnp.max(table.size)}
        told = {name: state.params[name] for name in rule.metrics}
        return TrainState(state.step + 1, params, opt_state), metrics | sizes | told

    names = ("loss", "accuracy", "clusters", "largest", *rule.metrics)
    several_steps = repeat(step, names, steps_per_call=fitting.STEPS_PER_CALL)

    def train_call(
        state: TrainState, num_steps: Array, images: Array, key: Array
    ) -> tuple[TrainState, Metrics]:
        label_key, step_key = jax.random.split(key)
        state = lax.cond(
            state.step % config.round_steps == 0,
            lambda s: relabel(s, images, label_key, rule, config),
            lambda s: s,
            state,
        )
        return several_steps(state, num_steps, images, step_key)

    return train_call


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for settings with which nothing can be trained on images [N, H, W, C]."""
    fitting.check(config, images, positive=("channels", "sharpness"))
    get_views(config.views)
    if not 2 <= config.num_pseudo_labels <= len(images):
        raise UserError(
            f"embedding.num_pseudo_labels={config.num_pseudo_labels}, expected 2 to the number of "
            f"training images, {len(images)}"
        )
    if config.round_steps < 1 or config.round_steps % fitting.STEPS_PER_CALL:
        raise UserError(
            f"embedding.round_steps={config.round_steps}, expected a multiple of "
            f"{fitting.STEPS_PER_CALL}"
        )
    if not 1 <= config.dim <= DENSE * config.channels:
        raise UserError(
            f"embedding.dim={config.dim}, expected 1 to {DENSE * config.channels}, the number of "
            "features; lower it or raise embedding.channels"
        )
    check_image_size(images.shape[1:], MIN_IMAGE_SIZE)


def fit(
    images: np.ndarray,
    key: jax.Array,
    config: EmbeddingConfig,
    *,
    checkpoint_dir: Path | None = None,
    report: Callable[[str], None] = print,
) -> tuple[Encode, Info]:
    """Train an AlexNet-style network on pseudo-labels that it makes itself (Sec. 3, supplement).

    A function of (images, key, config), whatever stops lie between; the same call goes on from the
    last checkpoint.

    Args:
      images: uint8 [N, H, W, C].
      key: random key.
      config: `name` (`deepcluster` or `sela`), `channels`, `dim`, `views`, `num_pseudo_labels`,
        `round_steps`, `sharpness` (sela), `steps`, `batch_size`, `learning_rate`,
        `checkpoint_every`.
      checkpoint_dir: gets `checkpoints/`, `metrics.jsonl` and `tensorboard/`; None: nothing is
        kept.
      report: prints a line.

    Returns:
      (encode: uint8 [N, H, W, C] -> float32 [N, dim], principal components of the features,
      whitened on the training images, of length 1: what DeepCluster's k-means sees; info: `loss`
      and `accuracy` on pseudo-labels of the last steps, `clusters` that have images, images of the
      `largest`, `seconds`).

    Raises:
      UserError: settings that cannot be; checkpoints of other settings or images; a loss that is
        not finite.
      interrupts.Interrupted: SIGINT or SIGTERM, after the state was saved.

    Differs from Caron et al. and Asano et al.: the network is sized for small images
    (`alexnet`), both methods see a Sobel filter, pooling has windows of 2x2
    (`alexnet.max_pool`), the learning rate of a new head starts anew while the network's falls,
    and SeLa has one head, whole balanced labels, first ones of the untrained head in place of
    random ones, and rounds of one length where theirs grow longer. Adam in place of SGD: a
    round has hundreds of steps here and thousands there, and at SGD's 0.05 the loss on 256
    labels was 5.52 after 80 steps (64 channels), where chance is 5.55.
    """
    check(config, images)
    init = functools.partial(
        init_state, image_shape=images.shape[1:], num_images=len(images), config=config
    )
    params, info = fitting.train(
        make_train_call(RULES[config.name], config),
        init,
        images,
        key,
        config,
        name=config.name,
        trained_by=TRAINED_BY,
        loss="loss on pseudo-labels",
        checkpoint_dir=checkpoint_dir,
        report=report,
    )

    @jax.jit
    def whitening_of(params: Params, images: Array) -> Params:
        return fit_whitening(alexnet.all_features(params, images, config.channels), config.dim)

    network = {role: params[role] for role in ("network", "batch_stats")}
    encoder = network | {"whitening": whitening_of(network, images)}
    encode = fitting.chunked_encoder(
        lambda p, x: normalize(whiten(p["whitening"], alexnet.features(p, x, config.channels))),
        encoder,
    )
    return encode, info
