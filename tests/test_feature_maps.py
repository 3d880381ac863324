"""Feature maps are those of the FEN that encodes; weights are shown where there are any."""

import numpy as np
import pytest
import tiny

from meml_jax import cluster_figures, figures
from meml_jax.attention import AttendedCluster
from meml_jax.config import Config
from meml_jax.feature_maps import feature_maps, of_clusters
from meml_jax.learners import LEARNERS
from meml_jax.settings import override
from meml_jax.types import TaskTable


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
    names = [f"{word} weight\nof {n} images" for n in (7, 2) for word in ("highest", "lowest")]
    assert [row.name for row in rows] == names
    for row, i in zip(rows, (1, 0, 3, 4), strict=True):
        np.testing.assert_array_equal(row.image, images[i])
        np.testing.assert_allclose(row.maps[1], maps[1][i], rtol=1e-5)
    cluster_figures.maps_grid(rows, tmp_path / "m.png", images="some images")
    assert (tmp_path / "m.png").stat().st_size > 10_000


@pytest.mark.parametrize("labels", ["clusters", "true"])
@pytest.mark.parametrize("learner", ["meml", "meml_mean", "oml", "oml_film"])
def test_only_attention_has_weights_to_show(tmp_path, monkeypatch, learner, labels):
    drawn = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.update({path.stem: figure}))
    sizes = np.arange(1, 21, dtype=np.int32)[::-1]
    table = TaskTable(np.arange(210, dtype=np.int32), np.cumsum(sizes) - sizes, sizes)
    images = np.random.default_rng(0).integers(0, 256, (210, *tiny.CONV_IMAGE), np.uint8)
    values = {"learner": learner, "tasks.labels": labels, "network.channels": 4}
    network = tiny.network(learner, dense=False)
    config, params = override(Config(), values), tiny.parameters(network)
    names = cluster_figures.draw(config, images, table, params, tmp_path, network=network)
    attentive = LEARNERS[learner].uses_attention
    assert names == [*drawn] == ["clusters"] * attentive + ["feature_maps"]
    kinds = {"clusters": "clusters", "true": "true classes"}[labels]
    maps = drawn["feature_maps"]
    rows = [ax.get_ylabel() for ax in maps.axes if ax.get_ylabel()]
    assert f"some {kinds}" in maps.get_suptitle()
    assert ("attention weight" in maps.get_suptitle()) == attentive
    if attentive:
        title = drawn["clusters"].axes[0].get_title().replace("\n", " ")
        assert f"{kinds} by attention weight" in title and "glyphs, meml: images of " in title
        assert {row.split()[0] for row in rows} == {"highest", "lowest"}
    else:  # from the smallest to the largest
        assert len(rows) == cluster_figures.MAPPED
        assert (rows[0], rows[-1]) == ("of 1 images", "of 20 images")
