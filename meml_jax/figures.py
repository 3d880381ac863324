"""Figures drawn from stored values alone: no display, no global state, a PNG on a white ground."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from meml_jax.files import write_atomic
from meml_jax.intervals import half_width
from meml_jax.paper import head_of
from meml_jax.report import series_name

# Okabe and Ito's colours, told apart by colour-blind readers; yellow is too faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GRAY = "#666666"
_DPI = 150
STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#E5E5E5", "axes.axisbelow": True, "axes.titlesize": 10, "legend.frameon": False,
    "legend.fontsize": 9, "lines.linewidth": 1.8, "lines.markersize": 5,
    "text.parse_math": False,  # a $ in a name is a $
}  # fmt: skip

Paper = Mapping[str, Mapping[int, float]]


def accuracy_curve(
    results: Mapping[str, Any], path: str | os.PathLike[str], *, paper: Paper | None = None
) -> None:
    """Draw accuracy against the number of classes learned, with 95 % intervals and chance.

    Args:
      results: `meta_test` and `comparisons` as in `results.json`; accuracies in [0, 1].
      path: PNG to write.
      paper: published rows, name to {number of classes: accuracy in %}, drawn dashed in the look of
        our curve of the same head, up to as many classes as ours have; of other heads, left out.
    """
    tested = [results["meta_test"], *results.get("comparisons", [])]
    curves = [(series_name(results, series), series["points"]) for series in tested]
    heads = [series["head"] for series in tested]
    most = max(point["num_classes"] for _, points in curves for point in points)
    beside = [
        (name, heads.index(head_of(name)), {n: y for n, y in row.items() if n <= most})
        for name, row in (paper or {}).items()
        if head_of(name) in heads and min(row) <= most
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.8, 4.2), layout="constrained")
        ax = figure.subplots()
        lines: list[Any] = []
        for i, (name, points) in enumerate(curves):
            points = sorted(points, key=lambda point: point["num_classes"])
            x = np.array([point["num_classes"] for point in points])
            y = 100 * np.array([point["accuracy"] for point in points])
            half = 100 * np.array([half_width(point) for point in points])
            look = look_of(i) | ({"lw": 2.4, "zorder": 4} if i == 0 else {})  # the result itself
            ax.fill_between(x, y - half, y + half, alpha=0.15, linewidth=0, color=look["color"])
            bars = [np.minimum(half, y), np.minimum(half, 100 - y)]  # these end at 0 and 100 %
            lines.append(ax.errorbar(x, y, bars, capsize=3, elinewidth=1.2, label=name, **look))
        for name, i, row in beside:
            look = look_of(i) | {"ls": "--", "lw": 1.1, "mfc": "white", "label": f"{name} (paper)"}
            lines += ax.plot(list(row), list(row.values()), **look)
        chance = {p["num_classes"]: 100 * p["chance"] for _, points in curves for p in points}
        x = np.array(sorted(chance))
        # One point alone is no line, and a dot would hide behind another curve's marker.
        dot: Any = {"marker": "."} if len(x) > 1 else {"marker": "_", "ms": 18, "mew": 1.8}
        look = {"color": GRAY, "label": "chance", "zorder": 5}  # seen where a head is at chance
        lines += ax.plot(x, [chance[n] for n in x], ":", **look, **dot)
        counts = sorted({*chance, *(n for *_, row in beside for n in row)})
        ax.set(xlabel="number of classes learned", ylabel="test accuracy (%)", xticks=counts)
        ax.set_ylim(0, min(103.0, 1.08 * ax.dataLim.y1))
        title = f"{results['dataset']}: accuracy over all classes seen, with 95 % interval"
        ax.set_title(title, loc="left")  # a long name runs on above the legend
        ax.legend(handles=lines, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        save(figure, path)


def cluster_sizes(
    sizes: Sequence[int] | np.ndarray,
    path: str | os.PathLike[str],
    *,
    name: str,
    info: Mapping[str, Any],
) -> None:
    """Draw how many clusters have which size.

    Args:
      sizes: images of each kept cluster, int [C].
      path: PNG to write.
      name: of the clusters, for the title.
      info: `clustering` as in `results.json`: `dropped`, the number of clusters that were too small
        to keep, and, where true classes are known, `purity` and `nmi`.
    """
    sizes = np.asarray(sizes)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 4.0), layout="constrained")
        ax = figure.subplots()
        low, high, median = int(sizes.min()), int(sizes.max()), float(np.median(sizes))
        # Bins are whole numbers of images, so that no bin spans one size more than the next.
        width = -(-(high - low + 1) // 60)
        edges = np.arange(low, high + width + 1, width) - 0.5
        counts = np.histogram(sizes, edges)[0]
        some = counts > 0
        # With the edge even a single cluster is seen.
        look: dict[str, Any] = {"color": COLORS[5], "edgecolor": COLORS[0], "lw": 0.8}
        ax.bar(edges[:-1][some], counts[some], width, align="edge", **look)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlim(edges[0] - width, edges[-1] + width)
        ax.axvline(median, color=COLORS[1])
        ax.text(
            median, 1.01, f"median {median:g}", color=COLORS[1], ha="center", va="bottom",
            transform=ax.get_xaxis_transform(),
        )  # fmt: skip
        bins = f"bars of {width} sizes" if width > 1 else "a bar for each size"
        ax.set(xlabel=f"cluster size (images), {bins}", ylabel="number of clusters")
        span = f"{low} to {high}" if low < high else f"{low}"
        facts = f"{len(sizes)} clusters kept, of {span} images; {info['dropped']} dropped"
        if info.get("purity") is not None:
            facts += f"; purity {info['purity']:.3f}, NMI {info['nmi']:.3f}"
        ax.set_title(wrapped(f"{name}\n{facts}", 6.8), pad=20)
        save(figure, path)


def training_curves(
    records: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    validation_classes: int,
) -> None:
    """Draw meta-loss and accuracies against the meta-step.

    Args:
      records: of `metrics.read`, with `train/loss`, `train/accuracy` and `validation/accuracy`
        where they were measured; accuracies in [0, 1].
      path: PNG to write.
      validation_classes: that the validation accuracy is over, all at once.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 5.2), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        _curve(upper, records, "train/loss", "meta-loss", COLORS[0])
        _curve(
            lower,
            records,
            "train/accuracy",
            "adapted CLN, query images of the task",
            COLORS[0],
            100,
        )
        name = f"prototypes of {validation_classes} validation classes"
        _curve(lower, records, "validation/accuracy", name, COLORS[1], 100)
        upper.set(ylabel="meta-loss (nats)")
        lower.set(ylabel="accuracy (%)", xlabel="meta-step", ylim=(-3, 103))
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        lower.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        lower.set_xlim(0, 1.03 * max([1, *(record["step"] for record in records)]))
        figure.align_ylabels()
        for ax in (upper, lower):
            if ax.has_data():
                place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
                ax.legend(ncols=2, **place)  # above the axes, where it hides no data
            else:
                ax.text(0.5, 0.5, "not recorded", ha="center", color=GRAY, transform=ax.transAxes)
                ax.yaxis.set_major_locator(NullLocator())
        save(figure, path)


def _curve(
    ax: Axes, records: Sequence[Mapping[str, Any]], key: str, label: str, color: str, scale: int = 1
) -> None:
    """Draw one key: each value faint under their running mean; few values as markers."""
    points = [(r["step"], scale * r[key]) for r in records if _is_finite(r.get(key))]
    if not points:
        return
    x, y = np.array(points, float).T
    if len(x) < 25:  # too few to smooth, and one point alone has no line
        ax.plot(x, y, color=color, marker="o", label=label)
        return
    ax.plot(x, y, color=color, alpha=0.25, linewidth=1)
    window = np.ones(max(3, len(x) // 25))
    mean = np.convolve(y, window, "same") / np.convolve(np.ones(len(y)), window, "same")
    ax.plot(x, mean, color=color, label=f"{label}, mean of {len(window)} records (each faint)")


def _is_finite(value: Any) -> bool:
    """Tell whether a value of a record can be drawn; one of a damaged line cannot."""
    return isinstance(value, int | float) and abs(value) < float("inf")


def look_of(i: int) -> dict[str, Any]:
    """Give curve i a colour and a marker, to tell it apart in gray too; no two of 49 share both."""
    marker = MARKERS[(i + i // len(COLORS)) % len(MARKERS)]
    return {"color": COLORS[i % len(COLORS)], "marker": marker}


def picture(image: np.ndarray) -> np.ndarray:
    """Bring an image [H, W, C] to what `imshow` takes: [H, W] where it is gray."""
    return image[..., 0] if image.shape[-1] == 1 else image


def wrapped(title: str, inches: float) -> str:
    """Break a title's lines where they are wider than so many inches, about 12.5 letters each."""
    return "\n".join(textwrap.fill(line, int(12.5 * inches)) for line in title.splitlines())


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as a PNG on white, whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white")
    write_atomic(path, buffer.getvalue())
