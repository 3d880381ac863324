"""Figures of an embedding: neighbours, a map, clusters, and what an autoencoder makes of codes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from meml_jax.figures import COLORS, MARKERS, STYLE, picture, save, wrapped

_SAME, _OTHER, _GIVEN, _PLAIN = COLORS[0], COLORS[1], "#777777", "#BBBBBB"
_DASHED = "--"  # other than by colour
_GROUPS = COLORS[:-1]  # no black: most drawings have a black ground
_PAGE = {**STYLE, "axes.grid": False}


def neighbours(
    images: np.ndarray, same: np.ndarray | None, path: str | os.PathLike[str], *, title: str
) -> None:
    """Draw images, each at the head of a row of its nearest ones.

    Args:
      images: uint8 [Q, 1 + K, H, W, C], nearest first.
      same: bool [Q, K], whether a neighbour has the image's true class; None: not known.
      path: PNG to write.
      title: above the page.
    """
    rows, columns = images.shape[:2]
    right = 0.4 if same is None else 1.7
    with matplotlib.rc_context(_PAGE):
        figure, ax = _page(
            rows, columns, right=right, top=0.45, legend=same is not None, title=title
        )
        ax.text(0.45, 0.12, "image", ha="center", va="bottom", fontsize=9)
        label = "its nearest images, nearest first"
        ax.text(1.4 + (columns - 1) / 2, 0.12, label, ha="center", va="bottom", fontsize=9)
        for row in range(rows):
            _draw(ax, images[row, 0], 0, row, _GIVEN)
            known = [None] * (columns - 1) if same is None else list(same[row])
            for k in range(1, columns):
                _draw_member(ax, images[row, k], k + 0.4, row, known[k - 1])
            if same is not None:
                text = f"{same[row].sum()} of {columns - 1}\nof its class"
                ax.text(columns + 0.5, -row - 0.5, text, va="center", fontsize=9)
        if same is not None:
            _member_legend(figure, "the image's true class", "another true class")
        save(figure, path)


def clusters(
    images: Sequence[np.ndarray],
    same: Sequence[np.ndarray] | None,
    names: Sequence[str],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Draw clusters as rows of images.

    Args:
      images: of each cluster, uint8 [n, H, W, C].
      same: of each cluster, bool [n], whether an image has the true class that is most frequent
        in the cluster; None: not known.
      names: said of each cluster, beside its row.
      path: PNG to write.
      title: above the page.
    """
    with matplotlib.rc_context(_PAGE):
        columns = max(len(own) for own in images)
        figure, ax = _page(len(images), columns, left=1.6, legend=same is not None, title=title)
        for row, (own, name) in enumerate(zip(images, names, strict=True)):
            ax.text(-0.12, -row - 0.5, name, ha="right", va="center", fontsize=9)
            known = [None] * len(own) if same is None else list(same[row])
            for column, image in enumerate(own):
                _draw_member(ax, image, column, row, known[column])
        if same is not None:
            _member_legend(figure, "the cluster's most frequent true class", "another true class")
        save(figure, path)


def reconstructions(
    images: np.ndarray, decoded: np.ndarray, path: str | os.PathLike[str], *, title: str
) -> None:
    """Draw images above their reconstructions.

    Args:
      images: uint8 [N, H, W, C].
      decoded: float [N, H, W, C] in [0, 1].
      path: PNG to write.
      title: above the page.
    """
    count, per_row = len(images), 12
    lines = -(-count // per_row)
    with matplotlib.rc_context(_PAGE):
        figure, ax = _page(2 * lines, min(count, per_row), left=1.6, title=title)
        for i in range(count):
            line, column = divmod(i, per_row)
            _draw(ax, images[i], column, 2 * line, _GIVEN)
            _draw(ax, np.round(255 * decoded[i]).astype(np.uint8), column, 2 * line + 1, _PLAIN)
        for line in range(lines):
            for row, name in ((2 * line, "image"), (2 * line + 1, "reconstruction")):
                ax.text(-0.12, -row - 0.5, name, ha="right", va="center", fontsize=9)
        save(figure, path)


def interpolations(
    first: np.ndarray,
    frames: np.ndarray,
    second: np.ndarray,
    shares: Sequence[float],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Draw the way from one image to another through the codes between theirs.

    Args:
      first: uint8 [R, H, W, C].
      frames: float [R, T, H, W, C] in [0, 1], decoded.
      second: uint8 [R, H, W, C].
      shares: [T], of the second image's code.
      path: PNG to write.
      title: above the page.
    """
    rows, columns = frames.shape[:2]
    last = columns + 1.4
    with matplotlib.rc_context(_PAGE):
        figure, ax = _page(rows, columns + 2, right=0.8, top=0.45, title=title)
        heads = [(0, "image"), (last + 0.4, "image")]
        heads += [(k + 1.4, f"{share:g}") for k, share in enumerate(shares)]
        for left, text in heads:
            ax.text(left + 0.46, 0.12, text, ha="center", va="bottom", fontsize=9)
        for row in range(rows):
            _draw(ax, first[row], 0, row, _GIVEN)
            for k in range(columns):
                frame = np.round(255 * frames[row, k]).astype(np.uint8)
                _draw(ax, frame, k + 1.4, row, _PLAIN)
            _draw(ax, second[row], last + 0.4, row, _GIVEN)
        save(figure, path)


def embedding_map(
    points: np.ndarray,
    group: np.ndarray,
    images: np.ndarray,
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Draw a 2-d map of embeddings; colour and marker say which group, the key shows one image.

    Args:
      points: float [N, 2].
      group: int [N], from 0; at most 42 can be told apart.
      images: uint8 [N, H, W, C].
      path: PNG to write.
      title: above the map.
    """
    per_row, width = 10, 7.6  # of the key; inches
    cell = width / per_row / 1.6  # side of an image of the key, with a marker of 0.6 beside it
    count = int(group.max()) + 1
    lines = -(-count // per_row)
    text = wrapped(title, width)
    low, high = points.min(axis=0), points.max(axis=0)
    # A map that is nearly a line is given some room across it.
    side = np.maximum(high - low, max(0.5 * float((high - low).max()), 1e-6)) * 1.06
    middle = (low + high) / 2
    side[0] = max(side[0], side[1] / 1.1)  # no map is much higher than it is wide
    height = width * float(side[1] / side[0])
    parts = np.array([0.1, height, 0.1, cell * lines, 0.2 * text.count("\n") + 0.32])
    bottom = np.cumsum(parts) / parts.sum()
    with matplotlib.rc_context(_PAGE):
        figure = Figure(figsize=(width, parts.sum()))
        ax = figure.add_axes((0, bottom[0], 1, bottom[1] - bottom[0]))
        key = figure.add_axes((0, bottom[2], 1, bottom[3] - bottom[2]))
        for g in range(count):
            own = np.flatnonzero(group == g)
            color, marker = _GROUPS[g % len(_GROUPS)], MARKERS[g % len(MARKERS)]
            look: dict[str, Any] = {"color": color, "marker": marker, "lw": 0}
            ax.scatter(points[own, 0], points[own, 1], s=45, alpha=0.75, **look)
            line, column = divmod(g, per_row)
            key.scatter([1.6 * column + 0.35], [-line - 0.48], s=60, **look)
            _draw(key, images[own[0]], 1.6 * column + 0.55, line, color)
        key.set(xlim=(0, 1.6 * per_row), ylim=(-lines, 0))
        ax.set(xlim=middle[0] + side[0] * np.array([-0.5, 0.5]))
        ax.set(ylim=middle[1] + side[0] * height / width * np.array([-0.5, 0.5]))
        for each in (ax, key):
            each.axis("off")
        figure.text(0.012, 1 - 0.1 / parts.sum(), text, va="top")
        save(figure, path)


def _page(
    rows: int,
    columns: int,
    *,
    title: str,
    right: float = 0.0,
    left: float = 0.0,
    top: float = 0.05,
    legend: bool = False,
) -> tuple[Figure, Axes]:
    """Make axes on which image (row, column) fills a square of side 1, rows going down.

    `right`, `left` and `top` are room for text around the images, in
    sides of an image.
    """
    width, height = columns + right + left, rows + top
    scale = min(0.72, 10 / width)
    side = max(scale * width, 5.0)
    text = wrapped(title, side)
    # From the bottom, in inches: room for a legend, the images, the title.
    below, within, above = 0.4 if legend else 0.1, scale * height, 0.18 * text.count("\n") + 0.32
    high = below + within + above
    figure = Figure(figsize=(side, high))
    share = scale * width / side
    ax = figure.add_axes(((1 - share) / 2, below / high, share, within / high))
    ax.set(xlim=(-left, columns + right), ylim=(-rows, top), aspect="equal")
    ax.axis("off")
    figure.text(0.5, 1 - 0.1 / high, text, ha="center", va="top")
    return figure, ax


def _draw(
    ax: Axes, image: np.ndarray, left: float, row: float, color: str, style: str = "-"
) -> None:
    """Put an image with a frame at a place of the page."""
    extent = (left + 0.04, left + 0.92, -row - 0.92, -row - 0.04)
    ax.imshow(picture(image), cmap="gray", vmin=0, vmax=255, extent=extent)
    corner = (left + 0.04, -row - 0.92)
    ax.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, lw=2, ec=color, ls=style))


def _draw_member(ax: Axes, image: np.ndarray, left: float, row: float, same: bool | None) -> None:
    """Draw an image framed by whether it is of the class in question; None: not known."""
    if same is None:
        _draw(ax, image, left, row, _PLAIN)
    else:
        _draw(ax, image, left, row, *((_SAME, "-") if same else (_OTHER, _DASHED)))


def _member_legend(figure: Figure, same: str, other: str) -> None:
    """Say what the frames of `_draw_member` mean."""
    frames = [
        Rectangle((0, 0), 1, 1, fill=False, lw=2.5, ec=color, ls=style, label=name)
        for color, style, name in ((_SAME, "-", same), (_OTHER, _DASHED, other))
    ]
    figure.legend(handles=frames, loc="lower center", ncols=2)
