"""Settings in which the rows of a table differ though nothing in their titles tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meml_jax.choices import OPEN
from meml_jax.comparison import Line
from meml_jax.config import TestConfig
from meml_jax.curves import depends_on
from meml_jax.settings import flatten
from meml_jax.workdir import training_fields


def unlike(lines: Sequence[Line]) -> list[str]:
    """Say in which settings trainings differ that the table defines alike, a sentence each.

    What the table defines in several ways for its rows, their titles tell. Left out are what no
    number of the lines follows from, what was open and chosen from the images, and steps and runs,
    which have columns.

    Args:
      lines: of `comparison.make_lines`, of one part.
    """
    titles: dict[tuple[str, tuple[int, ...]], str] = {}
    defined: dict[str, set[str]] = {}
    values: dict[tuple[str, str], dict[str, list[str]]] = {}  # titles by value
    for line in lines:
        if line.kind == "baseline" or not line.results or line.defined is None:
            continue
        title = titles.setdefault((line.row, line.seeds), line.title)
        meant = flatten(line.defined)
        for field, value in _settings(line).items():
            if field in OPEN and not meant[field]:
                continue
            defined.setdefault(field, set()).add(str(meant[field]))
            head = line.head if field.startswith("test.") else ""  # each is tested in its own way
            have = values.setdefault((field, head), {}).setdefault(str(value), [])
            if title not in have:
                have.append(title)
    found = {
        field: by_value
        for (field, _), by_value in values.items()
        if len(by_value) > 1 and len(defined[field]) == 1
    }
    if "embedding.name" in found:  # whose settings are its own
        named = found["embedding.name"]
        found = {k: v for k, v in found.items() if not k.startswith("embedding.")}
        found["embedding.name"] = named
    return [f"Rows differ in `{field}`: {_who_has(by)}." for field, by in found.items()]


def _settings(line: Line) -> dict[str, Any]:
    """List the settings that a line's accuracies follow from, but its seed, steps and runs."""
    config = line.config
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
