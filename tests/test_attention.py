"""Attention weights over clusters: those of eq. (1), whatever the size of the cluster."""

import numpy as np
import pytest
import tiny

from meml_jax.attention import attend, pick
from meml_jax.config import InnerConfig
from meml_jax.types import TaskTable

PLAIN = InnerConfig()
SIZES = np.array([5, 2, 90, 7], np.int32)


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (int(SIZES.sum()), *tiny.CONV_IMAGE), np.uint8)


def clusters():
    index = np.random.default_rng(1).permutation(int(SIZES.sum())).astype(np.int32)
    return TaskTable(index, np.cumsum(SIZES) - SIZES, SIZES)


@pytest.mark.parametrize("feature", ["relu", "preactivation"])
def test_weights_are_the_softmax_of_the_scores(images, feature):
    network = tiny.network("meml", dense=False, attention_feature=feature)
    params, table = tiny.parameters(network), clusters()
    found = attend(
        params, images, table, network=network, options=PLAIN, num_clusters=3, most_images=20
    )
    assert [row.size for row in found] == [2, 5, 90]
    for row, c in zip(found, (1, 0, 2), strict=True):
        own = table.index[table.start[c] : table.start[c] + SIZES[c]]
        rows = own[np.linspace(0, SIZES[c] - 1, min(SIZES[c], 20)).astype(int)]
        assert len(set(rows)) == len(rows) == min(SIZES[c], 20)
        np.testing.assert_array_equal(row.images, images[rows])
        p = network.encode(params, images[rows].astype(np.float32) / 255)
        scores = np.asarray(network.score(params, p), np.float64)
        expected = np.exp(scores - scores.max())
        np.testing.assert_allclose(row.alpha, expected / expected.sum(), rtol=1e-4)


def test_the_clusters_are_those_that_are_picked_without_weights(images):
    network = tiny.network("meml", dense=False)
    found = attend(tiny.parameters(network), images, clusters(), network=network, options=PLAIN)
    picked = pick(clusters())
    assert [row.size for row in found] == [size for _, size in picked] == [2, 5, 7, 90]
    for row, (positions, size) in zip(found, picked, strict=True):
        np.testing.assert_array_equal(row.images, images[positions])
        assert len(positions) == min(size, 64)
    assert [len(rows) for rows, _ in pick(clusters(), num_clusters=2, most_images=3)] == [2, 3]


def test_images_that_are_not_pooled_have_no_weight(images):
    network = tiny.network("meml", dense=False)
    params, options = tiny.parameters(network), InnerConfig(keep_nearest=0.5)
    found = attend(params, images, clusters(), network=network, options=options)
    assert (found[0].alpha > 0).all()  # two images are equally far from their mean
    assert any((row.alpha == 0).any() for row in found[1:])
    for row in found:
        assert row.alpha.sum() == pytest.approx(1, rel=1e-5)
