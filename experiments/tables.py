"""A table of the paper: trains and tests what is missing, and puts ours beside the paper's.

    python experiments/tables.py --table=omniglot --results=runs/tables --data_root=DIR
        [--rows=oml,meml] [--seeds=0,1] [--budget=smoke|short|paper] [--presets=contrastive]
        [--config.a.b=value] [--report_only] [--write_docs=docs/results.md
        [--label=TEXT] [--nofigures]]

Tables: the files in configs/tables, or the path of one of your own. A row is a run of
experiments/run.py in RESULTS/TABLE/ROW/seedN. Finished ones are skipped, stopped ones go on, and
what two runs have in common (embedding, clusters, training) is made once. Several processes may
share a results folder: each takes rows that no other has. Overrides hold for all rows. The report
is RESULTS/TABLE/report.md, .csv and .html. Data sets lie in `--data_root`, in folders of their
names, or where `--config.data.dir` says. Exit code 1: a row failed, or its report, the others are
done. Rows that another process is still at are no failure; the last lines name them.

The results that a document's block is made of are kept beside the document, for docs/results.md in
docs/results/LABEL/TABLE: those of the runs asked for are added there, with `--report_only` all in
RESULTS; what else is there stays in the block.
`--results=docs/results/LABEL --report_only` with the same `--table`, `--label`, `--presets` and
`--write_docs` makes the block from them alone; `--nofigures`: without figures.
"""

from __future__ import annotations

if __name__ == "__main__":
    import starting  # noqa: F401, before what takes seconds to import

import contextlib
import dataclasses
import functools
import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import run
from console import exit_code, leave, say
from table_command import ROOT, Asked, define_flags, parse

from meml_jax import (
    devices,
    documents,
    sharing,
    stored_results,
    table_checks,
    table_report,
)
from meml_jax.config import Config
from meml_jax.files import lock_beside, write_atomic
from meml_jax.stored_results import finished
from meml_jax.types import UserError


def do(config: Config, workdir: Path, results: Path) -> None:
    """Do one run, as experiments/run.py does, with what its siblings have made."""
    around = functools.partial(
        sharing.around, config=config, workdir=workdir, results=results, say=say
    )
    try:
        run.run(config, workdir, "all", around)
    finally:
        jax.clear_caches()  # what another row compiled is of no use to the next one
        gc.collect()


def do_all(asked: Asked) -> list[str]:
    """Do the runs that no other process does: messages of those that failed.

    A run that needs what another process is making is put off till nothing else is left.
    """
    left, failed = dict(asked.runs), []
    put_off: set[tuple[str, int]] = set()
    others: list[tuple[str, int]] = []
    while left:
        row, seed = name = next(iter(left))
        config, workdir = left.pop(name), asked.workdir(*name)
        title = f"{row}, seed {seed}"
        try:
            with lock_beside(workdir) as ours:
                if finished(config, workdir):
                    say(f"== {title}: finished, in {workdir}")
                    continue
                if not ours:
                    say(f"== {title}: another process is at it")
                    others.append(name)
                    continue
                if name not in put_off and sharing.busy(config, workdir, asked.results):
                    say(f"== {title}: later, another process makes what it needs")
                    put_off.add(name)
                    left[name] = config
                    continue
                say(f"== {title}: {workdir}")
                do(config, workdir, asked.results)
        except (UserError, OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
            # Where the memory does not hold one row it may hold the next.
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            message = f"{title}: {kind}{str(error).partition(chr(10))[0]}"
            say(f"error: {message}")
            failed.append(message)
        with contextlib.suppress(Exception):  # whatever it is, the report at the end tells it
            write_report(asked)
    for row, seed in others:
        if not finished(asked.runs[row, seed], asked.workdir(row, seed)):
            say(f"== {row}, seed {seed}: still with another process; the same command looks again")
    return failed


def write_report(asked: Asked) -> None:
    """Write the report of what is stored, and the block of the document that the user named.

    All that is stored is in the report; to the block come the results of the runs asked for.
    """
    table, folder, document = asked.table, asked.folder, asked.document
    of_rows = functools.partial(table_checks.as_defined, table=table, root=ROOT, say=say)
    if document and asked.kept(document).resolve() == folder.resolve():  # the block is its report
        with documents.locked(document):
            write_block(asked, document, of_rows(stored_results.read_kept(folder, say=say)))
        return
    with lock_beside(folder / "report", wait=True):  # no process leaves an older one
        stored = of_rows(stored_results.read(folder, say=say))
        lines = asked.lines(stored)
        shown = table_report.draw(folder, table, lines)
        shown |= table_report.draw_costs(folder, table, lines)
        table_report.write(folder, table, lines, asked.commands(lines), shown)
    say(f"report: {folder / 'report.html'}")
    if document:
        with documents.locked(document):
            kept = asked.kept(document)
            new = asked.only(stored)
            every = of_rows(stored_results.keep(new, kept))
            drawn = table_report.of_a_training(folder, asked.lines(new))
            for name in drawn if asked.figures else []:
                write_atomic(kept / name, (folder / name).read_bytes())
            write_block(asked, document, every)


def write_block(asked: Asked, document: Path, every: stored_results.Stored) -> None:
    """Write the document's block of all that is kept, and its figures."""
    if not every:  # as where all rows have failed
        say(f"nothing is stored in {asked.folder}; the block {asked.block!r} is left as it is")
        return
    kept, heading = asked.kept(document), asked.table.title + (asked.label and f", {asked.label}")
    lines, titled = asked.lines(every), dataclasses.replace(asked.table, title=heading)
    figures = table_report.draw(kept, titled, lines) if asked.figures else {}
    place = kept.relative_to(document.parent)
    shown = {f"{place}/{name}": title for name, title in figures.items()}
    text = table_report.document_text(heading, lines, asked.commands(lines), shown)
    documents.write_block(document, asked.block, text)
    say(f"{document}: wrote the block {asked.block!r}")


def check_document(asked: Asked, document: Path) -> None:
    """Raise UserError where the block could not be written, or results not be kept."""
    folder, kept, label = asked.folder, asked.kept(document), asked.label
    if document.is_symlink() and not document.exists():
        raise UserError(f"--write_docs={document} is a link that leads nowhere; name a document")
    if label != Path(label).name or label.startswith("."):
        raise UserError(f"--label={label!r}, expected the name of a folder")
    if document.resolve() in ((place / "report.md").resolve() for place in (folder, kept)):
        raise UserError(f"--write_docs={document} is the table's report; name another document")
    if kept.resolve() == folder.resolve() and not asked.report_only:
        raise UserError(
            f"{kept} would hold runs and what is kept of them; name another document, --label or "
            "--results"
        )
    left_out: list[str] = []
    of_rows = functools.partial(table_checks.as_defined, table=asked.table, root=ROOT)
    every = of_rows(stored_results.read_kept(kept, say=say), say=say)
    stored = of_rows(stored_results.read(folder, say=left_out.append), say=left_out.append)
    if asked.report_only and not every and not stored:
        why = f" ({left_out[0]}; {len(left_out)} in all)" if left_out else ""
        raise UserError(
            f"nothing of use is stored in {folder}{why}, so the block {asked.block!r} is left as "
            "it is; name the --results and --table of runs that are finished, or leave "
            "--report_only out"
        )
    documents.check(document, asked.block, kept)
    stored_results.check_kept(every, kept, asked.runs)
    if kept.resolve() != folder.resolve():
        stored_results.check_keeping(asked.only(stored), every, kept)


def main(argv: list[str]) -> int:
    """Do a table, and turn what a user can put right into one line and exit code 2."""
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__, define_flags().get_help(), sep="\n")
        return 0

    def work() -> int:
        devices.check_single()
        asked = parse(argv)
        if asked.document:
            check_document(asked, asked.document)
        failed = do_all(asked)
        try:
            write_report(asked)
        except (UserError, OSError) as error:
            if asked.report_only:
                raise
            failed.append(f"the report: {error}")
        for message in failed:
            print(f"failed: {message}", file=sys.stderr)
        return 1 if failed else 0

    return exit_code(work)


if __name__ == "__main__":
    leave(main(sys.argv))
