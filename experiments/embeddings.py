"""A table of embeddings: how well their clusters agree with the true classes, and what they cost.

    python experiments/embeddings.py --config=configs/omniglot.py --config.data.dir=DIR
        --workdir=runs/embeddings [--rows=pixels,pca,random,acai,contrastive]
        [--config.a.b=value]

Each row is a run of `run.py --stage=cluster` in a folder of its own below the workdir, with the
settings given and those of the row in `ROWS`; what is finished is reused and a stopped row goes on,
as there. Rows that differ in whitening and clustering only have one training. Prints the table, and
leaves it in `WORKDIR/table.md`, the figures in `WORKDIR/ROW/figures`. True labels serve the table
and the figures only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from absl import flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import run
from console import exit_code, say

from meml_jax import checks, choices, embedding_report, rounds, sharing, stages
from meml_jax.config import Config
from meml_jax.data import datasets
from meml_jax.embeddings import get_fit
from meml_jax.files import write_atomic
from meml_jax.metrics import Progress
from meml_jax.settings import override
from meml_jax.types import Dataset, UserError
from meml_jax.workdir import open_workdir

ACAI = {"embedding.dim": 256, "embedding.batch_size": 64}
ROWS: dict[str, dict[str, Any]] = {
    "pixels": {"embedding.name": "pixels"},
    "pca": {"embedding.name": "pca", "embedding.dim": 64},
    "pca_whitened": {"embedding.name": "pca", "embedding.dim": 64, "embedding.whiten": 1.0},
    "random": {"embedding.name": "random"},
    "acai": {"embedding.name": "acai", **ACAI},
    "acai_whitened": {"embedding.name": "acai", **ACAI, "embedding.whiten": 1.0},
    "deepcluster": {"embedding.name": "deepcluster"},
    "sela": {"embedding.name": "sela"},
    "contrastive": {"embedding.name": "contrastive"},
    "contrastive_whitened": {"embedding.name": "contrastive", "embedding.whiten": 0.5},
    "contrastive_ward": {
        "embedding.name": "contrastive",
        "embedding.whiten": 0.5,
        "clustering.init": "ward",
    },
}
"""What a row sets. Settings given on the command line hold for all rows, except these."""

COLUMNS = ("NMI", "purity", "adjusted Rand", "clusters", "dim", "embed s", "cluster s")

flags.DEFINE_list("rows", list(ROWS), "Rows of the table, by name.")


def settings_of(row: str, config: Config) -> Config:
    """Return the settings of a row.

    Raises:
      UserError: no such row, or an embedding that is not there.
    """
    if row not in ROWS:
        raise UserError(f"--rows has {row!r}, expected some of {', '.join(ROWS)}")
    config = override(config, ROWS[row])
    get_fit(config.embedding.name)
    return config


def measure(
    config: Config, dataset: Dataset, workdir: Path, trained: Path | None
) -> dict[str, Any]:
    """Embed and cluster in a workdir, draw the figures: what stands in the table's row.

    `trained` is a finished row's workdir with the same embedding before whitening, if any.
    """
    first = rounds.folder(config, 1, workdir)
    with open_workdir(workdir, config):
        if trained is not None and not (first / "embedding").exists():
            sharing.copy(trained / "embedding", first / "embedding")
        z = rounds.embed(config, dataset, workdir, say)
        clusters = stages.cluster(config, dataset, z, workdir, say)
        if z is None:
            raise UserError("tasks.labels='true' clusters no embedding; use 'clusters'")
        embedding_report.write(config, dataset, z, clusters, workdir)
    info = clusters.info
    return {
        "NMI": info["nmi"],
        "purity": info["purity"],
        "adjusted Rand": info["adjusted_rand"],
        "clusters": info["actual"],
        "dim": z.shape[1],
        "embed s": json.loads((first / "embedding.json").read_text())["seconds"],
        "cluster s": info["seconds"],
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Write rows as a Markdown table."""

    def cell(column: str, value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.0f}" if column.endswith(" s") else f"{value:.3f}"

    lines = ["| embedding | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, row in rows.items():
        cells = [str(row[c]) if isinstance(row[c], int) else cell(c, row[c]) for c in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def compare(config: Config, workdir: Path, names: list[str]) -> None:
    """Measure each row and print the table of those that are done after each."""
    settings = {name: settings_of(name, config) for name in names}
    for each in settings.values():
        checks.before_loading(each)
    run.start_jax(config)
    progress = Progress(None, "images", unit="images")
    dataset = datasets.load(config.data, report=say, progress=progress)
    progress.close()
    rows: dict[str, dict[str, Any]] = {}
    trained: dict[Config, Path] = {}
    for name, each in settings.items():
        say(f"== {name}")
        each = choices.complete(each, dataset, say)
        same = override(each, {"embedding.whiten": 0.0, "embedding.normalize": False})
        same = dataclasses.replace(same, clustering=Config().clustering)
        rows[name] = measure(each, dataset, workdir / name, trained.get(same))
        trained.setdefault(same, rounds.folder(each, 1, workdir / name))
        write_atomic(workdir / "table.md", table(rows))
    say(table(rows))


def main(argv: list[str]) -> int:
    """Compare, and turn what a user can put right into one line and exit code 2."""
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__, flags.FLAGS.main_module_help(), sep="\n")
        return 0

    def work() -> int:
        config, workdir, _ = run.parse(argv)
        compare(config, workdir, flags.FLAGS.rows)
        return 0

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
