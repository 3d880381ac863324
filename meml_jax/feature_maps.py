"""What the convolutions of a trained FEN make of images, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from meml_jax.attention import AttendedCluster
from meml_jax.encoding import to_float
from meml_jax.layers import FEN, STRIDES
from meml_jax.types import Params


class MappedImage(NamedTuple):
    """An image and what each convolution answers to it.

    Attributes:
      name: what the figure calls it.
      image: uint8 [H, W, C].
      maps: float32 [H_l, W_l] of each convolution l, the mean of its channels after the ReLU.
    """

    name: str
    image: np.ndarray
    maps: list[np.ndarray]


def feature_maps(params: Params, images: np.ndarray, *, channels: int) -> list[np.ndarray]:
    """Compute mean_c relu(f_l(x))_c of each convolution l; FiLM layers are left out.

    Args:
      params: parameters by role.
      images: uint8 [n, H, W, C].
      channels: of the FEN.

    Returns:
      For each convolution float32 [n, H_l, W_l].
    """
    _, state = FEN(channels).apply(
        {"params": params["fen"]},
        to_float(jnp.asarray(images)),
        capture_intermediates=True,
        mutable=["intermediates"],
    )
    outputs = [state["intermediates"][f"Conv_{i}"]["__call__"][0] for i in range(len(STRIDES))]
    return [np.asarray(nn.relu(x).mean(axis=-1)) for x in outputs]


def of_clusters(
    params: Params,
    clusters: Sequence[AttendedCluster],
    *,
    channels: int,
    num_clusters: int = 4,
) -> list[MappedImage]:
    """Map, of some clusters, the images with the highest and with the lowest attention weight."""
    places = np.linspace(0, len(clusters) - 1, min(num_clusters, len(clusters))).astype(int)
    names, images = [], []
    for cluster in (clusters[i] for i in places):
        for word, pick in (("highest", np.argmax), ("lowest", np.argmin)):
            names.append(f"{word} weight\nof {cluster.size} images")
            images.append(cluster.images[pick(cluster.alpha)])
    return of_images(params, np.stack(images), names, channels=channels)


def of_images(
    params: Params, images: np.ndarray, names: Sequence[str], *, channels: int
) -> list[MappedImage]:
    """Map images uint8 [n, H, W, C], which the figure calls by n names."""
    maps = feature_maps(params, images, channels=channels)
    return [
        MappedImage(name, image, [layer[i] for layer in maps])
        for i, (name, image) in enumerate(zip(names, images, strict=True))
    ]
