"""Embeddings that need no training, and their registry."""

import jax
import numpy as np
import pytest

from meml_jax import embeddings
from meml_jax.config import EmbeddingConfig
from meml_jax.types import UserError


def images(count=60, size=6, channels=1, seed=0):
    # A few strong directions above noise: what a randomised solver finds to full precision.
    rng = np.random.default_rng(seed)
    pixels = size * size * channels
    strength = np.array([60.0, 40.0, 25.0, 15.0])
    directions = np.linalg.qr(rng.normal(size=(pixels, 4)))[0] * strength
    values = 128 + rng.normal(size=(count, 4)) @ directions.T + rng.normal(size=(count, pixels))
    return values.clip(0, 255).astype(np.uint8).reshape(count, size, size, channels)


def fit(name, x, seed=0, **fields):
    config = EmbeddingConfig(name=name, **fields)
    return embeddings.get_fit(name)(x, jax.random.key(seed), config)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("whiten", [False, True])
def test_pca_is_the_projection_on_the_first_singular_vectors(channels, whiten):
    x = images(channels=channels)
    encode, info = fit("pca", x, dim=4, whiten=whiten)
    z = encode(x)
    assert z.dtype == np.float32 and z.shape == (len(x), 4)
    flat = x.reshape(len(x), -1) / 255
    u, s, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    expected = u[:, :4] * (np.sqrt(len(x) - 1) if whiten else s[:4])
    sign = np.sign(np.sum(expected * z, axis=0))  # a singular vector has no sign of its own
    np.testing.assert_allclose(z * sign, expected, atol=1e-3 * np.abs(expected).max())
    share = (s[:4] ** 2).sum() / (s**2).sum()
    assert info["explained_variance"] == pytest.approx(share, abs=1e-3)


def test_pca_is_a_function_of_images_and_key():
    x = images()
    one, two = (fit("pca", x, seed=5, dim=4)[0](x) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    other = fit("pca", x, seed=6, dim=4)[0](x)
    np.testing.assert_allclose(one, other, atol=1e-3)  # another key, the same components


@pytest.mark.parametrize("name", ["pca", "pixels"])
def test_encode_treats_each_image_by_itself(name):
    x = images()
    encode, _ = fit(name, x, dim=4)
    whole = encode(x)
    order = np.random.default_rng(1).permutation(len(x))
    np.testing.assert_allclose(encode(x[order]), whole[order], atol=1e-5)
    pieces = np.concatenate([encode(x[:7]), encode(x[7:8]), encode(x[8:])])
    np.testing.assert_allclose(pieces, whole, atol=1e-5)
    np.testing.assert_allclose(encode(images(seed=9))[:3], encode(images(seed=9)[:3]), atol=1e-5)


@pytest.mark.parametrize(("dim", "count", "most"), [(61, 60, 36), (37, 60, 36), (11, 10, 10)])
def test_more_components_than_there_are(dim, count, most):
    with pytest.raises(UserError, match=f"embedding.dim={dim}, expected 1 to {most}"):
        fit("pca", images(count), dim=dim)
    with pytest.raises(UserError, match="embedding.dim=0"):
        fit("pca", images(count), dim=0)


def test_pixels_are_the_images():
    x = images(channels=3)
    encode, info = fit("pixels", x)
    z = encode(x)
    assert z.dtype == np.float32 and info == {"dim": 108}
    np.testing.assert_array_equal(z, x.reshape(len(x), -1).astype(np.float32) / 255)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match="'pac', expected one of .*'npz'.*did you mean 'pca'"):
        embeddings.get_fit("pac")
    with pytest.raises(UserError, match="expected one of") as error:
        embeddings.get_fit("entirely_else")
    assert "did you mean" not in str(error.value)


def test_l2_normalize_leaves_zero_rows():
    z = np.array([[3, 4], [0, 0], [-2, 0]], np.float32)
    unit = embeddings.l2_normalize(z)
    np.testing.assert_allclose(unit, [[0.6, 0.8], [0, 0], [-1, 0]], rtol=1e-6)
    assert unit.dtype == np.float32
