"""Figures of some clusters: images by attention weight, what the convolutions make of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meml_jax import attention, feature_maps, figures
from meml_jax.config import Config
from meml_jax.learners import get_learner
from meml_jax.networks import Network
from meml_jax.types import Params, TaskTable

MAPPED = 8  # images whose feature maps are drawn where none weighs more than another


def draw(
    config: Config,
    images: np.ndarray,
    table: TaskTable,
    params: Params,
    folder: Path,
    *,
    network: Network,
) -> list[str]:
    """Draw the figures of a run's clusters.

    A learner without attention gives all images of a cluster the same weight: there is no figure of
    weights, and the feature maps are those of one image a cluster.

    Args:
      config: of the run.
      images: uint8 [N, H, W, C], of which the clusters are made.
      table: clusters, or true classes, on the host.
      params: meta-trained, by role.
      folder: that gets the figures.
      network: pure functions.

    Returns:
      Names of the figures, without folder and ending.
    """
    channels, true = config.network.channels, config.tasks.labels == "true"
    kind, kinds = ("true class", "true classes") if true else ("cluster", "clusters")
    path = folder / "feature_maps.png"
    if get_learner(config.learner).uses_attention:
        attended = attention.attend(params, images, table, network=network, options=config.inner)
        figures.cluster_grid(attended, folder / "clusters.png", kind=kind)
        mapped = feature_maps.of_clusters(params, attended, channels=channels)
        shown = f"of some {kinds} the images with the highest and the lowest attention weight"
        figures.feature_maps(mapped, path, images=shown)
        return ["clusters", "feature_maps"]
    picked = attention.pick(table, num_clusters=MAPPED, most_images=1)
    first = images[np.concatenate([rows for rows, _ in picked])]
    names = [f"of {size} images" for _, size in picked]
    mapped = feature_maps.of_images(params, first, names, channels=channels)
    figures.feature_maps(mapped, path, images=f"an image each of some {kinds}")
    return ["feature_maps"]
