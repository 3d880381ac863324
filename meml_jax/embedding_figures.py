"""Figures of an embedding: neighbours, a map, and what an autoencoder makes of its codes."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from meml_jax.figures import COLORS, MARKERS, STYLE, picture, save

_SAME, _OTHER, _PLAIN = COLORS[0], COLORS[1], "#BBBBBB"
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
    with matplotlib.rc_context(_PAGE):
        figure, ax = _page(rows, columns, gap=0.4, title=title)
        ax.text(0.45, 0.12, "image", ha="center", va="bottom", fontsize=9)
        label = "its nearest images, nearest first"
        ax.text(1.4 + (columns - 1) / 2, 0.12, label, ha="center", va="bottom", fontsize=9)
        for row in range(rows):
            _draw(ax, images[row, 0], 0, row, "black")
            for k in range(1, columns):
                color = _PLAIN if same is None else _SAME if same[row, k - 1] else _OTHER
                _draw(ax, images[row, k], k + 0.4, row, color)
        if same is not None:
            names = {_SAME: "same true class", _OTHER: "another true class"}
            frames = [
                Rectangle((0, 0), 1, 1, fill=False, lw=2.5, ec=color, label=name)
                for color, name in names.items()
            ]
            figure.legend(handles=frames, loc="outside lower center", ncols=2)
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
        figure, ax = _page(2 * lines, min(count, per_row), left=2.0, title=title)
        for i in range(count):
            line, column = divmod(i, per_row)
            _draw(ax, images[i], column, 2 * line, "black")
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
        figure, ax = _page(rows, columns + 2, gap=0.8, title=title)
        heads = [(0, "image"), (last + 0.4, "image")]
        heads += [(k + 1.4, f"{share:g}") for k, share in enumerate(shares)]
        for left, text in heads:
            ax.text(left + 0.46, 0.12, text, ha="center", va="bottom", fontsize=9)
        for row in range(rows):
            _draw(ax, first[row], 0, row, "black")
            for k in range(columns):
                frame = np.round(255 * frames[row, k]).astype(np.uint8)
                _draw(ax, frame, k + 1.4, row, _PLAIN)
            _draw(ax, second[row], last + 0.4, row, "black")
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
      group: int [N], from 0; at most 49 can be told apart.
      images: uint8 [N, H, W, C].
      path: PNG to write.
      title: above the map.
    """
    with matplotlib.rc_context(_PAGE):
        figure = Figure(figsize=(8.2, 6.6), layout="constrained")
        ax, key = figure.subplots(1, 2, width_ratios=(6, 1))
        count = int(group.max()) + 1
        rows = -(-count // 2)
        for g in range(count):
            own = np.flatnonzero(group == g)
            color, marker = COLORS[g % len(COLORS)], MARKERS[g // len(COLORS) % len(MARKERS)]
            ax.scatter(
                points[own, 0], points[own, 1], s=30, alpha=0.75, lw=0, c=color, marker=marker
            )
            left, top = 2.2 * (g // rows), -float(g % rows)
            key.scatter([left], [top], s=40, lw=0, c=color, marker=marker)
            _draw(key, images[own[0]], left + 0.3, g % rows - 0.48, color)
        key.set(xlim=(-0.3, 3.6), ylim=(-max(rows, 10) + 0.4, 0.6), aspect="equal", anchor="NW")
        key.axis("off")
        ax.set(xticks=[], yticks=[], aspect="equal", anchor="NW")
        ax.set_title(title, loc="left")
        save(figure, path)


def _page(
    rows: int, columns: int, *, title: str, gap: float = 0.0, left: float = 0.0
) -> tuple[Figure, Axes]:
    """Make axes on which image (row, column) fills a square of side 1, rows going down."""
    width, height = columns + gap + left, rows + 0.45
    scale = min(0.72, 10 / width)
    figure = Figure(figsize=(max(scale * width, 5.0), scale * height + 0.9), layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(-left, columns + gap), ylim=(-rows, 0.45), aspect="equal")
    ax.set_title(textwrap.fill(title, int(11 * figure.get_figwidth())))  # 11 letters an inch
    ax.axis("off")
    return figure, ax


def _draw(ax: Axes, image: np.ndarray, left: float, row: float, color: str) -> None:
    """Put an image with a frame at a place of the page."""
    extent = (left + 0.04, left + 0.92, -row - 0.92, -row - 0.04)
    ax.imshow(picture(image), cmap="gray", vmin=0, vmax=255, extent=extent)
    corner = (left + 0.04, -row - 0.92)
    ax.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, lw=2, ec=color))
