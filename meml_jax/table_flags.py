"""Flags of experiments/tables.py that give a row the settings it has been run with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meml_jax.comparison import Line
from meml_jax.config import Config
from meml_jax.settings import OWN_IMAGES, PLACES, UnfitPreset, flatten
from meml_jax.table_sheets import trainings
from meml_jax.tables import BUDGETS, Choice, Table, settings


def presets_of(table: Table, name: str, root: Path, presets: str) -> str:
    """Return those presets, chosen for all rows, that a row may have: all of them or none."""
    try:
        settings(table, name, root, Choice(presets=presets), seed=0)
    except UnfitPreset:  # the rows of a table may start from several config files
        return ""
    return presets


class Flags(NamedTuple):
    """Flags of experiments/tables.py.

    Attributes:
      text: as on the command line.
      replaced: the values that their overrides replace; rows of others cannot share the flags.
    """

    text: str
    replaced: tuple[Any, ...]


def flags_for(table: Table, name: str, root: Path, config: Config, *, presets: str = "") -> Flags:
    """Write the flags of experiments/tables.py that give a row the settings `config`.

    The budget is the one that needs the fewest overrides; where the data lie, and the seed, are
    left out.
    """

    def missing(budget: str) -> dict[str, tuple[Any, Any]]:
        choice = Choice(budget, presets)
        start = flatten(settings(table, name, root, choice, seed=config.seed))
        pairs = {k: (start[k], v) for k, v in flatten(config).items() if k not in PLACES}
        return {k: (before, v) for k, (before, v) in pairs.items() if v != before}

    needed = {budget: missing(budget) for budget in reversed(BUDGETS)}

    def effort(budget: str) -> tuple[bool, int]:
        none = any(value is None for _, value in needed[budget].values())  # no flag can say it
        return none, len(needed[budget])

    budget = min(needed, key=effort)
    words = [f"--budget={budget}", *([shlex.quote(f"--presets={presets}")] if presets else [])]
    own = {"data": config.data.name, "test_data": config.test_data.name}
    words += [f"--config.{part}.dir=DIR" for part, name in own.items() if name in OWN_IMAGES]
    for field, (_, value) in needed[budget].items():
        text = str(value)
        if isinstance(value, tuple):
            text = f"({','.join(map(str, value))},)" if value else "()"
        words.append(shlex.quote(f"--config.{field}={text}"))
    return Flags(" ".join(words), tuple(before for before, _ in needed[budget].values()))


def commands(
    table: Table, name: str, lines: Sequence[Line], root: Path, *, presets: str
) -> list[str]:
    """Write the commands that make what the lines hold, from the settings stored with it.

    Args:
      table: the table.
      name: of `--table`.
      lines: of `comparison.make_lines`.
      root: folder that the config files' paths start from.
      presets: the user's; rows that cannot have them have a command without.
    """
    rows: dict[tuple[tuple[int, ...], Flags], list[str]] = {}
    for line in trainings(lines):
        own = presets_of(table, line.row, root, presets)
        flags = flags_for(table, line.row, root, line.config, presets=own)
        rows.setdefault((line.seeds, flags), []).append(line.row)
    return [
        f"python experiments/tables.py {shlex.quote(f'--table={name}')} "
        f"{shlex.quote('--rows=' + ','.join(names))} --seeds={','.join(map(str, seeds))} "
        f"--data_root=DIR {flags.text}"
        for (seeds, flags), names in rows.items()
    ]
