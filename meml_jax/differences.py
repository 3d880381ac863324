"""Rows of a table against each other: what one has more than the other on the same test runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meml_jax import meta_test
from meml_jax.choices import OPEN
from meml_jax.comparison import At, Cell, Line, combine, points_of
from meml_jax.config import TestConfig
from meml_jax.curves import depends_on
from meml_jax.settings import flatten, from_dict
from meml_jax.stored_results import IMAGES
from meml_jax.workdir import training_fields

TEST = ("protocol", "num_classes", "shots", "queries", "runs", "episodes", "ways_shots")
"""Fields of `config.test` that, with seed and images, decide on the runs."""


class Difference(NamedTuple):
    """A line of the table less another one, of the same head.

    Attributes:
      title: what is compared.
      cells: mean difference with the interval of `comparison.combine`; as a share, in [-1, 1].
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


def unlike_settings(lines: Sequence[Line]) -> list[str]:
    """Say in which settings trainings differ that the table means to be alike, a sentence each.

    Alike are those to which its definitions of the rows give the same value; that a rate was chosen
    for some rows alone, no title tells. Left out are what no number of the lines follows from, what
    was open and chosen from the images, and steps and runs, which have columns.

    Args:
      lines: of `comparison.make_lines`, of one part.
    """
    titles: dict[tuple[str, tuple[int, ...]], str] = {}
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}  # titles by value, of those meant so
    for line in lines:
        if line.kind == "baseline" or not line.results or line.defined is None:
            continue
        title = titles.setdefault((line.row, line.seeds), line.title)
        defined = flatten(line.defined)
        for field, value in _settings(line).items():
            if field in OPEN and not defined[field]:
                continue
            head = line.head if field.startswith("test.") else ""  # each is tested in its own way
            values = alike.setdefault((field, str(defined[field]), head), {})
            have = values.setdefault(str(value), [])
            have += [title] * (title not in have)
    unlike = [(field, values) for (field, *_), values in alike.items() if len(values) > 1]
    if any(field == "embedding.name" for field, _ in unlike):  # its settings are its own
        of_it = [one for one in unlike if one[0].startswith("embedding.")]
        unlike = [one for one in unlike if one not in of_it or one[0] == "embedding.name"]
    said = [f"Rows differ in `{field}`: {_who_has(values)}." for field, values in unlike]
    return list(dict.fromkeys(said))


def _settings(line: Line) -> dict[str, Any]:
    """List the settings that a line's accuracies follow from, but its seed, steps and runs."""
    config = from_dict(line.results[0]["config"])
    test = config.test
    if config.episodes.ways:
        own = TestConfig(queries=test.queries, inner_steps=test.inner_steps)
    else:
        own = depends_on(line.head, test)
    own = dataclasses.replace(own, num_classes=(), runs=0, iid=False, checkpoint=test.checkpoint)
    named = {*training_fields(config), "test_data.name", "test_data.max_per_class", "test"}
    every = flatten(dataclasses.replace(config, test=own))
    return {k: v for k, v in every.items() if k != "seed" and {k, k.split(".")[0]} & named}


def _who_has(values: Mapping[str, Sequence[str]]) -> str:
    """Write values with the titles of those that have them; `others` have the most frequent one."""
    most = max(values, key=lambda value: len(values[value]))
    rest = "others" if len(values[most]) > 1 else values[most][0]
    said = [f"{value} ({', '.join(titles)})" for value, titles in values.items() if value != most]
    return ", ".join([*said, f"{most} ({rest})"])


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
            found[at] = {**a, **meta_test.summarise(change, num_classes=a["num_classes"])}
    return found
