"""ACAI: an autoencoder whose interpolations a critic cannot tell from reconstructions.

Berthelot et al. 2018, arXiv 1807.07543; the paper's embedding of Omniglot. With encoder f, decoder
g, critic d and alpha drawn uniformly from [0, 0.5],

  x_alpha = g(alpha f(x1) + (1 - alpha) f(x2)),
  L_d     = (d(x_alpha) - alpha)^2 + d(gamma x + (1 - gamma) g(f(x)))^2,
  L_fg    = |x - g(f(x))|^2 + lambda d(x_alpha)^2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meml_jax.config import EmbeddingConfig
from meml_jax.embeddings import fitting
from meml_jax.embeddings.autoencoder import Model, around, make_model, prepare
from meml_jax.types import Array, Encode, Info, Metrics, Params, TrainState, UserError
from meml_jax.updates import apply_gradients, repeat

TRAINED_BY = (
    "dim", "width", "depth", "critic_mix", "critic_weight", "steps", "batch_size", "learning_rate",
)  # fmt: skip
VERSION = 2  # images in [-1, 1]; in [0, 1] at first
METRICS = ("loss", "reconstruction", "fooling", "critic")


def autoencoder_loss(
    images: Array, reconstruction: Array, guess: Array, *, weight: float
) -> tuple[Array, Metrics]:
    """Compute L_fg = |x - g(f(x))|^2 + weight d(x_alpha)^2.

    Args:
      images: x, [N, H, W, C].
      reconstruction: g(f(x)), likewise.
      guess: d(x_alpha), [N].
      weight: lambda.

    Returns:
      (loss [], Metrics []: `reconstruction` and `fooling`, its two parts without the weight).

    Differs from the paper: the squared error is a mean over pixels of images in [-1, 1], as in its
    authors' code, so that lambda does not depend on the size of the images.
    """
    reconstruction_loss = jnp.mean((images - reconstruction) ** 2)
    fooling = jnp.mean(guess**2)
    metrics = {"reconstruction": reconstruction_loss, "fooling": fooling}
    return reconstruction_loss + weight * fooling, metrics


def critic_loss(guess: Array, alpha: Array, guess_real: Array) -> Array:
    """Compute L_d = (d(x_alpha) - alpha)^2 + d(gamma x + (1 - gamma) g(f(x)))^2, mean over [N]."""
    return jnp.mean((guess - alpha) ** 2) + jnp.mean(guess_real**2)


def losses(
    params: Params, images: Array, alpha: Array, *, model: Model, mix: float, weight: float
) -> tuple[Array, Metrics]:
    """Compute L_fg + L_d, of which each gives gradients to its own networks only.

    Image i is interpolated with image i - 1 of the batch.

    Args:
      params: {'encoder', 'decoder', 'critic'}.
      images: [N, H, W, C] in [-1, 1].
      alpha: [N] in [0, 0.5].
      model: the networks.
      mix: gamma.
      weight: lambda.

    Returns:
      (L_fg + L_d [], Metrics []: `loss` L_fg, its parts `reconstruction` and `fooling`, `critic`
      L_d).
    """
    z = model.encode(params, images)
    share = alpha[:, None, None, None]
    between = share * z + (1 - share) * jnp.roll(z, 1, axis=0)
    reconstruction, blend = jnp.split(model.decode(params, jnp.concatenate([z, between])), 2)
    fooled = model.criticise(lax.stop_gradient(params), blend)
    own, metrics = autoencoder_loss(images, reconstruction, fooled, weight=weight)
    real = mix * images + (1 - mix) * reconstruction
    guess = model.criticise(params, lax.stop_gradient(blend))
    critic = critic_loss(guess, alpha, model.criticise(params, lax.stop_gradient(real)))
    return own + critic, metrics | {"loss": own, "critic": critic}


def init_state(
    key: Array, image_shape: tuple[int, int, int], config: EmbeddingConfig
) -> TrainState:
    """Draw the parameters {'encoder', 'decoder', 'critic'} and start the optimizer."""
    params = make_model(config, image_shape).init(key)
    return TrainState(jnp.zeros((), jnp.int32), params, fitting.optimizer(config).init(params))


def make_train_call(
    config: EmbeddingConfig, image_shape: tuple[int, int, int]
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Build train_call(state, num_steps, images uint8 [N, H, W, C], key); see `repeat`.

    The batch and alpha of a step follow from `fold_in(key, step)`. One Adam of both losses'
    gradients is one Adam for each: it works element by element, and no parameter has two.
    """
    model, tx = make_model(config, image_shape), fitting.optimizer(config)
    loss_fn = functools.partial(
        losses, model=model, mix=config.critic_mix, weight=config.critic_weight
    )

    def step(state: TrainState, images: Array, key: Array) -> tuple[TrainState, Metrics]:
        batch_key, alpha_key = jax.random.split(jax.random.fold_in(key, state.step))
        chosen = jax.random.choice(batch_key, len(images), (config.batch_size,), replace=False)
        alpha = jax.random.uniform(alpha_key, (config.batch_size,), maxval=0.5)
        batch = prepare(images[chosen], config.depth)
        grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params, batch, alpha)
        return apply_gradients(state, grads, tx), metrics

    return repeat(step, METRICS, steps_per_call=fitting.STEPS_PER_CALL)


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for settings with which nothing can be trained on images [N, H, W, C]."""
    fitting.check(config, images)
    if not 0 <= config.critic_mix <= 1:
        raise UserError(f"embedding.critic_mix={config.critic_mix}, expected 0 to 1, a share")
    if not 0 <= config.critic_weight < np.inf:
        raise UserError(f"embedding.critic_weight={config.critic_weight}, expected at least 0")
    make_model(config, images.shape[1:])


def fit(
    images: np.ndarray,
    key: jax.Array,
    config: EmbeddingConfig,
    *,
    checkpoint_dir: Path | None = None,
    report: Callable[[str], None] = print,
) -> tuple[Encode, Info]:
    """Train autoencoder and critic on unlabelled images.

    A function of (images, key, config), whatever stops lie between; the same call goes on from the
    last checkpoint.

    Args:
      images: uint8 [N, H, W, C].
      key: random key.
      config: `dim`, `width`, `depth`, `critic_mix`, `critic_weight`, `steps`, `batch_size`,
        `learning_rate`, `checkpoint_every`.
      checkpoint_dir: gets `checkpoints/` (TrainState with params {'encoder', 'decoder',
        'critic'}), `metrics.jsonl` and `tensorboard/`; None: nothing is kept.
      report: prints a line.

    Returns:
      (encode: uint8 [N, H, W, C] -> float32 [N, dim], the flattened code f(x); info: `METRICS` of
      the last steps, `seconds`).

    Raises:
      UserError: settings that cannot be; checkpoints of other settings or images; a loss that is
        not finite.
      interrupts.Interrupted: SIGINT or SIGTERM, after the state was saved.

    Differs from the paper (Berthelot et al.): Adam's learning rate falls along a cosine, by default
    from 1e-3, in place of a constant 1e-4; 28x28 images are brought to 32x32 by repeating their
    border, which is the paper's -1 on drawings. Its authors have 16 channels in the first block for
    digits, as here, and 64 for colour.
    """
    check(config, images)
    shape = images.shape[1:]
    model = make_model(config, shape)
    init = functools.partial(init_state, image_shape=shape, config=config)
    params, info = fitting.train(
        make_train_call(config, shape),
        init,
        images,
        key,
        config,
        name="acai",
        trained_by=TRAINED_BY,
        loss="autoencoder's loss",
        checkpoint_dir=checkpoint_dir,
        report=report,
    )

    def encode(params: Params, images: Array) -> Array:
        return model.encode(params, prepare(images, config.depth)).reshape(len(images), -1)

    return fitting.chunked_encoder(encode, params), info


def load(folder: Path, image_shape: tuple[int, int, int], config: EmbeddingConfig) -> Params:
    """Read the parameters that `fit` left in its `checkpoint_dir`; UserError if it cannot."""
    fresh = functools.partial(init_state, jax.random.key(0), image_shape, config)
    return fitting.restore(folder, fresh)


def decode_between(
    params: Params, first: np.ndarray, second: np.ndarray, shares: Any, config: EmbeddingConfig
) -> np.ndarray:
    """Decode the straight way from each first to each second image.

    Args:
      params: of `load`.
      first: uint8 [N, H, W, C].
      second: uint8 [N, H, W, C].
      shares: [T], of the second image; 0 is the reconstruction of the first.
      config: that `params` were trained with.

    Returns:
      float32 [N, T, H, W, C], cut off at 0 and 1.
    """
    model, shape = make_model(config, first.shape[1:]), first.shape[1:]
    (top, _), (left, _) = around(shape, config.depth)

    @jax.jit
    def decode(params: Params, first: Array, second: Array, shares: Array) -> Array:
        ends = [model.encode(params, prepare(x, config.depth)) for x in (first, second)]
        share = shares[:, None, None, None, None]
        z = (1 - share) * ends[0][None] + share * ends[1][None]
        images = model.decode(params, z.reshape(-1, *z.shape[2:]))
        images = images[:, top : top + shape[0], left : left + shape[1]]
        return jnp.clip((images + 1) / 2, 0, 1).reshape(*z.shape[:2], *shape)

    decoded = decode(params, first, second, jnp.asarray(shares, jnp.float32))
    return np.asarray(decoded).swapaxes(0, 1)
