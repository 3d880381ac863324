"""Lloyd's k-means inside a training, and whitening."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.decomposition import PCA

from meml_jax.embeddings import kmeans
from meml_jax.embeddings.components import fit_whitening, normalize, whiten


def unit(count, dim=5, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("chunk", [7, 20, 4096])
def test_assignment_by_hand_whatever_the_chunks(monkeypatch, chunk):
    monkeypatch.setattr(kmeans, "CHUNK", chunk)
    points, centres = unit(40), 1.5 * unit(6, seed=1)
    labels, sums, counts = kmeans.assign(jnp.asarray(points), jnp.asarray(centres))
    expected = ((points[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(labels, expected)
    np.testing.assert_array_equal(counts, np.bincount(expected, minlength=6))
    for c in range(6):
        np.testing.assert_allclose(sums[c], points[expected == c].sum(axis=0), atol=1e-5)


def test_separate_groups_are_found():
    corners = np.repeat(np.eye(5, dtype=np.float32), 8, axis=0)
    points = corners + 0.01 * unit(40)
    found = jax.jit(kmeans.kmeans, static_argnames="num_clusters")
    inertia = []
    for seed in range(4):  # a start may put two centres into one group
        labels, centres = found(jax.random.key(seed), points, num_clusters=5)
        inertia.append(((points - np.asarray(centres)[labels]) ** 2).sum())
        same = found(jax.random.key(seed), points, num_clusters=5)[0]
        np.testing.assert_array_equal(labels, same)
        if inertia[-1] < 0.01:
            groups = np.asarray(labels).reshape(5, 8)
            assert (groups == groups[:, :1]).all() and len(np.unique(groups)) == 5
    assert min(inertia) < 0.01


def test_an_empty_cluster_splits_one_that_has_points():
    centres = 10.0 * unit(5)
    counts = jnp.array([1.0, 0.0, 12.0, 0.0, 5.0])
    donors = []
    for seed in range(30):
        new = np.asarray(kmeans.reseed(jax.random.key(seed), jnp.asarray(centres), counts))
        np.testing.assert_array_equal(new[[0, 2, 4]], centres[[0, 2, 4]])
        for c in (1, 3):
            gap = np.linalg.norm(new[c] - centres, axis=1)
            donors.append(int(gap.argmin()))
            assert 0 < gap.min() < 0.02
    assert set(donors) == {2, 4}  # one point cannot be split
    assert donors.count(2) > donors.count(4)


def test_centres_that_begin_at_one_place_part():
    points = jnp.asarray(unit(200))
    labels, _ = kmeans.lloyd(jax.random.key(0), points, jnp.tile(points[:1], (8, 1)))
    assert (np.bincount(labels, minlength=8) > 0).all()


def test_points_that_are_all_equal_end_in_one_cluster():
    points = jnp.tile(jnp.asarray(unit(1)), (30, 1))
    labels, centres = kmeans.kmeans(jax.random.key(0), points, num_clusters=4)
    assert len(np.unique(labels)) == 1 and np.isfinite(centres).all()


@pytest.mark.parametrize("dim", [3, 6])
def test_whitened_features_have_the_identity_as_covariance(dim):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(300, 6)) @ rng.normal(size=(6, 6)) * 3 + rng.normal(size=6)
    features = features.astype(np.float32)
    z = np.asarray(whiten(fit_whitening(jnp.asarray(features), dim), jnp.asarray(features)))
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(z.T @ z / len(z), np.eye(dim), atol=2e-3)
    other = PCA(dim, whiten=True).fit_transform(features) * np.sqrt(300 / 299)
    sign = np.sign((z * other).sum(axis=0))
    np.testing.assert_allclose(z * sign, other, atol=1e-2)


def test_directions_without_variance_are_not_blown_up():
    features = np.zeros((20, 6), np.float32)
    features[:, :2] = np.random.default_rng(0).normal(size=(20, 2))
    z = np.asarray(whiten(fit_whitening(jnp.asarray(features), 4), jnp.asarray(features)))
    np.testing.assert_allclose(z[:, 2:], 0, atol=1e-3)
    dead = jnp.ones((20, 6))
    assert np.isfinite(normalize(whiten(fit_whitening(dead, 4), dead))).all()


def test_rows_get_length_one():
    z = normalize(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(z, [[0.6, 0.8], [0, 0]], atol=1e-6)
