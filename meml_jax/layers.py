"""FEN, FiLM, attention and CLN, as flax.linen modules; `networks` puts them together."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from meml_jax.convolution import conv2d
from meml_jax.types import Array

STRIDES = (2, 1, 2, 1, 2, 2)
CONTEXT_SIZE = 100  # dimensions of the FiLM context z (supplement)

_weight_init = nn.initializers.variance_scaling(2.0, "fan_in", "normal")


class Conv(nn.Module):
    """A convolution; `x [N, H, W, C] -> [N, H', W', channels]`.

    Attributes:
      channels: of the output.
      size: of the square kernel.
      stride: both ways.
      padding: rows and columns of zeros on each side.
      kernel_init: distribution of the kernel; He's by default.
    """

    channels: int
    size: int
    stride: int
    padding: int = 0
    kernel_init: nn.initializers.Initializer = _weight_init

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Convolve and add the bias."""
        if self.padding:
            edge = (self.padding, self.padding)
            x = jnp.pad(x, ((0, 0), edge, edge, (0, 0)))
        shape = (self.size, self.size, x.shape[-1], self.channels)
        kernel = self.param("kernel", self.kernel_init, shape, x.dtype)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.channels,), x.dtype)
        # Added in float32: the bias's gradient is a sum, which XLA's CPU does slowly in bfloat16.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        y = conv2d(x, kernel, stride=self.stride).astype(wide)
        return (y + bias.astype(wide)[None, None, None]).astype(x.dtype)


class FEN(nn.Module):
    """Feature extraction network f_theta: six convolutions, ReLU between them.

    The last kernel is 3x3 where the map allows it (Mini-ImageNet) and 1x1 otherwise (Omniglot).

    Attributes:
      channels: of every convolution.
      start: first convolution that is done, 0 for the images.
      stop: end of those that are done.
    """

    channels: int
    start: int = 0
    stop: int = len(STRIDES)

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Map images, or the convolution before `start`, to the last one, before its ReLU."""
        for layer in range(self.start, self.stop):
            size = 3 if min(x.shape[1:3]) >= 3 else 1
            conv = Conv(self.channels, size, STRIDES[layer], name=f"Conv_{layer}")
            x = conv(x if layer == 0 else nn.relu(x))
        return x


class FiLM(nn.Module):
    """Generator of two FiLM layers: a linear layer for each, from the context to 2 x channels.

    Differs from the paper: its formula multiplies gamma(z) x by beta(z); beta is a shift, as in the
    paper's words and in FiLM (Perez et al., 2018).
    """

    channels: int

    @nn.compact
    def __call__(self, z: Array) -> tuple[Array, Array]:
        """Map the context z [100] to (gamma, beta), each [2, channels]; z = 0 gives 1 and 0."""
        layers = [
            nn.Dense(2 * self.channels, kernel_init=_weight_init, name=f"layer_{i}")(z)
            for i in range(2)
        ]
        out = jnp.stack(layers).reshape(2, 2, self.channels)
        return 1 + out[:, 0], out[:, 1]


class AttentionScore(nn.Module):
    """Attention network f_rho: linear D -> D, tanh, linear D -> 1."""

    @nn.compact
    def __call__(self, features: Array) -> Array:
        """Score features [N, D] -> [N]."""
        hidden = nn.Dense(features.shape[-1], kernel_init=_weight_init, name="hidden")(features)
        return nn.Dense(1, kernel_init=_weight_init, name="output")(nn.tanh(hidden))[:, 0]


class SteppedDense(nn.Dense):
    """A linear layer, with the steps that an inner loop has kept beside its kernel, if any.

    The collection `steps` may hold `inputs` [T, in] and `added` [T, out]; the kernel is then that
    of the parameters plus the sum of their outer products (`outer_products`).
    """

    def __call__(self, x: Array) -> Array:
        """Map x [N, in] -> [N, out]; keeps x in the collection `inputs` where that is mutable."""
        self.sow("inputs", "rows", x, reduce_fn=lambda _, x: x)
        y = super().__call__(x)
        if self.has_variable("steps", "inputs"):
            inputs: Array = self.get_variable("steps", "inputs")
            added: Array = self.get_variable("steps", "added")
            y += (x @ inputs.T) @ added
        return y


class CLN(nn.Module):
    """Classification network f_W: linear D -> hidden, ReLU if `relu`, linear hidden -> classes."""

    hidden: int
    num_classes: int
    relu: bool

    @nn.compact
    def __call__(self, features: Array) -> Array:
        """Classify features [N, D] -> logits [N, num_classes]."""
        x = SteppedDense(self.hidden, kernel_init=_weight_init, name="hidden")(features)
        x = nn.relu(x) if self.relu else x
        return SteppedDense(self.num_classes, kernel_init=_weight_init, name="output")(x)
