"""2-D convolution that runs at matrix-product speed on CPUs, and natively on accelerators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

MIN_CHANNELS = 32  # of an input whose cells are multiplied one by one


def conv2d(x: Array, kernel: Array, *, stride: int) -> Array:
    """Convolve without padding.

    y[n, p, q, o] = sum_{i, j, c} x[n, p * stride + i, q * stride + j, c] * kernel[i, j, c, o]

    Reverse-mode derivatives of any order, `vmap` over either argument and `scan` are supported;
    on CPU forward mode (`jvp`) is not.

    Args:
      x: float [N, H, W, C], not smaller than the kernel.
      kernel: float [KH, KW, C, O], of the dtype of `x`.
      stride: step between windows, the same down and across.

    Returns:
      float [N, (H - KH) // stride + 1, (W - KW) // stride + 1, O], of the dtype of `x`.
    """
    if jax.default_backend() == "cpu":
        few = kernel.shape[3] * kernel.shape[0] * kernel.shape[1] <= x.shape[3]
        if stride == 1 and few and not _by_cells(x.shape[3], x.dtype):
            return _product_first(x, kernel)
        # XLA's CPU compiler has no fast kernel for the native gradients inside a scan: 9.8 s a
        # step of six layers, 256 channels, 25 images of 28x28, on 2 cores; products take 66 ms.
        return _conv(x, kernel, stride)
    return native(x, kernel, stride)


def native(x: Array, kernel: Array, stride: int) -> Array:
    """The same by XLA's own convolution."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=layout)


def _windows(x: Array, size: tuple[int, ...], stride: int) -> Array:
    """The window under each output, [N, P, Q, KH * KW * C]: one strided slice per kernel cell."""
    return jnp.concatenate(_cells(x, size, stride), axis=-1)


def _product_first(x: Array, kernel: Array) -> Array:
    """The convolution of stride 1 to so few channels that windows would be wider than products."""
    height, width, channels, outputs = kernel.shape
    products = x @ jnp.moveaxis(kernel, 2, 0).reshape(channels, -1)
    products = lax.optimization_barrier(products)
    products = products.reshape(*x.shape[:3], height, width, outputs)
    rows, cols = x.shape[1] - height + 1, x.shape[2] - width + 1
    cells = [
        products[:, i : i + rows, j : j + cols, i, j] for i in range(height) for j in range(width)
    ]
    return sum(cells[1:], start=cells[0])


def _cells(x: Array, size: tuple[int, ...], stride: int) -> list[Array]:
    """The slices that `_windows` puts side by side, each [N, P, Q, C]."""
    rows, cols = ((n - k) // stride * stride + 1 for n, k in zip(x.shape[1:3], size, strict=True))
    return [
        x[:, i : i + rows : stride, j : j + cols : stride]
        for i in range(size[0])
        for j in range(size[1])
    ]


def _by_cells(channels: int, dtype: Any) -> bool:
    """Whether to sum the products of the single cells of a kernel, in place of one of windows.

    CPUs have instructions for bfloat16 by bfloat16 to float32 (AMX). XLA uses them where it finds
    both operands stored in bfloat16: of windows it does not, which it puts together in float32.
    """
    return dtype == jnp.bfloat16 and channels >= MIN_CHANNELS


def _weights(kernel: Array) -> list[Array]:
    """The matrix of each cell of a kernel, [C, O]."""
    return list(kernel.reshape(-1, *kernel.shape[2:]))


def _product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """The product of two matrices over an axis of each, summed in float32 or better."""
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


# The three functions below are the derivatives of one trilinear form, sum(y_bar * conv(x, kernel)),
# so each one's derivatives are the other two: every order costs matrix products, and only the
# inputs are kept for the backward pass, not the windows, which are KH * KW times larger.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _conv(x: Array, kernel: Array, stride: int) -> Array:
    """The convolution, y."""
    if _by_cells(x.shape[3], x.dtype):
        cells = _cells(x, kernel.shape[:2], stride)
        rows = [lax.optimization_barrier(cell.reshape(-1, x.shape[3])) for cell in cells]
        parts = [_product(*pair, (1, 0)) for pair in zip(rows, _weights(kernel), strict=True)]
        y = sum(parts[1:], start=parts[0])
        return y.reshape(*cells[0].shape[:3], kernel.shape[3]).astype(x.dtype)
    # The barriers keep XLA from computing slices and sums again inside the operands of a product.
    windows = lax.optimization_barrier(_windows(x, kernel.shape[:2], stride))
    return windows @ kernel.reshape(-1, kernel.shape[3])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv_input(y_bar: Array, kernel: Array, shape: tuple[int, ...], stride: int) -> Array:
    """The gradient with respect to x, of the given shape: windows added back into place."""
    if _by_cells(kernel.shape[2], y_bar.dtype):
        rows = y_bar.reshape(-1, y_bar.shape[3])
        parts = [_product(rows, weights, (1, 1)) for weights in _weights(kernel)]
        parts = [part.reshape(*y_bar.shape[:3], kernel.shape[2]) for part in parts]
        image = jax.ShapeDtypeStruct(shape, parts[0].dtype)
        fold = jax.linear_transpose(lambda x: _cells(x, kernel.shape[:2], stride), image)
        return fold(parts)[0].astype(y_bar.dtype)
    windows = lax.optimization_barrier(y_bar @ kernel.reshape(-1, kernel.shape[3]).T)
    image = jax.ShapeDtypeStruct(shape, windows.dtype)
    fold = jax.linear_transpose(lambda x: _windows(x, kernel.shape[:2], stride), image)
    return fold(windows)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv_kernel(x: Array, y_bar: Array, size: tuple[int, int], stride: int) -> Array:
    """The gradient with respect to the kernel, of the given size."""
    if _by_cells(x.shape[3], x.dtype):
        rows = y_bar.reshape(-1, y_bar.shape[3])
        # Stored as the product reads it: of a transposed operand XLA makes a copy in float32.
        cells = [jnp.moveaxis(cell, 3, 0) for cell in _cells(x, size, stride)]
        columns = [lax.optimization_barrier(cell.reshape(x.shape[3], -1)) for cell in cells]
        kernel = jnp.stack([_product(column, rows, (1, 0)) for column in columns])
        return kernel.reshape(*size, x.shape[3], y_bar.shape[3]).astype(x.dtype)
    windows = lax.optimization_barrier(_windows(x, size, stride))
    # Contract the leading axes as they are: autodiff of `@` would transpose y_bar into a copy.
    product = lax.dot_general(windows, y_bar, (((0, 1, 2), (0, 1, 2)), ((), ())))
    return product.reshape(*size, x.shape[3], y_bar.shape[3])


_PULLBACKS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    _conv: lambda stride, saved, y_bar: (
        _conv_input(y_bar, saved[1], saved[0].shape, stride),
        _conv_kernel(saved[0], y_bar, saved[1].shape[:2], stride),
    ),
    _conv_input: lambda shape, stride, saved, x: (
        _conv(x, saved[1], stride),
        _conv_kernel(x, saved[0], saved[1].shape[:2], stride),
    ),
    _conv_kernel: lambda size, stride, saved, kernel: (
        _conv_input(saved[1], kernel, saved[0].shape, stride),
        _conv(saved[0], kernel, stride),
    ),
}
for _form, _pullback in _PULLBACKS.items():
    _form.defvjp(lambda a, b, *static, f=_form: (f(a, b, *static), (a, b)), _pullback)
