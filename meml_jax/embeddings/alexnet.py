"""Sobel filtering and an AlexNet-style network with batch normalisation, for 28 to 84 pixels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from meml_jax import chunks
from meml_jax.encoding import to_float
from meml_jax.layers import Conv
from meml_jax.types import Array, Params

# (width as a share of `channels`, kernel, stride, whether a max pooling follows): AlexNet with 5x5
# in steps of 2 in place of 11x11 in steps of 4, and 3x3 in place of 5x5, for images of 84 pixels in
# place of 224. Sides of the maps of 84 pixels: 42, 21, 11, 6; of 64: 32, 16, 8, 4; of 28: 14 to 2.
LAYERS = (
    (3 / 8, 5, 2, True),
    (1, 3, 1, True),
    (3 / 2, 3, 1, False),
    (3 / 2, 3, 1, False),
    (1, 3, 1, True),
)
DENSE = 4  # width of the two dense layers, in `channels`
DROPOUT = 0.5
MOMENTUM = 0.9  # of the running averages of batch normalisation


def sobel(images: Array) -> Array:
    """Differentiate across and down: colour, and light that is the same everywhere, drop out.

    With g the mean of the channels, S = [1, 2, 1] and D = [-1, 0, 1],

      out[..., 0] = sum_ij S_i D_j g[y + i, x + j],  out[..., 1] = sum_ij D_i S_j g[y + i, x + j].

    Args:
      images: float [N, H, W, C]. Beyond the border the border's values are repeated, so an edge of
        the image is no edge in it.

    Returns:
      float [N, H, W, 2].
    """
    grey = jnp.pad(jnp.mean(images, axis=-1), ((0, 0), (1, 1), (1, 1)), mode="edge")

    def smooth_down(x: Array) -> Array:
        return x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]

    def smooth_across(x: Array) -> Array:
        return x[:, :, :-2] + 2 * x[:, :, 1:-1] + x[:, :, 2:]

    across = smooth_down(grey[:, :, 2:] - grey[:, :, :-2])
    down = smooth_across(grey[:, 2:] - grey[:, :-2])
    return jnp.stack([across, down], axis=-1)


def max_pool(x: Array) -> Array:
    """Maximum over windows of 2x2 [N, H, W, C] -> [N, ceil(H / 2), ceil(W / 2), C].

    AlexNet's windows are 3x3. The gradient of overlapping windows is a `select-and-scatter`, which
    XLA's CPU compiler runs on one thread, an element at a time.

    The gradient goes to one entry of each window. That of `jnp.max` divides it by the number of
    entries that equal the maximum: none, and NaN, where the compiler has computed the entries twice
    and rounded them in two ways.
    """

    def larger(a: Array, b: Array) -> Array:
        return jnp.where(a >= b, a, b)

    n, height, width, channels = x.shape
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    x = x.reshape(n, -(-height // 2), 2, -(-width // 2), 2, channels)
    x = larger(x[:, :, 0], x[:, :, 1])
    return larger(x[:, :, :, 0], x[:, :, :, 1])


class AlexNet(nn.Module):
    """Five convolutions and two dense layers; images [N, H, W, C] in [0, 1] -> [N, 4 * channels].

    Each convolution is followed by batch normalisation, ReLU and, where `LAYERS` says so, pooling;
    before each dense layer stands dropout. What is returned is the last layer before its ReLU.
    """

    channels: int

    @nn.compact
    def __call__(self, images: Array, *, train: bool) -> Array:
        """Map images to features.

        In training the statistics are the batch's and move the running averages; otherwise the
        running averages stand in for them, so an image's features depend on that image only.
        """
        x = sobel(images)
        for share, size, stride, pool in LAYERS:
            x = Conv(max(1, round(share * self.channels)), size, stride, padding=size // 2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x))
            x = max_pool(x) if pool else x
        x = x.reshape(len(x), -1)
        for layer in range(2):
            x = nn.Dropout(DROPOUT, deterministic=not train)(nn.relu(x) if layer else x)
            x = nn.Dense(DENSE * self.channels)(x)
        return x


def features(params: Params, images: Array, channels: int) -> Array:
    """Compute the features [N, 4 * channels] of images uint8 [N, H, W, C], each by itself."""
    variables = {"params": params["network"], "batch_stats": params["batch_stats"]}
    result: Any = AlexNet(channels).apply(variables, to_float(images), train=False)
    return result


def all_features(params: Params, images: Array, channels: int) -> Array:
    """Compute `features` of any number of images, `chunks.size` at a time."""
    size = min(chunks.size(), len(images))
    count = -(-len(images) // size)

    def body(i: Array, out: Array) -> Array:
        start = jnp.minimum(i * size, len(images) - size)  # the last chunk overlaps the one before
        part = features(params, lax.dynamic_slice_in_dim(images, start, size), channels)
        return lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

    return lax.fori_loop(0, count, body, jnp.zeros((len(images), DENSE * channels)))
