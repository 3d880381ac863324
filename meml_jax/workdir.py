"""A workdir: who may use it, what its files belong to."""

from __future__ import annotations

import contextlib
import dataclasses
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax import devices
from meml_jax.choices import OPEN
from meml_jax.config import Config
from meml_jax.files import UNFINISHED, load_json, lock, read_npz, write_json
from meml_jax.settings import WITHOUT_INFLUENCE, flatten, from_dict
from meml_jax.types import UserError

# What the parameters of a finished training depend on; other fields may change in a workdir.
TRAINING = (
    "seed", "precision", "learner", "embedding", "clustering", "tasks", "network", "inner", "outer",
    "episodes", "data.name", "data.image_size", "data.channels", "data.split", "data.split_seed",
    "data.num_classes", "data.per_class", "data.validation_fraction", "data.test_fraction",
    "data.max_per_class", "train.init",
)  # fmt: skip


def needs_embedding(config: Config) -> bool:
    """Tell whether clusters, or the FEN at the start of the training, come from an embedding."""
    return config.tasks.labels != "true" or config.train.init == "embedding"


def training_fields(config: Config) -> tuple[str, ...]:
    """List the fields, or groups, in `TRAINING` that a training of these settings depends on.

    True classes are trained on as they are, whatever the embedding and the clustering would be.
    """
    unused = () if needs_embedding(config) else ("embedding", "clustering")
    return tuple(name for name in TRAINING if name not in unused)


@contextlib.contextmanager
def open_workdir(workdir: Path, config: Config) -> Iterator[None]:
    """Claim a workdir for this run and config; a new one gets its `config.json`.

    Raises:
      UserError: the folder cannot be written, is in use, holds other things, or holds training of a
        config that differs in a field which training depends on; or the processes of the run do not
        see the same folder.
    """
    with _claim(workdir, config):
        yield


@devices.first_alone
def _claim(workdir: Path, config: Config) -> contextlib.AbstractContextManager[Any]:
    """Lock a workdir; the lock, held until the context ends, is that of process 0."""
    if devices.process():
        if not (workdir / "config.json").is_file():
            raise UserError(
                f"process {devices.process()} does not see what process 0 wrote to {workdir}; "
                "expected a folder that all hosts share"
            )
        return contextlib.nullcontext()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # A stop before config.json was written leaves the lock and perhaps half of that file.
        ours = (".lock", ".config.json.")
        strangers = [p for p in workdir.iterdir() if not p.name.startswith(ours)]
        if strangers:
            _stored_config(workdir, f"{workdir} is not empty and not a workdir")
    except OSError as error:
        raise UserError(
            f"cannot write to the workdir {workdir} ({error.strerror}); use another --workdir"
        ) from None
    with contextlib.ExitStack() as claim:
        if not claim.enter_context(lock(workdir / ".lock")):
            raise UserError(
                f"another process works in {workdir}; wait for it or use another --workdir"
            )
        for path in workdir.rglob(f".*{UNFINISHED}"):  # of a process that was killed
            below = workdir / path.relative_to(workdir).parts[0]
            if not (below / ".lock").is_file():  # else a workdir in itself, perhaps in use
                path.unlink(missing_ok=True)
        check_same_training(workdir, config)
        if not (workdir / "config.json").exists():  # what is there stays till this run can go on
            write_json(workdir / "config.json", dataclasses.asdict(config))
        return claim.pop_all()


def record_config(workdir: Path, config: Config) -> None:
    """Write `config.json`, in process 0, unless the workdir holds training of another config.

    Raises:
      UserError: names the fields that differ.
    """
    if devices.process():
        return
    check_same_training(workdir, config)
    write_json(workdir / "config.json", dataclasses.asdict(config))


def _stored_config(workdir: Path, trouble: str) -> Config:
    """Read `config.json`; where it is not one of this program, say what follows from that."""
    path = workdir / "config.json"
    try:
        tree = load_json(path)
        if not isinstance(tree, dict) or "preset" not in tree:
            raise ValueError("not settings of this program")
        return from_dict(tree)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{trouble} ({path}: {reason}); use another --workdir") from None


def check_same_training(workdir: Path, config: Config) -> None:
    """Raise UserError, with the fields that differ, for a folder with another config's training.

    A field that is still open, here or there, is not compared: once it has been chosen, the
    checkpoints' fingerprint tells whether they belong to it. Nor is one without influence.
    """
    if not is_trained(workdir):
        return
    stored = flatten(_stored_config(workdir, f"what was trained in {workdir} is not known"))
    now, compared = flatten(config), {*training_fields(config)}
    if config.clustering.rounds > 1:  # the last round is trained on what the others have learned
        compared.add("train.steps")
    steps = [int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]
    if steps and max(steps) > config.train.steps:
        raise UserError(
            f"train.steps={config.train.steps}, but {workdir} has been trained for {max(steps)} "
            f"steps; use train.steps={max(steps)} or another --workdir"
        )
    differing = [
        f"{name} is {stored[name]!r} there, {value!r} now"
        for name, value in now.items()
        if {name, name.split(".")[0]} & compared and stored[name] != value
        if not (name in OPEN and 0 in (stored[name], value)) and name not in WITHOUT_INFLUENCE
    ]
    if differing:
        raise UserError(
            f"{workdir} holds training of another config: {'; '.join(differing)}; use another "
            "--workdir or the old values"
        )


def is_trained(workdir: Path) -> bool:
    """Tell whether a folder holds checkpoints of a meta-training."""
    trained = workdir / "checkpoints"
    return trained.is_dir() and any(trained.iterdir())


def stored_fingerprint(path: Path) -> str | None:
    """Read what a stage's npz was made from, none of its other arrays; None: it does not tell."""
    damage = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
    with contextlib.suppress(*damage), path.open("rb") as file, np.load(file) as stored:
        return str(stored["fingerprint"])
    return None


def load_product(
    path: Path,
    wanted: str,
    *,
    names: Sequence[str],
    report: Callable[[str], None],
    earlier: Sequence[str] = (),
) -> dict[str, np.ndarray] | None:
    """Load a stage's npz if it is there, whole (else it is reported), and of a fingerprint.

    Whole is one that has all arrays in `names`; `earlier` are what an earlier version has in place
    of the fingerprint.

    Raises:
      UserError: it has another fingerprint, and what was trained on it lies beside it. The settings
        are the same then (`check_same_training`), so the images, or given embeddings, are not, or
        it was made by another version of this program, or of an embedding's code
        (`embeddings.version`).
    """
    arrays = read_npz(path, report=report)
    if arrays and str(arrays.get("fingerprint")) in (wanted, *earlier):
        if missing := [name for name in names if name not in arrays]:
            report(f"{path} lacks {', '.join(missing)} and will be made again")
            return None
        return arrays
    if arrays and is_trained(path.parent):
        raise UserError(
            f"{path.parent} holds training on other images, or on other embeddings than those that "
            f"are given, or {path.name} there is of another version of this program, or of the "
            "embedding's code; use another --workdir, or the old images, embeddings or version"
        )
    if arrays:
        report(f"{path} was made with other settings or from other images, and is made anew")
    return None
