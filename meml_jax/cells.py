"""A measured accuracy, its interval, and what that says of a published one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meml_jax.intervals import combine_points, half_width
from meml_jax.paper import Published

NO_WIDTH = 1e-9  # what rounding leaves between equal accuracies, and of their spread
COMPARED = ("above", "within", "below")
"""What a verdict says of ours and the paper's; any other one says why nothing can be said."""


class Cell(NamedTuple):
    """A measured accuracy.

    Attributes:
      accuracy: mean over runs and seeds, in [0, 1].
      ci95: half of the 95 % interval, see `combine`.
      runs: of all seeds together.
      chance: accuracy of guessing.
      by_seed: mean of each seed.
    """

    accuracy: float
    ci95: float
    runs: int
    chance: float
    by_seed: tuple[float, ...]


def combine(points: Sequence[Mapping[str, Any]]) -> Cell:
    """Bring the points of several seeds together; the interval is `intervals.half_width`.

    Args:
      points: entries of `points` in results.json, of one number of classes.
    """
    means = tuple(float(point["accuracy"]) for point in points)
    point = points[0] if len(points) == 1 else combine_points(points)
    runs, chance = sum(point["runs"] for point in points), float(points[0]["chance"])
    return Cell(float(point["accuracy"]), half_width(point), runs, chance, means)


def verdict(cell: Cell, published: Published) -> str:
    """Compare our interval with the paper's number: one of `COMPARED`, or why none can be given.

    Within: it holds the number or, where that has a ±, meets the paper's interval. There is no
    comparison where ours could be guessed, `at chance`, or where the interval has no width since
    all runs are equal, `no spread`: a head that names one class only is 50.0 ± 0.0 % of two.
    """
    half = cell.ci95 + NO_WIDTH
    if abs(cell.accuracy - cell.chance) <= half:
        return "at chance"
    if cell.ci95 <= NO_WIDTH:
        return "no spread"
    gap = cell.accuracy - published / 100
    if abs(gap) <= half + (published.half or 0.0) / 100:
        return "within"
    return "above" if gap > 0 else "below"
