"""What the runs of a table have stored: `results.json` by row and seed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax.config import Config
from meml_jax.files import write_atomic
from meml_jax.results import points_version
from meml_jax.settings import flatten, from_dict, override
from meml_jax.tables import PLACES
from meml_jax.types import UserError

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
    for name in ("dataset", "device", "commit", "embedding"):
        _ = results[name]
    _ = results["clustering"]["kept"], results["meta_train"]["steps"]
    _ = results["meta_test"]["checkpoint_step"]
    for curve in (results["meta_test"], *results["comparisons"]):
        if not (curve["head"] and curve["points"]):
            raise ValueError("a curve without points")
        for point in curve["points"]:
            numbers = [float(point[name]) for name in ("accuracy", "ci95", "chance", "seconds")]
            if not np.isfinite(np.array([*numbers, *point["accuracies"]], np.float64)).all():
                raise ValueError("accuracies that are not finite")
            _ = int(point["num_classes"])
            if len(point["accuracies"]) != point["runs"] or not point["runs"]:
                raise ValueError("another number of runs than it says")


def keep(stored: Stored, folder: Path) -> None:
    """Write what a report needs of each run to a folder that `read` reads, a file for each.

    Without places on this machine; half of the size of `results.json`, to stand beside a document.
    """
    nowhere = {name: value for name, value in flatten(Config()).items() if name in PLACES}
    for row, runs in stored.items():
        for seed, results in runs.items():
            config = override(from_dict(results["config"]), nowhere)
            kept = results | {"config": dataclasses.asdict(config)}
            text = json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False)
            write_atomic(folder / row / f"seed{seed}" / "results.json", text + "\n")
