"""Several seeds of one config: a run each, in a folder each, and what all of them have found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meml_jax import figures, paper, report
from meml_jax.config import Config
from meml_jax.environment import each_once
from meml_jax.files import read_json, write_atomic, write_json
from meml_jax.intervals import combine_points
from meml_jax.results import is_current
from meml_jax.settings import from_dict
from meml_jax.types import Dataset, UserError
from meml_jax.workdir import check_same_training


def runs(config: Config, workdir: Path) -> list[tuple[Config, Path]]:
    """List the runs `seed`, ..., `seed + seeds - 1` and their folders; one seed: WORKDIR itself."""
    if config.seeds == 1:
        return [(config, workdir)]
    every = range(config.seed, config.seed + config.seeds)
    return [
        (dataclasses.replace(config, seed=seed, seeds=1), workdir / f"seed{seed}") for seed in every
    ]


def check(config: Config, workdir: Path) -> None:
    """Refuse a folder that holds one run for several seeds, several for one, or another config's.

    Before anything is written there, and before hours go into the seeds that come first.

    Raises:
      UserError: says what the folder holds.
    """
    if config.seeds > 1:
        if (workdir / "checkpoints").is_dir():
            raise UserError(
                f"{workdir} holds the run of one seed, but seeds={config.seeds}; use another "
                "--workdir"
            )
        for one, folder in runs(config, workdir):
            check_same_training(folder, one)
    elif there := sorted(path.parent.name for path in workdir.glob("seed[0-9]*/config.json")):
        raise UserError(
            f"{workdir} holds a run of each of several seeds ({', '.join(there)}), but seeds=1; "
            "use another --workdir or the old number of seeds"
        )


def finished(
    config: Config, dataset: Dataset, folder: Path, *, files: Sequence[str]
) -> dict[str, Any] | None:
    """Return the results of a run of this config and these images that has all `files`, or None."""
    found = read_json(folder / "results.json") or {}
    images = {"content_hash": dataset.content_hash, "test_hash": dataset.test_hash}
    try:
        same = from_dict(found.get("config", {})) == config and is_current(found, config)
    except UserError:  # settings that this version does not have
        return None
    same &= {name: found.get(name) for name in images} == images
    return found if same and all((folder / name).is_file() for name in files) else None


def combine(found: Sequence[Mapping[str, Any]], config: Config) -> dict[str, Any]:
    """Put the results of several seeds together, in the form of those of one.

    Points come together as `intervals.combine_points` says.

    Args:
      found: content of `results.json` of each seed, of one config.
      config: of the whole.

    Returns:
      The content of the combined `results.json`; `each` has what differs between seeds.
    """
    first = dict(found[0])
    differing = ("seed", "clustering", "meta_train")
    varying = (*differing, "meta_test", "comparisons", "config")

    def curve(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        shared = {k: v for k, v in parts[0].items() if k not in ("points", "checkpoint_step")}
        points = zip(*(part["points"] for part in parts), strict=True)
        return shared | {"points": [combine_points(seeds) for seeds in points]}

    others = zip(*(one["comparisons"] for one in found), strict=True)
    return {name: value for name, value in first.items() if name not in varying} | {
        "seed": config.seed,
        "seeds": [one["seed"] for one in found],
        "device": each_once(one.get("device") for one in found),
        "commit": each_once(one.get("commit") for one in found),
        "meta_test": curve([one["meta_test"] for one in found]),
        "comparisons": [curve(series) for series in others],
        "each": [{name: one[name] for name in differing} for one in found],
        "config": dataclasses.asdict(config),
    }


def write_results(config: Config, dataset: Dataset, workdir: Path) -> dict[str, Any]:
    """Write and return `results.json` of all seeds; a report on others before them goes."""
    parts = []
    for one, folder in runs(config, workdir):
        if (results := finished(one, dataset, folder, files=())) is None:
            raise UserError(f"{folder} is not finished; the same command goes on with it")
        parts.append(results)
    found = combine(parts, config)
    (workdir / "report.md").unlink(missing_ok=True)
    write_json(workdir / "results.json", found)
    return found


def write_report(config: Config, dataset: Dataset, workdir: Path, found: Mapping[str, Any]) -> Path:
    """Write `report.md` and the accuracy curve of all seeds from the results of `write_results`."""
    names = []
    if not config.episodes.ways:
        names = ["figures/accuracy.png"]
        beside = paper.rows_beside(config, dataset.name)
        figures.accuracy_curve(found, workdir / names[0], paper=beside)
    write_atomic(workdir / "report.md", report.render(found, figures=names))
    return workdir / "report.md"
