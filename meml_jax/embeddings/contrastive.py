"""Contrastive embedding: the FEN trained to tell two views of an image from all others.

SimCLR with the NT-Xent loss (Chen et al. 2020, arXiv 2002.05709). Not in the paper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from meml_jax.config import EmbeddingConfig
from meml_jax.data.augment import get_views
from meml_jax.embeddings import fitting
from meml_jax.embeddings.components import normalize
from meml_jax.encoding import to_float
from meml_jax.layers import FEN
from meml_jax.networks import check_image_size
from meml_jax.types import Array, Encode, Info, Metrics, Params, TrainState, UserError
from meml_jax.updates import apply_gradients, repeat

PROJECTION = 128  # width of the projection head, and of what it returns
MIN_TEMPERATURE = 1e-3  # cosines over less than it overflow what they are compared with
TRAINED_BY = ("channels", "views", "temperature", "steps", "batch_size", "learning_rate")


class Projection(nn.Module):
    """Projection head: linear, ReLU, linear; features [N, D] -> [N, 128]."""

    @nn.compact
    def __call__(self, features: Array) -> Array:
        """Project; the loss reads this, the embedding is what lies before it."""
        hidden = nn.relu(nn.Dense(PROJECTION, name="hidden")(features))
        return nn.Dense(PROJECTION, name="output")(hidden)


def nt_xent(first: Array, second: Array, *, temperature: float) -> tuple[Array, Metrics]:
    """Normalised, temperature-scaled cross-entropy (NT-Xent; Chen et al. 2020, eq. 1).

    With z the 2B projections scaled to length 1, of which z_i and z_j are views of one image,

      l_ij = -log(exp(z_i . z_j / t) / sum_{k != i} exp(z_i . z_k / t)),

    and the loss is the mean of l_ij over all 2B ordered pairs.

    Args:
      first: float [B, P], projections of one view of each image.
      second: float [B, P], of the other view, in the same order.
      temperature: t, above 0.

    Returns:
      (loss [], Metrics []: `loss`, and `accuracy`, the share of views that are nearest to their
      own partner).
    """
    z = normalize(jnp.concatenate([first, second]))
    views = jnp.arange(len(z))
    partner = jnp.roll(views, len(first))
    similarity = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, z @ z.T / temperature)
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(similarity, partner))
    accuracy = jnp.mean(jnp.argmax(similarity, axis=1) == partner)
    return loss, {"loss": loss, "accuracy": accuracy}


def init_state(
    key: Array, image_shape: tuple[int, int, int], config: EmbeddingConfig
) -> TrainState:
    """Draw the parameters {'fen', 'projection'} at random and start the optimizer."""
    fen_key, projection_key = jax.random.split(key)
    p, fen = FEN(config.channels).init_with_output(fen_key, jnp.zeros((1, *image_shape)))
    projection = Projection().init(projection_key, p.reshape(1, -1))  # type: ignore[union-attr]
    params = {"fen": fen["params"], "projection": projection["params"]}
    return TrainState(jnp.zeros((), jnp.int32), params, fitting.optimizer(config).init(params))


def features(params: Params, images: Array, config: EmbeddingConfig) -> Array:
    """Compute R = relu(f_theta(X)), float32 [N, D], of images [N, H, W, C] in [0, 1]."""
    p: Any = FEN(config.channels).apply({"params": params["fen"]}, images)
    return nn.relu(p).reshape(len(images), -1)


def make_train_call(config: EmbeddingConfig) -> Callable[..., tuple[TrainState, Metrics]]:
    """Build the function that takes up to `fitting.STEPS_PER_CALL` steps in one compiled call.

    Returns:
      train_call(state, num_steps, images uint8 [N, H, W, C], key) -> (state, Metrics
      [fitting.STEPS_PER_CALL]). The batch and the views of a step follow from `fold_in(key, step)`.
    """
    views, tx = get_views(config.views), fitting.optimizer(config)

    def loss_fn(params: Params, pairs: Array) -> tuple[Array, Metrics]:
        projected: Any = Projection().apply(
            {"params": params["projection"]}, features(params, pairs, config)
        )
        first, second = jnp.split(projected, 2)
        return nt_xent(first, second, temperature=config.temperature)

    def step(state: TrainState, images: Array, key: Array) -> tuple[TrainState, Metrics]:
        batch_key, view_key = jax.random.split(jax.random.fold_in(key, state.step))
        chosen = jax.random.choice(batch_key, len(images), (config.batch_size,), replace=False)
        batch = to_float(images[chosen])
        pairs = views(view_key, jnp.concatenate([batch, batch]))
        grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params, pairs)
        return apply_gradients(state, grads, tx), metrics

    return repeat(step, ("loss", "accuracy"), steps_per_call=fitting.STEPS_PER_CALL)


def load(folder: Path, image_shape: tuple[int, int, int], config: EmbeddingConfig) -> Params:
    """Read {'fen', 'projection'} from what `fit` left in its `checkpoint_dir`; else a UserError."""
    fresh = functools.partial(init_state, jax.random.key(0), image_shape, config)
    return fitting.restore(folder, fresh)


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for settings with which nothing can be trained on images [N, H, W, C]."""
    fitting.check(config, images, positive=("channels",))
    if not MIN_TEMPERATURE <= config.temperature < np.inf:
        raise UserError(
            f"embedding.temperature={config.temperature}, expected at least {MIN_TEMPERATURE}"
        )
    get_views(config.views)
    check_image_size(images.shape[1:])


def fit(
    images: np.ndarray,
    key: jax.Array,
    config: EmbeddingConfig,
    *,
    checkpoint_dir: Path | None = None,
    report: Callable[[str], None] = print,
) -> tuple[Encode, Info]:
    """Train the FEN on pairs of views of unlabelled images.

    A function of (images, key, config), whatever stops lie between; the same call goes on from the
    last checkpoint.

    Args:
      images: uint8 [N, H, W, C].
      key: random key.
      config: `channels`, `views`, `temperature`, `steps`, `batch_size`, `learning_rate`,
        `checkpoint_every`.
      checkpoint_dir: gets `checkpoints/` (TrainState with params {'fen', 'projection'}),
        `metrics.jsonl` and `tensorboard/`; None: nothing is kept.
      report: prints a line.

    Returns:
      (encode: uint8 [N, H, W, C] -> float32 [N, D], the FEN's output after its ReLU; info: `loss`
      and pair `accuracy` of the last steps, `seconds`).

    Raises:
      UserError: settings that cannot be; checkpoints of other settings or images; a loss that is
        not finite.
      interrupts.Interrupted: SIGINT or SIGTERM, after the state was saved.

    Differs from Chen et al.: the projection has 128 hidden units whatever D is, theirs as many as
    there are features; Adam with a cosine in place of LARS with a warm-up and weight decay; views
    of drawings are maps and strokes (`augment.DrawingConfig`), not crops and colours, and those of
    photographs milder than theirs (`augment.PhotoConfig`).
    """
    check(config, images)
    init = functools.partial(init_state, image_shape=images.shape[1:], config=config)
    params, info = fitting.train(
        make_train_call(config),
        init,
        images,
        key,
        config,
        name="contrastive",
        trained_by=TRAINED_BY,
        loss="NT-Xent loss",
        checkpoint_dir=checkpoint_dir,
        report=report,
    )
    encode = fitting.chunked_encoder(lambda p, x: features(p, to_float(x), config), params)
    return encode, info
