"""What the runs of a table have stored: `results.json` by row and seed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax.choices import OPEN
from meml_jax.config import Config
from meml_jax.files import write_json
from meml_jax.results import is_current, points_version
from meml_jax.settings import flatten, from_dict, override
from meml_jax.tables import PLACES
from meml_jax.types import UserError

IMAGES = ("content_hash", "test_hash", "note")
"""Fields of `results.json` that tell what was trained on and tested."""

Stored = Mapping[str, Mapping[int, dict[str, Any]]]
"""`results.json` by row and seed."""


def read(folder: Path, *, say: Callable[[str], None]) -> dict[str, dict[int, dict[str, Any]]]:
    """Read what the runs of a table have stored below its folder: results by row and seed.

    What cannot be read, or has settings that this version does not know, is left out and said.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/seed*/results.json")):
        row, number = path.parent.parent.name, path.parent.name.removeprefix("seed")
        try:
            results = json.loads(path.read_text())
            config, seed = from_dict(results["config"]), int(number)
            if results.get("points_version") != points_version(config):
                raise UserError("judged as an earlier version did; the same command judges anew")
            if not is_current(results, config):
                raise UserError("of an embedding of an earlier version; train it in another folder")
            if config.seed != seed:
                raise ValueError(f"results of seed {config.seed}")
            _look_through(results)
        except UserError as error:
            say(f"left out: {path} ({str(error).partition('; fields are')[0]})")
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            say(f"left out: {path} (damaged, or no results.json: {type(error).__name__} {error})")
            continue
        first = "round1/" if config.clustering.rounds > 1 else ""
        # Most oracles have none.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            embedding = json.loads((path.parent / f"{first}embedding.json").read_text())
            results["embedding_seconds"] = embedding["seconds"]
        found.setdefault(row, {})[seed] = results
    return found


def _look_through(results: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError where what a table shows is not in results."""
    clusters, training = results["clustering"], results["meta_train"]
    numbers = [clusters["kept"], *(training[name] for name in ("seconds", "steps_per_second"))]
    if clusters["labels"] != "true":
        numbers.append(clusters["purity"])
        _ = results["embedding"]["name"]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError(f"numbers expected, got {numbers}")
    if not all(isinstance(results[name], str) for name in ("dataset", "device", "commit")):
        raise TypeError("text expected in dataset, device, commit")
    _ = int(training["steps"]), int(results["meta_test"]["checkpoint_step"])
    _ = [curve["name"] for curve in results["comparisons"]]
    for curve in (results["meta_test"], *results["comparisons"]):
        if not (isinstance(curve["head"], str) and curve["points"]):
            raise ValueError("a curve without points")
        for point in curve["points"]:
            numbers = [float(point[name]) for name in ("accuracy", "ci95", "chance", "seconds")]
            if not np.isfinite(np.array([*numbers, *point["accuracies"]], np.float64)).all():
                raise ValueError("accuracies that are not finite")
            _ = int(point["num_classes"])
            if len(point["accuracies"]) != point["runs"] or not point["runs"]:
                raise ValueError("another number of runs than it says")


def differing(stored: Config, wanted: Config, *, free: Collection[str]) -> list[str]:
    """List the settings in which stored results are not what is wanted, those in `free` aside.

    What `wanted` leaves open, to be chosen from the images, may be anything.
    """
    values, chosen = flatten(stored), (*OPEN, "test.num_classes")
    return [
        name
        for name, value in flatten(wanted).items()
        if name not in free and values[name] != value and (value or name not in chosen)
    ]


def read_kept(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Read what `keep` has written.

    Raises:
      UserError: some of it cannot be read, so that what is made of it would lack a row.
    """

    def refuse(line: str) -> None:
        raise UserError(f"{line.removeprefix('left out: ')}; mend that file or delete its folder")

    return read(folder, say=refuse)


def check_kept(kept: Stored, folder: Path, wanted: Mapping[tuple[str, int], Config]) -> None:
    """Raise UserError where results of a row and seed are kept with other settings.

    Args:
      kept: what `folder` has, of `read_kept`.
      folder: to which `keep` writes.
      wanted: settings by row and seed.
    """
    for (row, seed), config in wanted.items():
        if (results := kept.get(row, {}).get(seed)) is not None:
            stored, now = _nowhere(from_dict(results["config"])), _nowhere(config)
            if names := differing(stored, now, free=()):
                raise UserError(
                    f"{folder / row / f'seed{seed}'} keeps results of another {names[0]}: "
                    f"{flatten(stored)[names[0]]!r}, now {flatten(now)[names[0]]!r}; give the "
                    "block another --label, or delete that folder"
                )


def check_keeping(stored: Stored, kept: Stored, folder: Path) -> None:
    """Raise UserError where `keep` would; `kept` is what `folder` has, of `read_kept`."""
    wanted = {(row, seed): from_dict(r["config"]) for row, seed, r in _each(stored)}
    check_kept(kept, folder, wanted)
    for row, seed, results in _each(stored):
        other = kept.get(row, {}).get(seed, results)
        if any(other.get(name) != results.get(name) for name in IMAGES):
            raise UserError(
                f"{folder / row / f'seed{seed}'} keeps results on other images; give the block "
                "another --label, or delete that folder"
            )


def keep(stored: Stored, folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Write results to a folder that `read` reads, compact, and without this machine's paths.

    Returns:
      All that the folder keeps now, as `read_kept` would read it.

    Raises:
      UserError: results of other settings, or on other images, are kept there.
    """
    kept = read_kept(folder)
    check_keeping(stored, kept, folder)
    for row, seed, results in _each(stored):
        config = dataclasses.asdict(_nowhere(from_dict(results["config"])))
        content, path = {**results, "config": config}, folder / row / f"seed{seed}" / "results.json"
        write_json(path, content, indent=None)
        kept.setdefault(row, {})[seed] = json.loads(json.dumps(content))  # lists for tuples
    return kept


def _nowhere(config: Config) -> Config:
    """Take the places on this machine out of settings; of an embedding's file, all but the name."""
    nowhere = {name: value for name, value in flatten(Config()).items() if name in PLACES}
    file = config.embedding.file and Path(config.embedding.file).name
    return override(config, {**nowhere, "embedding.file": file})


def _each(stored: Stored) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for row, runs in stored.items():
        for seed, results in runs.items():
            yield row, seed, results
