"""`conv2d` against the native convolution of JAX: values, gradients of two orders, transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meml_jax import convolution
from meml_jax.convolution import _conv, conv2d

CASES = [
    pytest.param(size, stride, channels, id=f"{size}x{size}-stride{stride}-{channels}ch")
    for size in (1, 3)
    for stride in (1, 2)
    for channels in (1, 4)
]
CASES.append(pytest.param(3, 1, 50, id="3x3-stride1-50ch, fewer products than windows"))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def reference(x, kernel, *, stride):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=layout)


def make(size=3, channels=4, shape=(2, 8, 7), seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*shape, channels)).astype(dtype)
    kernel = rng.normal(size=(size, size, channels, 5)) / channels**0.5
    return jnp.asarray(x), jnp.asarray(kernel, dtype)


def loss(conv, x, kernel, stride):
    """Not linear in the output, so that second derivatives see every term."""
    return jnp.sum(jnp.sin(conv(x, kernel, stride=stride)))


def gradient(conv, stride):
    return jax.jit(jax.grad(lambda x, kernel: loss(conv, x, kernel, stride), argnums=(0, 1)))


def second(conv, stride):
    """The gradient of the loss after one gradient step on both arguments, as in MAML."""

    def after_step(x, kernel):
        dx, dk = gradient(conv, stride)(x, kernel)
        return loss(conv, x - 0.1 * dx, kernel - 0.1 * dk, stride)

    return jax.jit(jax.grad(after_step, argnums=(0, 1)))


def check(actual, expected, tolerance=1e-11):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


@pytest.mark.parametrize("size, stride, channels", CASES)
def test_values_and_gradients(size, stride, channels):
    x, kernel = make(size, channels)
    y = conv2d(x, kernel, stride=stride)
    assert y.dtype == x.dtype
    tolerance = 1e-11 if channels < 50 else 1e-9  # of sums of more terms
    check(y, reference(x, kernel, stride=stride), tolerance)
    for derivative in (gradient, second):
        found, expected = (derivative(conv, stride)(x, kernel) for conv in (conv2d, reference))
        check(found, expected, tolerance)


def test_float32():
    x, kernel = make(dtype=np.float32)
    y = conv2d(x, kernel, stride=2)
    assert y.dtype == jnp.float32
    check(y, reference(x, kernel, stride=2), 1e-4)
    grads = gradient(conv2d, 2)(x, kernel)
    assert all(g.dtype == jnp.float32 for g in grads)
    check(grads, gradient(reference, 2)(x, kernel), 1e-4)


def test_rectangular_kernel():
    x, kernel = make()
    kernel = kernel[:2]
    check(conv2d(x, kernel, stride=2), reference(x, kernel, stride=2))
    check(gradient(conv2d, 2)(x, kernel), gradient(reference, 2)(x, kernel))


def test_matmul_path_on_every_backend():
    x, kernel = make()
    check(_conv(x, kernel, 2), reference(x, kernel, stride=2))


@pytest.fixture
def by_cells(monkeypatch):
    """The form that bfloat16 has, in float64, where it can be compared."""
    monkeypatch.setattr(convolution, "_by_cells", lambda channels, dtype: True)


@pytest.mark.parametrize("size, stride, channels", CASES)
def test_values_and_gradients_by_cells(by_cells, size, stride, channels):
    test_values_and_gradients(size, stride, channels)


@pytest.mark.parametrize("axes", [(0, 0), (None, 0)])
def test_vmap_by_cells(by_cells, axes):
    test_vmap(axes, second)


@pytest.mark.parametrize("stride", [1, 2])
def test_bfloat16_sums_in_float32(stride):
    rounded = [v.astype(jnp.bfloat16) for v in make(channels=64, dtype=np.float32)]
    assert convolution._by_cells(64, rounded[0].dtype)
    exact = [v.astype(jnp.float32) for v in rounded]
    y, expected = conv2d(*rounded, stride=stride), reference(*exact, stride=stride)
    # Nothing but the result is rounded, to 8 bits.
    assert y.dtype == jnp.bfloat16
    check(y.astype(jnp.float32), expected, 2**-8)
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    weights = weights.astype(jnp.bfloat16)

    def product(conv, x, kernel, dtype):
        return jnp.sum(conv(x, kernel, stride=stride) * weights.astype(dtype))

    found = jax.grad(product, argnums=(1, 2))(conv2d, *rounded, jnp.bfloat16)
    theirs = jax.grad(product, argnums=(1, 2))(reference, *exact, jnp.float32)
    assert all(g.dtype == jnp.bfloat16 for g in found)
    check(tuple(g.astype(jnp.float32) for g in found), theirs, 2**-8)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("of", [gradient, second])
def test_vmap(axes, of):
    pairs = [make(seed=seed) for seed in range(3)]
    stacked = [
        jnp.stack(v) if a == 0 else v[0]
        for v, a in zip(zip(*pairs, strict=True), axes, strict=True)
    ]
    actual = jax.jit(jax.vmap(of(conv2d, 2), in_axes=axes))(*stacked)
    rows = [[v[i] if a == 0 else v for v, a in zip(stacked, axes, strict=True)] for i in range(3)]
    one = of(reference, 2)
    expected = [one(*row) for row in rows]
    check(actual, jax.tree.map(lambda *v: jnp.stack(v), *expected))


def test_scan_and_switch():
    x, kernel = make(shape=(4, 8, 7))

    def train(conv, x, kernel):
        def step(kernel, i):
            grads = [lambda k, n=n: jax.grad(loss, argnums=2)(conv, x[:n], k, 1) for n in (2, 3, 4)]
            return kernel - 0.1 * lax.switch(i % 3, grads, kernel), None

        return loss(conv, x, lax.scan(step, kernel, jnp.arange(4))[0], 1)

    outer = [
        jax.jit(jax.grad(lambda x, k, c=c: train(c, x, k), argnums=(0, 1)))
        for c in (conv2d, reference)
    ]
    check(outer[0](x, kernel), outer[1](x, kernel), 1e-9)
