"""Rows of a table against each other: what one has more than the other on the same test runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meml_jax.cells import Cell, combine
from meml_jax.comparison import At, Line, points_of
from meml_jax.intervals import summarise
from meml_jax.stored_results import IMAGES

TEST = ("protocol", "num_classes", "shots", "queries", "runs", "episodes", "ways_shots")
"""Fields of `config.test` that, with seed and images, decide on the runs."""


class Difference(NamedTuple):
    """A line of the table less another one, of the same head.

    Attributes:
      title: what is compared.
      cells: mean difference with the interval of `cells.combine`; as a share, in [-1, 1].
      seeds: those that both have.
      lines: the two.
    """

    title: str
    cells: Mapping[At, Cell]
    seeds: tuple[int, ...]
    lines: tuple[Line, Line]


def make_differences(lines: Sequence[Line]) -> list[Difference]:
    """Compare each line with that of the row which it names, where both took as many steps.

    Run r of a seed has the same classes, images and order in all rows of a table, so what runs have
    in common, easy classes and hard ones, drops out: with a_{s,r} and b_{s,r} the accuracies, the
    cell is that of d_{s,r} = a_{s,r} - b_{s,r}.

    Args:
      lines: of one part, of `comparison.make_lines`.
    """
    found = []
    for line in lines:
        for other in lines:
            if not _is_beside(line, other):
                continue
            theirs = dict(zip(other.seeds, other.results, strict=True))
            pairs = {
                seed: _paired(one, theirs[seed], line.head)
                for seed, one in zip(line.seeds, line.results, strict=True)
                if seed in theirs
            }
            places = [at for at in line.cells if pairs and all(at in p for p in pairs.values())]
            cells = {at: combine([points[at] for points in pairs.values()]) for at in places}
            if cells:
                title = f"{line.title} - {other.title}"
                found.append(Difference(title, cells, tuple(pairs), (line, other)))
    return found


def _is_beside(line: Line, other: Line) -> bool:
    """Tell whether `other` is what `line` is compared with; of other steps it is something else."""
    if not line.beside or line.kind == "baseline":
        return False
    wanted = (line.beside, line.head, line.part, line.steps)
    return (other.row, other.head, other.part, other.steps) == wanted


def _paired(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], head: str
) -> dict[At, dict[str, Any]]:
    """Subtract the points that both have, run by run; none where the runs are not the same."""

    def drawn(results: Mapping[str, Any]) -> list[Any]:
        settings = results.get("config", {}).get("test", {})
        return [results.get(name) for name in IMAGES] + [settings.get(name) for name in TEST]

    if drawn(ours) != drawn(theirs):
        return {}
    found: dict[At, dict[str, Any]] = {}
    other = points_of(theirs, head)
    for at, a in points_of(ours, head).items():
        if at in other and len(a["accuracies"]) == len(other[at]["accuracies"]):
            change = np.subtract(a["accuracies"], other[at]["accuracies"])
            found[at] = {**a, **summarise(change, num_classes=a["num_classes"])}
    return found
