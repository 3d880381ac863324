"""Rows of a table against each other: what one has more than the other on the same test runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meml_jax import meta_test
from meml_jax.comparison import At, Cell, Line, combine, place_of

SAME_RUNS = ("content_hash", "test_hash", "note")  # in results.json: what the runs are drawn from


class Difference(NamedTuple):
    """A line of the table less another one, of the same head.

    Attributes:
      part: heading under which both stand.
      title: what is compared.
      cells: mean difference with the interval of `comparison.combine`; as a share, in [-1, 1].
      seeds: those that both have.
    """

    part: str
    title: str
    cells: Mapping[At, Cell]
    seeds: tuple[int, ...]


def make_differences(lines: Sequence[Line]) -> list[Difference]:
    """Compare each line with that of the row which it names, where both took as many steps.

    Run r of a seed has the same classes, images and order in all rows of a table, so what runs have
    in common, easy classes and hard ones, drops out: with a_{s,r} and b_{s,r} the accuracies, the
    cell is that of d_{s,r} = a_{s,r} - b_{s,r}.

    Args:
      lines: of `comparison.make_lines`.
    """
    found = []
    for line in lines:
        for other in filter(functools.partial(_is_beside, line), lines):
            ours, theirs = _by_seed(line), _by_seed(other)
            seeds = tuple(seed for seed in ours if seed in theirs)
            pairs = [_paired(ours[seed], theirs[seed]) for seed in seeds]
            places = [at for at in line.cells if pairs and all(at in points for points in pairs)]
            cells = {at: combine([points[at] for points in pairs]) for at in places}
            if cells:
                title = f"{line.title} - {other.title}"
                found.append(Difference(line.part, title, cells, seeds))
    return found


def _is_beside(line: Line, other: Line) -> bool:
    """Tell whether `other` is what `line` is compared with; of other steps it is something else."""
    wanted = (line.beside, line.head, line.part, line.steps)
    return bool(line.beside) and (other.row, other.head, other.part, other.steps) == wanted


def _by_seed(line: Line) -> dict[int, Mapping[str, Any]]:
    """Points of the line's head by seed, each beside what its runs were drawn from."""
    return {
        seed: {
            "drawn": [results.get(name) for name in SAME_RUNS],
            "points": {
                place_of(point): point
                for curve in (results["meta_test"], *results["comparisons"])
                if curve["head"] == line.head
                for point in curve["points"]
            },
        }
        for seed, results in zip(line.seeds, line.results, strict=True)
    }


def _paired(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[At, dict[str, Any]]:
    """Subtract the points that both have, run by run; none where the runs are not the same."""
    if ours["drawn"] != theirs["drawn"]:
        return {}
    found = {}
    for at, a in ours["points"].items():
        b = theirs["points"].get(at)
        if b is None or len(a["accuracies"]) != len(b["accuracies"]):
            continue
        change = np.subtract(a["accuracies"], b["accuracies"])
        found[at] = {**a, **meta_test.summarise(change, num_classes=a["num_classes"])}
    return found
