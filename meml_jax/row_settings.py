"""Settings in which the rows of a table differ though nothing in their titles tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meml_jax.choices import OPEN
from meml_jax.comparison import Line
from meml_jax.curves import NAMES
from meml_jax.influence import settings_of
from meml_jax.settings import flatten


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
        for field, value in settings_of(line.config, line.head).items():
            if field == "seed" or (field in OPEN and not meant[field]):
                continue
            defined.setdefault(field, set()).add(str(meant[field]))
            head = line.head if field.startswith("test.") else ""  # each is tested in its own way
            have = values.setdefault((field, head), {}).setdefault(str(value), [])
            if title not in have:
                have.append(title)
    found = {
        key: by_value
        for key, by_value in values.items()
        if len(by_value) > 1 and len(defined[key[0]]) == 1
    }
    if (named := ("embedding.name", "")) in found:  # whose settings are its own
        own = [key for key in found if key[0].startswith("embedding.") and key != named]
        found = {key: by_value for key, by_value in found.items() if key not in own}
    said: dict[str, list[str]] = {}  # heads by sentence
    for (field, head), by_value in found.items():
        said.setdefault(f"`{field}`: {_who_has(by_value)}.", []).append(head)
    alone = len({head for _, head in values if head}) < 2
    return [
        f"Rows differ in {sentence}"
        if alone or heads == [""]
        else f"Rows differ, with the {' and the '.join(NAMES[h] for h in heads)}, in {sentence}"
        for sentence, heads in said.items()
    ]


def _who_has(values: Mapping[str, Sequence[str]]) -> str:
    """Write values with the titles of those that have them; `others` have the most frequent one."""
    most = max(values, key=lambda value: len(values[value]))
    rest = "others" if len(values[most]) > 1 else values[most][0]
    said = [f"{value} ({', '.join(titles)})" for value, titles in values.items() if value != most]
    return ", ".join([*said, f"{most} ({rest})"])
