"""Settings that may be left open (0 or empty); they are then chosen from the data, and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meml_jax.config import Config
from meml_jax.settings import override
from meml_jax.types import Dataset

OPEN = ("data.image_size", "data.channels", "clustering.num_clusters")
"""Fields of which 0 means open, and which a training depends on."""

CHOSEN = (*OPEN, "test.num_classes")
"""Fields that may be left open."""

IMAGES_PER_CLUSTER = 20  # as the paper has on Omniglot
MAX_CLUSTERS = 1100  # likewise
CURVE = (2, 5, 10, 20, 50, 100, 200)


def complete(config: Config, dataset: Dataset, say: Callable[[str], None]) -> Config:
    """Return the settings with nothing left open.

    Args:
      config: as the user gave it.
      dataset: loaded with it; image size and channels were chosen there (`data.sizes`).
      say: prints a line on each choice.

    Returns:
      Settings whose image size, channels, number of clusters (one for 20 training images, 2 to
      1100) and numbers of test classes (2, 5, 10, 20, 50, 100, 200 as far as there are, and all)
      are set.
    """
    images, num_classes = dataset.train.images, dataset.test.num_classes
    chosen: dict[str, Any] = {
        "data.image_size": images.shape[1],
        "data.channels": images.shape[3],
    }
    if not config.clustering.num_clusters:
        num_clusters = max(2, min(MAX_CLUSTERS, len(images) // IMAGES_PER_CLUSTER))
        chosen["clustering.num_clusters"] = num_clusters
        say(f"chose clustering.num_clusters={num_clusters} for {len(images)} training images")
    if not config.test.num_classes:
        curve = (*(n for n in CURVE if n < num_classes), num_classes)
        chosen["test.num_classes"] = curve
        say(f"chose test.num_classes={curve} for {num_classes} test classes")
    return override(config, chosen)
