"""Feature maps are those of the FEN that encodes."""

import numpy as np
import tiny

from meml_jax import figures
from meml_jax.attention import AttendedCluster
from meml_jax.feature_maps import feature_maps, of_clusters


def test_maps_are_what_the_convolutions_give(tmp_path):
    network = tiny.network("meml", dense=False, channels=4)
    params = tiny.parameters(network)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, *tiny.CONV_IMAGE), np.uint8)
    maps = feature_maps(params, images, channels=4)
    assert [m.shape for m in maps] == [(5, n, n) for n in (13, 11, 5, 3, 1, 1)]
    p = np.asarray(network.encode(params, images.astype(np.float32) / 255))
    np.testing.assert_allclose(maps[-1][:, 0, 0], np.maximum(p, 0).mean(axis=1), rtol=1e-5)
    # The first by hand, at one place.
    layer = params["fen"]["Conv_0"]
    window = images[2, 4:7, 8:11].astype(np.float64) / 255
    value = np.einsum("hwc,hwcd->d", window, layer["kernel"]) + np.asarray(layer["bias"])
    np.testing.assert_allclose(maps[0][2, 2, 4], np.maximum(value, 0).mean(), rtol=1e-5)

    alpha = np.array([0.1, 0.6, 0.3], np.float32)
    clusters = [AttendedCluster(images[:3], alpha, 7), AttendedCluster(images[3:], alpha[1:], 2)]
    rows = of_clusters(params, clusters, channels=4)
    names = ["highest of 7", "lowest of 7", "highest of 2", "lowest of 2"]
    assert [row.name for row in rows] == names
    for row, i in zip(rows, (1, 0, 3, 4), strict=True):
        np.testing.assert_array_equal(row.image, images[i])
        np.testing.assert_allclose(row.maps[1], maps[1][i], rtol=1e-5)
    figures.feature_maps(rows, tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 10_000
