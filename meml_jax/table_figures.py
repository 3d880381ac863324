"""Figures of a table of the paper: our curves with intervals, the paper's beside them."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from meml_jax import curves, figures
from meml_jax.comparison import At, Line, columns, label

_FILLS = ("full", "none", "left")  # of markers, by head
_THEIRS = " (paper)"
_DASHES = ("-.", ":", (0, (9, 3)), (0, (4, 2, 1, 2, 1, 2)))  # of baselines
TOGETHER = 3  # rows whose curves, and the paper's of the same, one panel holds
Looks = Mapping[str, dict[str, Any]]
"""Colour and marker of each row."""


def draw(lines: Sequence[Line], path: str | os.PathLike[str], *, title: str) -> None:
    """Draw the lines of one part of a table: a row of panels for each head, ours and the paper's.

    What has not been measured is left out, unless nothing has. Of more than `TOGETHER` rows the
    paper's numbers have panels of their own.

    Args:
      lines: of `comparison.make_lines`, of one part.
      path: PNG to write, on a white ground.
      title: of the figure.
    """
    drawn = _drawn(lines)
    at = columns(drawn)
    heads = list(dict.fromkeys(line.head for line in drawn))
    looks = _looks(drawn)
    with matplotlib.rc_context(figures.STYLE):
        tall = max(3.0, 0.24 * (len(looks) + 4))
        published = any(line.paper for line in drawn)
        apart = published and len(looks) > TOGETHER
        size = (11.0 if apart else 8.0, 0.6 + (tall + 0.5) * len(heads))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(heads), 1 + apart, squeeze=False, sharey="row")
        for row_, head in zip(panels, heads, strict=True):
            ours, last = row_[0], row_[-1]
            here = [line for line in drawn if line.head == head]
            name = curves.NAMES[head]
            handles = _ours(ours, here, at, looks)
            if handles:  # baselines alone would look like a result
                handles |= _unlearned(ours, lines, at)
            ours.set_title(name, loc="left")
            if apart:
                known = {line.published + _THEIRS for line in here if line.title in handles}
                own = _paper(last, here, at, looks)  # those of our rows look as these do
                handles |= {k: v for k, v in own.items() if k not in known}
                last.set_title("the paper", loc="left")
                last.tick_params(labelleft=True)
                _say_if_empty(last, "not in the paper")
            else:
                handles |= _paper(ours, here, at, looks)
            _say_if_empty(ours, "not run")
            for panel in row_:  # any may be empty
                spots = _places(panel, at, at)
                margin = (_is_curve(at) and 0.05 * np.ptp(spots)) or 0.5
                panel.set_xlim(spots.min() - margin, spots.max() + margin)
            ours.set_ylabel("test accuracy (%)")
            ours.set_ylim(0, min(103.0, 1.08 * max(1.0, *(panel.dataLim.y1 for panel in row_))))
            place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
            names = [textwrap.fill(title.replace(f", {name}", ""), 40) for title in handles]
            last.legend(list(handles.values()), names, **place)
        said = "ours with 95 % interval" + ", and the paper's, dashed and hollow" * published
        figure.suptitle(f"{title}\n{said}", fontsize=11)
        figures.save(figure, path)


def draw_cost(lines: Sequence[Line], path: str | os.PathLike[str], *, title: str) -> bool:
    """Draw the accuracy at most classes against the seconds of training, if two rows have both.

    Rows look as in `draw`; markers are full for the first head drawn, hollow for the second, half
    filled for the third.

    Args:
      lines: of `comparison.make_lines`, of one part.
      path: PNG to write.
      title: of the figure.

    Returns:
      Whether there was anything to draw.
    """
    at = [place for place in columns(lines) if any(place in line.cells for line in lines)][-1:]
    trained = [x for x in lines if x.kind != "baseline" and (x.steps or 0) > 1]  # 1: as good as not
    measured = [line for line in trained if line.named and set(at) & set(line.cells)]
    if len({line.row for line in measured}) < 2:
        return False
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        ax = figure.subplots()
        looks, heads = _looks(_drawn(lines)), list(dict.fromkeys(line.head for line in measured))
        longest = max(map(_seconds, measured))
        for line in measured:
            cell = line.cells[at[0]]
            seconds = _seconds(line)
            y, half = 100 * cell.accuracy, 100 * cell.ci95
            place = heads.index(line.head)
            seconds += 0.012 * longest * place  # heads of one training stand side by side
            look = looks[line.row] | {"fillstyle": _FILLS[place % len(_FILLS)]}
            bars: dict[str, Any] = {"capsize": 2, "elinewidth": 1, "ls": "none"}
            ax.errorbar(seconds, y, half, label=line.title, **look, **bars)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.set(xlabel="seconds of meta-training", xlim=(0, 1.05 * ax.dataLim.x1))
        ax.set_ylim(0, min(103.0, 1.08 * max(1.0, ax.dataLim.y1)))
        kind = "classes" if _is_curve(at) else "ways,shots"
        ax.set_ylabel(f"test accuracy at {label(at[0])} {kind} (%)")
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        how = "accuracy with 95 % interval; seconds of a device that others may have shared"
        how += "; heads of a training side by side" * (len(heads) > 1)
        figure.suptitle(f"{title}\n{how}", fontsize=11)
        figures.save(figure, path)
    return True


def _seconds(line: Line) -> float:
    """Seconds of a line's meta-training, mean over its seeds."""
    return float(np.mean([one["meta_train"]["seconds"] for one in line.results]))


def _drawn(lines: Sequence[Line]) -> list[Line]:
    """List what has been measured; if nothing has, what the paper has."""
    some = [line for line in lines if line.kind != "baseline"]
    return [line for line in some if line.cells] or [line for line in some if line.paper]


def _looks(lines: Sequence[Line]) -> Looks:
    """Give each row its look."""
    return {row: figures.look_of(i) for i, row in enumerate(dict.fromkeys(x.row for x in lines))}


def _ours(ax: Axes, lines: Sequence[Line], at: Sequence[At], looks: Looks) -> dict[str, Any]:
    """Draw what is measured: handles by the name of the line."""
    handles = {}
    for i, line in enumerate(lines):
        known = [place for place in at if place in line.cells]
        if known:
            y = [100 * line.cells[place].accuracy for place in known]
            half = [100 * line.cells[place].ci95 for place in known]
            # Points that no curve joins stand side by side.
            x = _places(ax, at, known) + (0 if _is_curve(at) else 0.08 * (i - len(lines) / 2))
            look = looks[line.row] | {"capsize": 2, "elinewidth": 1}
            handles[line.title] = ax.errorbar(x, y, half, **look, **_joined(at))
    return handles


def _paper(ax: Axes, lines: Sequence[Line], at: Sequence[At], looks: Looks) -> dict[str, Any]:
    """Draw the paper's numbers, each once: handles by the name of its line and `_THEIRS`."""
    handles: dict[str, Any] = {}
    drawn: list[Mapping[At, Any]] = []
    for i, line in enumerate(lines):
        known = [place for place in at if place in line.paper]
        if known and line.paper not in drawn:
            drawn.append(line.paper)
            x = _places(ax, at, known) + (0 if _is_curve(at) else 0.08 * (i - len(lines) / 2))
            look = looks[line.row] | {"mfc": "white"}
            style = _joined(at) or {"ls": "--"}
            y = [line.paper[place] for place in known]
            handles[line.published + _THEIRS] = ax.plot(x, y, **look | style)[0]
    return handles


def _say_if_empty(ax: Axes, text: str) -> None:
    if not ax.has_data():
        ax.text(0.5, 0.5, text, ha="center", color=figures.GRAY, transform=ax.transAxes)
        ax.set_axis_off()


def _unlearned(ax: Axes, lines: Sequence[Line], at: Sequence[At]) -> dict[str, Any]:
    """Draw in gray what learns nothing: baselines and chance."""
    handles = {}
    baselines = [line for line in lines if line.kind == "baseline"]
    for line, dashes in zip(baselines, itertools.cycle(_DASHES), strict=False):
        name = line.title.removeprefix("baseline: ")
        known = [place for place in at if place in line.cells]
        y = [100 * line.cells[place].accuracy for place in known]
        look: dict[str, Any] = {"color": figures.GRAY, "lw": 1.3, "ls": dashes}
        look |= {} if _is_curve(at) else {"ls": "none", "marker": "x" if dashes == ":" else "+"}
        handles[name] = ax.plot(_places(ax, at, known), y, **look)[0]
    chance = {p: 100 * c.chance for line in lines for p, c in line.cells.items() if p in at}
    if chance:
        known = [place for place in at if place in chance]
        style: dict[str, Any] = {"color": "#999999", "lw": 1.0, "marker": "_"}
        y = [chance[place] for place in known]
        handles["chance"] = ax.plot(_places(ax, at, known), y, **style | _joined(at))[0]
    return handles


def _is_curve(at: Sequence[At]) -> bool:
    return all(isinstance(place, int) for place in at)  # (ways, shots) are none


def _joined(at: Sequence[At]) -> dict[str, Any]:
    return {} if _is_curve(at) else {"ls": "none"}


def _places(ax: Axes, at: Sequence[At], known: Sequence[At]) -> np.ndarray:
    """Label the axis with all columns, and return where the known ones lie on it."""
    curve = _is_curve(at)
    spots = {place: place if isinstance(place, int) else i for i, place in enumerate(at)}
    ax.set_xticks(list(spots.values()), [label(place) for place in at])
    ax.set_xlabel("number of classes learned" if curve else "ways,shots of the test")
    return np.array([spots[place] for place in known], float)
