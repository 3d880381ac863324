"""Encoder, decoder and critic of ACAI, as in its authors' code (Berthelot et al. 2018)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from meml_jax.config import EmbeddingConfig
from meml_jax.convolution import conv2d
from meml_jax.encoding import to_float
from meml_jax.layers import Conv
from meml_jax.types import Array, Params, UserError

SLOPE = 0.2  # of the leaky ReLU below 0

_leaky = functools.partial(nn.leaky_relu, negative_slope=SLOPE)
_weight_init = nn.initializers.variance_scaling(1 / (1 + SLOPE**2), "fan_in", "normal")


def same_conv(channels: int, name: str) -> Conv:
    """Build a 3x3 convolution that keeps the size of its images, zeros around."""
    return Conv(channels, 3, stride=1, padding=1, kernel_init=_weight_init, name=name)


class Stem(nn.Module):
    """A 1x1 convolution and the 3x3 one on it, zeros around: [N, H, W, C] -> [N, H, W, width].

    There is no activation between them, so they are one 3x3 convolution of C + 1 channels: the last
    one is 1 inside the image and brings the bias of the first, which the zeros around do not have.
    There are far fewer windows to copy than from `width` channels.
    """

    width: int

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Convolve twice."""
        kernel = functools.partial(self.param, init_fn=_weight_init, dtype=images.dtype)
        bias = functools.partial(
            self.param, init_fn=nn.initializers.zeros_init(), shape=(self.width,)
        )
        point = kernel("point_kernel", shape=(1, 1, images.shape[-1], self.width))[0, 0]
        point = jnp.concatenate([point, bias("point_bias")[None]])
        square = kernel("square_kernel", shape=(3, 3, self.width, self.width))
        both = jnp.einsum("cm,ijmo->ijco", point, square)
        x = jnp.concatenate([images, jnp.ones_like(images[..., :1])], axis=-1)
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return conv2d(x, both, stride=1) + bias("square_bias")[None, None, None]


class Encoder(nn.Module):
    """f, and the critic's body: blocks of two convolutions that double the channels, then halving.

    [N, S, S, C] -> [N, S / 2^depth, S / 2^depth, outputs]; the first convolution is a `Stem`.
    """

    width: int
    depth: int
    outputs: int

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Encode; the last layer is linear."""
        x = images
        for block in range(self.depth):
            for i in range(2):
                conv = same_conv(self.width << block, f"block_{block}_{i}")
                x = _leaky((conv if block or i else Stem(self.width, name="stem"))(x))
            n, height, width, channels = x.shape
            x = x.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))
        x = _leaky(same_conv(self.width << self.depth, "last")(x))
        return same_conv(self.outputs, "code")(x)


class Decoder(nn.Module):
    """g, the encoder backwards: two convolutions, then every pixel becomes four."""

    width: int
    depth: int
    channels: int

    @nn.compact
    def __call__(self, z: Array) -> Array:
        """Decode [N, S / 2^depth, S / 2^depth, K] -> images [N, S, S, channels], unbounded."""
        x = z
        for block in reversed(range(self.depth)):
            for i in range(2):
                x = _leaky(same_conv(self.width << block, f"block_{block}_{i}")(x))
            n, height, width, channels = x.shape
            four = jnp.broadcast_to(x[:, :, None, :, None], (n, height, 2, width, 2, channels))
            x = four.reshape(n, 2 * height, 2 * width, channels)
        return same_conv(self.channels, "image")(_leaky(same_conv(self.width, "last")(x)))


class Model(NamedTuple):
    """Pure functions of the parameters {'encoder', 'decoder', 'critic'}.

    Attributes:
      init: key -> params.
      encode: (params, images [N, H, W, C]) -> z [N, h, w, k].
      decode: (params, z) -> images [N, H, W, C].
      criticise: (params, images) -> guess of alpha [N].
    """

    init: Callable[[Array], Params]
    encode: Callable[[Params, Array], Array]
    decode: Callable[[Params, Array], Array]
    criticise: Callable[[Params, Array], Array]


def around(image_shape: tuple[int, ...], depth: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns to add before and after, so that the sides can be halved `depth` times."""
    missing = [-side % 2**depth for side in image_shape[:2]]
    return tuple((gap // 2, gap - gap // 2) for gap in missing)


def prepare(images: Array, depth: int) -> Array:
    """Bring uint8 images to [-1, 1] and repeat their border until `around` is filled."""
    signed = 2 * to_float(images) - 1
    return jnp.pad(signed, ((0, 0), *around(images.shape[1:], depth), (0, 0)), "edge")


def make_model(config: EmbeddingConfig, image_shape: tuple[int, int, int]) -> Model:
    """Build the networks for images of a shape (H, W, C) that is made to fit by `prepare`.

    Raises:
      UserError: no width, no or too much depth, or `embedding.dim` cannot be spread over the
        positions that are left.
    """
    for field in ("width", "depth"):
        if getattr(config, field) < 1:
            raise UserError(f"embedding.{field}={getattr(config, field)}, expected at least 1")
    most = (max(image_shape[:2]) - 1).bit_length()  # from which on the code is one position
    if config.depth > most:
        raise UserError(
            f"embedding.depth={config.depth}, expected at most {most} for images of "
            f"{image_shape[0]}x{image_shape[1]} pixels"
        )
    gaps = around(image_shape, config.depth)
    padded = [side + sum(gap) for side, gap in zip(image_shape[:2], gaps, strict=True)]
    code = [side >> config.depth for side in padded]
    if config.dim < 1 or config.dim % (code[0] * code[1]):
        raise UserError(
            f"embedding.dim={config.dim}, expected a multiple of {code[0] * code[1]}: images of "
            f"{image_shape[0]}x{image_shape[1]} pixels become {code[0]}x{code[1]} positions after "
            f"embedding.depth={config.depth} halvings"
        )
    outputs = config.dim // (code[0] * code[1])
    encoder = Encoder(config.width, config.depth, outputs)
    decoder = Decoder(config.width, config.depth, image_shape[2])

    def init(key: Array) -> Params:
        encoder_key, decoder_key, critic_key = jax.random.split(key, 3)
        images = jnp.zeros((1, *padded, image_shape[2]))
        variables = {
            "encoder": encoder.init(encoder_key, images),
            "decoder": decoder.init(decoder_key, jnp.zeros((1, *code, outputs))),
            "critic": encoder.init(critic_key, images),
        }
        return {role: tree["params"] for role, tree in variables.items()}

    def apply(module: nn.Module, role: str) -> Callable[[Params, Array], Array]:
        return lambda params, x: module.apply({"params": params[role]}, x)  # type: ignore[return-value]

    body = apply(encoder, "critic")
    return Model(
        init=init,
        encode=apply(encoder, "encoder"),
        decode=apply(decoder, "decoder"),
        criticise=lambda params, images: jnp.mean(body(params, images), axis=(1, 2, 3)),
    )
