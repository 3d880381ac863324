"""Principal components as embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from meml_jax.config import EmbeddingConfig
from meml_jax.types import Encode, Info, UserError

CHUNK = 2_000  # images encoded at a time: in float32 they take four times the memory


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for more components than images or pixels, or images that are all alike."""
    most = min(len(images), int(np.prod(images.shape[1:])))
    if not 1 <= config.dim <= most:
        raise UserError(f"embedding.dim={config.dim}, expected 1 to {most} for these images")
    if (images == images[0]).all():
        raise UserError("all training images are the same, expected different ones; check data.dir")


def fit(
    images: np.ndarray,
    key: jax.Array,
    config: EmbeddingConfig,
    *,
    checkpoint_dir: Path | None = None,
    report: Callable[[str], None] = print,
) -> tuple[Encode, Info]:
    """Fit principal components to uint8 images [N, H, W, C].

    Args:
      images: uint8 [N, H, W, C].
      key: random key of the randomised solver.
      config: `dim` components.
      checkpoint_dir: not used, it takes seconds.
      report: not used.

    Returns:
      (encode to float32 [N, dim], info with the share of variance that is explained).

    Raises:
      UserError: as `check`.
    """
    del checkpoint_dir, report
    check(config, images)
    seed = int(jax.random.randint(key, (), 0, np.iinfo(np.int32).max))
    # Centred in place: `flat` makes a copy of its own.
    model = PCA(config.dim, svd_solver="randomized", random_state=seed, copy=False)

    def flat(images: np.ndarray) -> np.ndarray:
        return images.reshape(len(images), -1).astype(np.float32) / 255

    with threadpool_limits(1):  # the same sums in the same order on every machine
        model.fit(flat(images))

    def encode(images: np.ndarray) -> np.ndarray:
        starts = range(0, len(images), CHUNK)
        with threadpool_limits(1):
            parts = [model.transform(flat(images[start : start + CHUNK])) for start in starts]
        return np.concatenate(parts).astype(np.float32)

    info: Info = {"explained_variance": float(model.explained_variance_ratio_.sum())}
    return encode, info
