"""Images as numbers, and their frozen features R, which heads learn from: computed once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import chunks
from meml_jax.networks import Network, after_stem
from meml_jax.types import Array, Params


def to_float(images: Array) -> Array:
    """Bring uint8 images [..., H, W, C] to float32 in [0, 1]."""
    return images.astype(jnp.float32) / 255


def encode(
    params: Params, images: np.ndarray, *, network: Network, chunk: int | None = None
) -> Array:
    """Compute the frozen features R of uint8 images [N, H, W, C], float32 [N, D], once.

    `chunk` images at a time, `chunks.size` if None, the last ones padded, so that any N > 0 runs
    the same program. Images pass through side by side: there is no batch norm, and none sees
    another.
    """
    encode_chunk = functools.partial(_encode_chunk, params, network=network)
    return jnp.asarray(chunks.in_chunks(encode_chunk, images, chunk or chunks.size()))


def frozen_features(params: Params, images: np.ndarray, source: str, *, network: Network) -> Array:
    """Compute what a head learns from, once for all images uint8 [N, H, W, C].

    Args:
      params: of the network; pixels need none.
      images: on the host.
      source: `pixels`, float32 [N, H * W * C] in [0, 1], a baseline; `stem`, what lies before the
        first fast parameter; else the features R of the network.
      network: of the meta-training.
    """
    if source == "pixels":
        return to_float(jnp.asarray(images)).reshape(len(images), -1)
    return encode(params, images, network=after_stem(network) if source == "stem" else network)


@functools.partial(jax.jit, static_argnames="network")
def _encode_chunk(params: Params, images: Array, *, network: Network) -> Array:
    return network.activate(network.encode(params, to_float(images)))
