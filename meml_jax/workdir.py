"""A workdir: who may use it, what its files belong to."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax.choices import OPEN
from meml_jax.config import Config, flatten, from_dict
from meml_jax.files import write_atomic, write_json
from meml_jax.types import UserError

# What the parameters of a finished training depend on; other fields may change in a workdir.
_TRAINING = (
    "seed", "precision", "learner", "embedding", "clustering", "tasks", "network", "inner", "outer",
    "data.name", "data.image_size", "data.channels", "data.split", "data.split_seed",
    "data.num_classes", "data.per_class", "data.validation_fraction", "data.test_fraction",
    "data.max_per_class",
)  # fmt: skip


def fingerprint(*parts: Any) -> str:
    """Digest of JSON-able values, settings and arrays.

    Only settings that differ from their default count, so a later version's new field, off by
    default, does not make what exists look foreign.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            values = {f.name: getattr(value, f.name) for f in fields}
            return {f.name: values[f.name] for f in fields if values[f.name] != f.default}
        return value

    text = json.dumps([plain(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def open_workdir(workdir: Path, config: Config) -> Iterator[None]:
    """Claim a workdir for this process and config, and write `config.json`.

    Raises:
      UserError: the folder cannot be written, is in use, holds other things, or holds training of a
        config that differs in a field which training depends on.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # A stop before config.json was written leaves the lock and perhaps half of that file.
        ours = (".lock", ".config.json.")
        strangers = [p for p in workdir.iterdir() if not p.name.startswith(ours)]
        if strangers and not (workdir / "config.json").exists():
            raise UserError(f"{workdir} is not empty and not a workdir; use another --workdir")
        lock = (workdir / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"cannot write to the workdir {workdir} ({error.strerror}); use another --workdir"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process works in {workdir}; wait for it or use another --workdir"
            ) from None
        record_config(workdir, config)
        yield


def record_config(workdir: Path, config: Config) -> None:
    """Write `config.json`, unless the workdir holds training of a config that differs.

    A field that is still open, here or there, is not compared: once it has been chosen, the
    checkpoints' fingerprint tells whether they belong to it.

    Raises:
      UserError: names the fields that differ.
    """
    _check_same_training(workdir, config)
    write_json(workdir / "config.json", dataclasses.asdict(config))


def _check_same_training(workdir: Path, config: Config) -> None:
    trained = workdir / "checkpoints"
    if not (trained.is_dir() and any(trained.iterdir())):
        return
    try:
        stored = flatten(from_dict(json.loads((workdir / "config.json").read_text())))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {workdir / 'config.json'} ({error}), so what was trained there is not "
            "known; use another --workdir"
        ) from None
    now = flatten(config)
    differing = [
        f"{name} is {stored[name]!r} there, {value!r} now"
        for name, value in now.items()
        if name.startswith(_TRAINING) and stored[name] != value
        if not (name in OPEN and 0 in (stored[name], value))
    ]
    if differing:
        raise UserError(
            f"{workdir} holds training of another config: {'; '.join(differing)}; use another "
            "--workdir or the old values"
        )


def save_npz(path: Path, **arrays: Any) -> None:
    """Write a product of a stage, whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def load_npz(path: Path, wanted: str) -> dict[str, np.ndarray] | None:
    """Load a product if it is there, whole, and of the wanted fingerprint."""
    try:
        # Opened here, as np.load leaves a broken file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return None
    return arrays if str(arrays.get("fingerprint")) == wanted else None
