"""Embeddings that need no training, and their registry."""

import dataclasses

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
    return embeddings.get_embedding(name).fit(x, jax.random.key(seed), config)


@pytest.mark.parametrize("channels", [1, 3])
def test_pca_is_the_projection_on_the_first_singular_vectors(channels):
    x = images(channels=channels)
    encode, info = fit("pca", x, dim=4)
    z = encode(x)
    assert z.dtype == np.float32 and z.shape == (len(x), 4)
    flat = x.reshape(len(x), -1) / 255
    u, s, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    expected = u[:, :4] * s[:4]
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


def test_pca_encodes_in_chunks(monkeypatch):
    x = images(count=23)
    encode, _ = fit("pca", x, dim=4)
    whole = encode(x)
    monkeypatch.setattr(embeddings.pca, "CHUNK", 5)
    np.testing.assert_allclose(encode(x), whole, atol=1e-6)


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
        embeddings.get_embedding("pac")
    with pytest.raises(UserError, match="expected one of") as error:
        embeddings.get_embedding("entirely_else")
    assert "did you mean" not in str(error.value)


def test_a_training_belongs_to_the_version_of_its_row(tmp_path, monkeypatch):
    config = EmbeddingConfig(
        name="contrastive", channels=2, steps=1, batch_size=2, checkpoint_every=1
    )
    row, x = embeddings.get_embedding("contrastive"), images(count=4, size=28)

    def train():
        row.fit(x, jax.random.key(0), config, checkpoint_dir=tmp_path, report=lambda line: None)

    train()
    train()  # reused
    changed = dataclasses.replace(row, version=2)
    monkeypatch.setitem(embeddings.EMBEDDINGS, "contrastive", changed)
    with pytest.raises(UserError, match="belongs to other settings"):
        train()


def test_versions_of_ours_are_numbers():
    versions = {name: embeddings.version(EmbeddingConfig(name=name)) for name in ("pca", "acai")}
    assert versions == {"pca": (), "acai": (2,)}
    assert embeddings.version(EmbeddingConfig(name="npz")) == ()


def test_random_is_an_untrained_fen():
    x = images(size=28)
    encode, info = fit("random", x, channels=8)
    z = encode(x)
    assert z.dtype == np.float32 and z.shape == (60, 8) and info == {"dim": 8}
    assert (z >= 0).all() and len(np.unique(z, axis=0)) > 50
    np.testing.assert_array_equal(fit("random", images(seed=5, size=28), channels=8)[0](x), z)
    order = np.random.default_rng(1).permutation(len(x))
    np.testing.assert_array_equal(encode(x[order]), z[order])
    np.testing.assert_array_equal(encode(x[7:8]), z[7:8])
    assert np.any(fit("random", x, channels=8, seed=1)[0](x) != z)
    with pytest.raises(UserError, match="26x26 pixels are too small .*27x27"):
        fit("random", images(size=26), channels=8)
    with pytest.raises(UserError, match="embedding.channels=0"):
        fit("random", x, channels=0)


def correlated(rows=300, dim=5, rank=None, seed=0):
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(rank or dim, dim)) * 10.0 ** rng.uniform(-1, 1, size=dim)
    return (rng.normal(size=(rows, rank or dim)) @ mixing + rng.normal(size=dim)).astype(np.float32)


def test_whiten_gives_uncorrelated_directions_of_unit_variance():
    z = correlated()
    white = embeddings.fit_whiten(z)(z)
    assert white.dtype == np.float32 and white.shape == z.shape
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.cov(white, rowvar=False), np.eye(5), atol=1e-4)
    # Distances are those of Mahalanobis, whatever the rotation.
    inverse = np.linalg.inv(np.cov(z.astype(np.float64), rowvar=False))
    gap = z[:1].astype(np.float64) - z[1:10]
    expected = np.einsum("nd,de,ne->n", gap, inverse, gap)
    np.testing.assert_allclose(np.sum((white[:1] - white[1:10]) ** 2, axis=1), expected, rtol=1e-3)


def test_whitening_in_part_lies_between_the_components_and_unit_variance():
    z = correlated()
    deviation = embeddings.fit_whiten(z, 1e-9)(z).std(axis=0)
    for power in (0.5, 1.0):
        part = embeddings.fit_whiten(z, power)(z)
        np.testing.assert_allclose(part.std(axis=0), deviation ** (1 - power), rtol=1e-2)
    unit = embeddings.fit_rescale(z, EmbeddingConfig(whiten=0.5, normalize=True))(z)
    np.testing.assert_allclose(unit, embeddings.l2_normalize(embeddings.fit_whiten(z, 0.5)(z)))
    with pytest.raises(UserError, match=r"embedding.whiten=1.5, expected 0 \(not at all\) to 1"):
        embeddings.fit_rescale(z, EmbeddingConfig(whiten=1.5))(z)


def test_whiten_drops_directions_that_do_not_vary():
    z = np.concatenate([correlated(dim=4, rank=2), np.zeros((300, 2), np.float32)], axis=1)
    white = embeddings.fit_whiten(z)(z)
    assert white.shape == (300, 2)
    np.testing.assert_allclose(np.cov(white, rowvar=False), np.eye(2), atol=1e-4)
    three, same = correlated(rows=3, dim=5), np.ones((4, 3), np.float32)
    assert embeddings.fit_whiten(three)(three).shape == (3, 2)  # 3 points span 2
    np.testing.assert_array_equal(embeddings.fit_whiten(same)(same), np.zeros((4, 1)))


def test_other_embeddings_are_whitened_as_those_fitted():
    z = correlated(rows=300, dim=4)
    config = EmbeddingConfig(whiten=0.5, normalize=True)
    both = embeddings.fit_rescale(z[:200], config)(z)
    alone = embeddings.fit_rescale(z[:200], config)(z[:200])
    np.testing.assert_allclose(both[:200], alone, rtol=1e-5, atol=1e-6)
    assert np.abs(both - embeddings.fit_rescale(z, config)(z)).max() > 1e-3


def test_l2_normalize_leaves_zero_rows():
    z = np.array([[3, 4], [0, 0], [-2, 0]], np.float32)
    unit = embeddings.l2_normalize(z)
    np.testing.assert_allclose(unit, [[0.6, 0.8], [0, 0], [-1, 0]], rtol=1e-6)
    assert unit.dtype == np.float32


def test_images_that_are_all_the_same_have_no_components():
    images = np.full((5, 4, 4, 1), 7, np.uint8)
    with pytest.raises(UserError, match="all training images are the same"):
        fit("pca", images, dim=2)
