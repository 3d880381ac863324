"""The features of the FEN before any training: what its architecture alone tells apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from meml_jax.config import EmbeddingConfig
from meml_jax.embeddings import fitting
from meml_jax.encoding import to_float
from meml_jax.layers import FEN
from meml_jax.networks import check_image_size
from meml_jax.types import Array, Encode, Info, Params, UserError


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for no channels, or images too small for the FEN."""
    if config.channels < 1:
        raise UserError(f"embedding.channels={config.channels}, expected at least 1")
    check_image_size(images.shape[1:])


def fit(
    images: np.ndarray,
    key: jax.Array,
    config: EmbeddingConfig,
    *,
    checkpoint_dir: Path | None = None,
    report: Callable[[str], None] = print,
) -> tuple[Encode, Info]:
    """Draw a FEN at random.

    Args:
      images: uint8 [N, H, W, C], of which only the shape counts.
      key: random key.
      config: `channels` of the FEN.
      checkpoint_dir: not used, nothing is trained.
      report: not used.

    Returns:
      (encode: uint8 [N, H, W, C] -> float32 [N, D], R = relu(f_theta(X)); info: `dim`, D).

    Raises:
      UserError: as `check`.
    """
    del checkpoint_dir, report
    check(config, images)
    fen = FEN(config.channels)
    params = jax.jit(fen.init)(key, jnp.zeros((1, *images.shape[1:])))["params"]

    def encode(params: Params, images: Array) -> Array:
        p: Any = fen.apply({"params": params}, to_float(images))
        return nn.relu(p).reshape(len(images), -1)

    dim = jax.eval_shape(encode, params, images[:1]).shape[1]
    info: Info = {"dim": int(dim)}
    return fitting.chunked_encoder(encode, params), info
