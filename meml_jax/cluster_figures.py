"""Figures of some clusters: images by attention weight, what the convolutions make of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from meml_jax import attention, feature_maps, figures
from meml_jax.attention import AttendedCluster
from meml_jax.config import Config
from meml_jax.feature_maps import MappedImage
from meml_jax.learners import get_learner
from meml_jax.networks import Network
from meml_jax.types import Params, TaskTable

MAPPED = 8  # images whose feature maps are drawn where none weighs more than another


def draw(
    config: Config,
    images: np.ndarray,
    table: TaskTable,
    params: Params,
    folder: Path,
    *,
    network: Network,
) -> list[str]:
    """Draw the figures of a run's clusters.

    A learner without attention gives all images of a cluster the same weight: there is no figure of
    weights, and the feature maps are those of one image a cluster.

    Args:
      config: of the run.
      images: uint8 [N, H, W, C], of which the clusters are made.
      table: clusters, or true classes, on the host.
      params: meta-trained, by role.
      folder: that gets the figures.
      network: pure functions.

    Returns:
      Names of the figures, without folder and ending.
    """
    channels, true = config.network.channels, config.tasks.labels == "true"
    kinds = "true classes" if true else "clusters"
    path = folder / "feature_maps.png"
    if get_learner(config.learner).uses_attention:
        attended = attention.attend(params, images, table, network=network, options=config.inner)
        some = f"{len(attended)} of {len(table.size):,} {kinds}"
        title = f"{config.data.name}, {config.learner}: images of {some} by attention weight (in %)"
        cluster_grid(attended, folder / "clusters.png", title=title)
        mapped = feature_maps.of_clusters(params, attended, channels=channels)
        shown = f"of some {kinds} the images with the highest and the lowest attention weight"
        maps_grid(mapped, path, images=shown)
        return ["clusters", "feature_maps"]
    picked = attention.pick(table, num_clusters=MAPPED, most_images=1)
    first = images[np.concatenate([rows for rows, _ in picked])]
    names = [f"of {size} images" for _, size in picked]
    mapped = feature_maps.of_images(params, first, names, channels=channels)
    maps_grid(mapped, path, images=f"an image each of some {kinds}")
    return ["feature_maps"]


def cluster_grid(
    clusters: Sequence[AttendedCluster],
    path: str | os.PathLike[str],
    *,
    title: str,
    max_images: int = 14,
) -> None:
    """Draw clusters as rows of images, highest attention first, framed by their weight.

    Args:
      clusters: one a row.
      path: PNG to write.
      title: of the figure; a line below it says where only some images of a cluster are weighed.
      max_images: of a larger cluster the highest and the lowest weights are shown.
    """
    columns = min(max_images, max(len(alpha) for _, alpha, _ in clusters))
    high = columns - columns // 2  # images before the gap in a row that is cut
    relative = np.concatenate([len(alpha) * np.asarray(alpha) for _, alpha, _ in clusters])
    # At least a factor of 2, so that noise about equal weights does not look like a preference.
    octaves = int(np.clip(np.ceil(np.abs(np.log2(np.maximum(relative, 1e-3))).max()), 1, 3))
    norm, cmap = LogNorm(2.0**-octaves, 2.0**octaves, clip=True), matplotlib.colormaps["viridis"]
    under, over = relative.min() < norm.vmin, relative.max() > norm.vmax  # these share a colour
    extend = "both" if under and over else "min" if under else "max" if over else "neither"
    with matplotlib.rc_context({**figures.STYLE, "axes.grid": False}):
        size = (max(0.72 * columns + 2.2, 5.2), max(0.92 * len(clusters) + 0.7, 2.0))
        figure = Figure(figsize=size, layout="constrained")
        ax = figure.subplots()
        for row, (images, alpha, total) in enumerate(clusters):
            n, top = len(alpha), -1.3 * row
            order = np.argsort(-np.asarray(alpha), kind="stable")
            if n > columns:
                order = np.concatenate([order[:high], order[n - columns // 2 :]])
                ax.text(high + 0.175, top - 0.5, "...", ha="center", va="center")
            count = f"n = {n}" if n == total else f"n = {n}\nof {total}"
            ax.text(-0.15, top - 0.5, count, ha="right", va="center", fontsize=9)
            for column, i in enumerate(order):
                left = column + 0.08 + (0.35 if n > columns and column >= high else 0.0)
                extent = (left, left + 0.84, top - 0.92, top - 0.08)
                ax.imshow(figures.picture(images[i]), cmap="gray", vmin=0, vmax=255, extent=extent)
                color = cmap(norm(n * float(alpha[i])))
                ax.add_patch(
                    Rectangle((left, top - 0.92), 0.84, 0.84, fill=False, lw=3.5, ec=color)
                )
                ax.text(
                    left + 0.42,
                    top - 1,
                    _weight(float(alpha[i])),
                    ha="center",
                    va="top",
                    fontsize=7,
                )
        ax.set(xlim=(-0.9, columns + 0.4), ylim=(-1.3 * len(clusters), 0), aspect="equal")
        if any(len(alpha) < total for _, alpha, total in clusters):
            most = max(len(alpha) for _, alpha, _ in clusters)
            title += f"\nof more than {most} images, {most} from all over share the weight"
        ax.set_title(figures.wrapped(title, size[0]))
        ax.axis("off")
        look: Any = {"aspect": 25, "pad": 0.01, "extend": extend}
        bar = figure.colorbar(ScalarMappable(norm, cmap), ax=ax, **look)
        powers = np.arange(-octaves, octaves + 1)
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.ax.set_yticks(np.exp2(powers), [f"{2**p}" if p >= 0 else f"1/{2**-p}" for p in powers])
        bar.set_label("attention weight\nrelative to 1/n")
        figures.save(figure, path)


def _weight(alpha: float) -> str:
    """Write an attention weight in % with two digits, the smallest as a bound: 34, 2.4, <0.1."""
    share = 100 * alpha
    return "<0.1" if share < 0.095 else f"{share:.0f}" if share >= 9.95 else f"{share:.1f}"


def maps_grid(rows: Sequence[MappedImage], path: str | os.PathLike[str], *, images: str) -> None:
    """Draw images beside the maps of each convolution, which has one scale for all images.

    Those of one pixel, which the last convolutions leave of a small image, are left out.

    Args:
      rows: one image a row.
      path: PNG to write.
      images: what the images are, for the title.
    """
    layers = [i for i, values in enumerate(rows[0].maps) if values.size > 1]
    columns = 1 + len(layers)
    with matplotlib.rc_context({**figures.STYLE, "axes.grid": False}):
        size = (1.05 * columns + 1.4, 1.05 * len(rows) + 0.9)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(rows), columns, squeeze=False)
        highest = [max(float(row.maps[i].max()) for row in rows) for i in layers]
        for (first, *others), row in zip(axes, rows, strict=True):
            first.imshow(figures.picture(row.image), cmap="gray", vmin=0, vmax=255)
            first.set_ylabel(row.name, rotation=0, ha="right", va="center", fontsize=8)
            for ax, i, top in zip(others, layers, highest, strict=True):
                ax.imshow(row.maps[i], cmap="viridis", vmin=0, vmax=top or 1)
        sizes = [rows[0].maps[i].shape for i in layers]
        names = [f"conv {i + 1}\n{h} x {w}" for i, (h, w) in zip(layers, sizes, strict=True)]
        for ax, title in zip(axes[0], ["image", *names], strict=True):
            ax.set_title(title, fontsize=8)
        for ax in axes.flat:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        figure.suptitle(
            "mean of the channels after each convolution, dark 0, bright the column's highest"
            + "; 1 x 1 left out" * (len(layers) < len(rows[0].maps))
            + f";\n{images}",
            fontsize=9,
        )
        figures.save(figure, path)
