"""A table of embeddings: how well their clusters agree with the true classes, and what they cost.

    python experiments/embeddings.py --config=configs/omniglot.py --config.data.dir=DIR
        --workdir=runs/embeddings [--rows=pixels,pca,random,acai,contrastive]
        [--config.a.b=value] [--write_docs=docs/results.md]

A row is one of `ROWS`, or any embedding by its name, one of your own or `npz` among them; `pca_64`
is the row `pca` with 64 clusters in place of the file's number. Each is a run of
`run.py --stage=cluster` in `WORKDIR/ROW/seedN`, with the settings given and those of the row
in `ROWS`; what is finished is reused and a stopped row goes on, as there, and a row that another
process is at is passed over. Rows that differ in
whitening and clustering only have one training, and where WORKDIR is a folder in the results of
`tables.py`, such as runs/tables/embeddings, its tables find them. Prints the table of all rows that
are finished there, and leaves it in `WORKDIR/table.md`, the figures in `WORKDIR/ROW/seedN/figures`.
The rows of a document's table are kept beside it, for docs/results.md in docs/results/embeddings;
those that are there from other calls stand in the table too.
True labels serve the table and the figures only: the agreement of clusters with them on the
training images, and, to choose by, on the validation images, embedded likewise and put into as many
clusters as there are classes.

DeepCluster and SeLa have the number of pseudo-labels of the file, or
`--config.embedding.num_pseudo_labels`; the dimension of ACAI is a multiple
of its code's positions (16 at 28 and 32 pixels, 121 at 84): at 84 pixels name the rows without it,
`--rows=pca,deepcluster`, or set `--config.embedding.dim`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import starting  # noqa: F401, before what takes seconds to import

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import run
from console import exit_code, leave, say, split_overrides
from embedding_rows import ROWS, choose, fingerprint_of
from embedding_table import FINISHED, block, check_keeping, read_row, stored, table

from meml_jax import (
    choices,
    clustering,
    devices,
    documents,
    embedding_report,
    embeddings,
    figures,
    presets,
    pseudo_labels,
    rounds,
    sharing,
)
from meml_jax.config import Config
from meml_jax.embeddings import given
from meml_jax.environment import commit, device_name
from meml_jax.files import expand_home, load_npz, lock_beside, read_json, write_atomic, write_json
from meml_jax.settings import PLACES, from_dict, override
from meml_jax.table_checks import overridden_fields
from meml_jax.types import Dataset, Split, UserError
from meml_jax.workdir import open_workdir, record_config, stored_fingerprint

flags.DEFINE_list("rows", list(ROWS), "Rows of the table, or embeddings, by name.")
flags.DEFINE_string(
    "write_docs", None, "Markdown file that gets the table; rows are kept beside it."
)


def twin(config: Config, dataset: Dataset, folder: Path) -> Path | None:
    """Find another row's folder with the same training on the same images, finished.

    Its vectors tell by their fingerprint that they are of these images, and of this version.
    """
    free = presets.PLAIN | {"embedding.checkpoint_every": Config().embedding.checkpoint_every}

    def training(config: Config) -> Config:
        return dataclasses.replace(override(config, free), clustering=Config().clustering)

    for path in sorted(folder.parent.parent.glob("*/seed*/config.json")):
        with contextlib.suppress(UserError):
            other = from_dict(read_json(path))
            first = rounds.folder(other, 1, path.parent)
            if path.parent == folder or training(other) != training(config):
                continue
            made = stored_fingerprint(first / "embeddings.npz")
            embedded = pseudo_labels.made_from(other, dataset.content_hash)
            if (first / "embedding").exists() and made in embedded:
                return first
    return None


def measure(config: Config, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Embed and cluster in a row's folder, draw the figures: what stands in the table."""
    first = rounds.folder(config, 1, folder)
    with open_workdir(folder, config):
        if not (first / "embedding").exists() and (source := twin(config, dataset, folder)):
            say(f"embed: copies the training from {source}")
            sharing.copy(source / "embedding", first / "embedding")
        z = rounds.embed(config, dataset, folder, say)
        record_config(folder, config)  # what the training there has, for `twin`
        clusters = pseudo_labels.cluster(config, dataset, z, folder, say)
        assert z is not None  # no oracle, by `settings_of`
        others = load_npz(folder / "embeddings.npz").get("validation")
        if others is None:
            raise UserError(
                f"{folder / 'embeddings.npz'} was made by an earlier version, without the "
                "validation images; delete it, so that the same command makes it again"
            )
        embedding_report.write(config, dataset, z, clusters, folder)
        info, sizes = clusters.info, folder / "figures" / "cluster_sizes.png"
        name = embedding_report.clusters_name(config, dataset)
        figures.cluster_sizes(clusters.table.size, sizes, name=name, info=info)
    made = read_json(first / "embedding.json") or {}
    validation = agreement_of_others(others, dataset.validation, config)
    return {
        "seed": config.seed,
        "NMI": info["nmi"],
        "purity": info["purity"],
        "adjusted Rand": info["adjusted_rand"],
        "validation NMI": validation.get("nmi"),
        "validation purity": validation.get("purity"),
        "clusters": info["actual"],
        "dim": z.shape[1],
        "steps": config.embedding.steps if (first / "embedding").exists() else None,
        "embed s": made.get("seconds"),
        "cluster s": info["seconds"],
        "device": made.get("device", device_name()),  # of the training, where there is one
        "commit": made.get("commit", commit()),
    }


def agreement_of_others(z: np.ndarray, split: Split, config: Config) -> dict[str, float]:
    """Cluster embeddings of other classes into as many, and compare with their labels."""
    if len(z) == 0 or split.num_classes < 2:
        return {}
    settings = dataclasses.replace(config.clustering, num_clusters=split.num_classes)
    labels, _ = clustering.cluster(z, settings, seed=config.seed)
    return clustering.agreement(split.labels, labels) or {}


def compare(
    config: Config, settings: Mapping[str, Config], workdir: Path, flags_: str, docs: str | None
) -> None:
    """Measure each row, and write the table of those that are done after each.

    `flags_` are those that tell how; `docs` is the document that gets the table, if any.
    """
    run.start_jax(config)
    images = run.load(override(config, {"embedding.file": None}))
    datasets = {name: given.attach(images, each.embedding) for name, each in settings.items()}
    for name, each in settings.items():
        try:
            embeddings.check(each.embedding, datasets[name].train.images)
            images_of = len(datasets[name].train.images)
            clustering.check(each.clustering, images_of)
            if each.clustering.num_clusters:  # 0: chosen below
                clustering.check_count(each.clustering.num_clusters, images_of)
        except UserError as error:
            raise UserError(f"row {name}: {error}") from None
    settings = {n: choices.complete(each, datasets[n], say) for n, each in settings.items()}
    wanted = {name: fingerprint_of(each, datasets[name]) for name, each in settings.items()}
    if docs:
        pairs = [(n, {"seed": each.seed, "settings": wanted[n]}) for n, each in settings.items()]
        check_keeping([*stored(workdir, images), *pairs], kept_folder(docs, config), images)
    for name, each in settings.items():
        dataset = datasets[name]
        say(f"== {name}")
        path = workdir / name / f"seed{each.seed}" / FINISHED
        with lock_beside(path.parent) as ours:
            if read_row(path.parent)["settings"] == wanted[name]:
                say(f"finished, in {path.parent}; figures in {path.parent / 'figures'}")
                continue
            if not ours:
                say("another process is at it; the same command looks again")
                continue
            row = measure(each, dataset, path.parent)
            made_of = {"settings": wanted[name], "images": images.content_hash, "flags": flags_}
            write_json(path, row | made_of)
        say(f"figures in {path.parent / 'figures'}")
        write_atomic(workdir / "table.md", table(stored(workdir, images)))
    rows = stored(workdir, images)
    write_atomic(workdir / "table.md", table(rows))
    say(table(rows))
    if docs:
        document, kept = expand_home(docs), kept_folder(docs, config)
        with documents.locked(document):
            check_keeping(rows, kept, images)
            for name, measured in rows:
                write_json(kept / name / f"seed{measured['seed']}" / FINISHED, measured)
            if not (every := stored(kept, images)):
                say(f"no row is finished; the block {name_of(config)!r} is left as it is")
                return
            documents.write_block(document, name_of(config), block(every, images))


def kept_folder(docs: str, config: Config) -> Path:
    """Folder beside a document that keeps the rows of its block."""
    return documents.beside(expand_home(docs)) / "embeddings" / config.data.name


def told(file: str, overrides: Sequence[str]) -> str:
    """Write the flags of a call for a document, with names in place of paths."""
    named = {"data.dir": "--config.data.dir=DIR"}
    given = {"data.dir": "DIR", "test_data.dir": "DIR", "embedding.file": "FILE"}
    for override_, field in zip(overrides, overridden_fields(overrides), strict=True):
        if field in given:
            named[field] = f"--config.{field}={given[field]}"
        elif field not in PLACES:
            named[field] = override_
    return shlex.join([f"--config={file}", *named.values()])


def name_of(config: Config) -> str:
    """Name of the table's block in a document."""
    return f"embeddings of {config.data.name}"


def main(argv: list[str]) -> int:
    """Compare, and turn what a user can put right into one line and exit code 2."""
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__, flags.FLAGS.main_module_help(), sep="\n")
        return 0

    def work() -> int:
        devices.check_single()
        config, workdir, stage = run.parse(argv)
        if stage != "all":
            raise UserError(f"--stage={stage}: a row is embedded and clustered, leave it out")
        overrides, rest = split_overrides(argv)
        names, docs = flags.FLAGS.rows, flags.FLAGS.write_docs
        if not names:
            raise UserError(f"--rows is empty, expected one or more of {', '.join(ROWS)}")
        settings = choose(config, names, overridden_fields(overrides))
        if (workdir / "config.json").exists():
            raise UserError(f"{workdir} is the workdir of a run, expected one of rows; use another")
        if docs:
            documents.check(expand_home(docs), name_of(config), kept_folder(docs, config))
        i = next(i for i, arg in enumerate(rest) if arg.startswith("--config"))
        file = rest[i].partition("=")[2] or rest[i + 1]
        compare(config, settings, workdir, told(file, overrides), docs)
        return 0

    return exit_code(work)


if __name__ == "__main__":
    leave(main(sys.argv))
