"""Products that several workdirs have in common: made once, copied by the others.

Clusters have the fingerprint of what they were made from, and are made anew where it is another
one. A training would be refused, that of an embedding too; so all are copied only where the images
are known to be the same, a meta-training where the clusters are, too. The images are told by their
digest: where they lie, and which size was left open, makes no difference.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from meml_jax import pseudo_labels, rounds
from meml_jax.choices import OPEN
from meml_jax.config import Config
from meml_jax.files import lock, read_json, writing
from meml_jax.fingerprints import fingerprint
from meml_jax.model import judged_by
from meml_jax.results import product_versions
from meml_jax.settings import PLACES, flatten, from_dict, override
from meml_jax.types import UserError
from meml_jax.workdir import TRAINING, needs_embedding, stored_fingerprint, training_fields

FILES = {
    "embed": ("embedding", "embedding.json", "embeddings.npz"),
    "cluster": ("tasks.npz",),
    "train": ("metrics.jsonl", "tensorboard", "points.json", "checkpoints"),
}
"""By stage, what it leaves; the last one tells that it is there (of the checkpoints, the one of all
steps), so it is copied last."""

_DATA = ("seed", "precision", "data.", "embedding.")
_FIELDS = {
    "embed": _DATA,
    "cluster": (*_DATA, "clustering.", "tasks.labels", "tasks.min_size"),
    "train": (*TRAINING, "data.", "train."),
}
_OF_IMAGES = (*PLACES, "data.image_size", "data.channels")  # no more than their digest tells
_FREE = (*_OF_IMAGES, "embedding.checkpoint_every")  # what no product follows from
_COPYING = ".copying"  # ends the name, which begins with a dot, of what is not whole yet


def key(stage: str, config: Config) -> str | None:
    """Digest of the settings that a stage's product follows from; None: it is not shared.

    The images, and the code of embedding and learner, from which it follows too, are compared by
    what the product itself says of them, not here.
    """
    if stage not in FILES:
        return None
    if stage == "embed" and not needs_embedding(config):
        return None
    if stage == "cluster" and config.tasks.labels == "true":
        return None  # not worth a copy
    if config.clustering.rounds > 1 and stage != "embed":
        return None  # later rounds depend on each other
    names = _FIELDS[stage]
    if stage == "cluster" and config.tasks.balance == "truncate":
        names += ("tasks.balance",)  # and tasks.balance_size
    if stage == "train":
        unused = {*TRAINING} - {*training_fields(config)}
        names = tuple(name for name in names if name not in unused)
        if config.test.checkpoint == "best":
            names += (*judged_by(config),)
    settings = {k: v for k, v in flatten(config).items() if k not in _FREE}
    values = {name: value for name, value in settings.items() if name.startswith(names)}
    return fingerprint(stage, values)


def busy(config: Config, workdir: Path, results: Path) -> bool:
    """Tell whether another process makes a product that this workdir still lacks.

    As the images are not loaded here, it may be one on other images.
    """
    config = _completed(config, workdir)
    for stage in FILES:
        digest = key(stage, config)
        if digest is None or _there(stage, config, workdir):
            continue
        for path in (results / ".locks").glob(f"{stage}-{digest}-*"):
            with lock(path) as ours:
                if not ours:
                    return True
    return False


@contextlib.contextmanager
def around(
    stage: str,
    images: str,
    *,
    config: Config,
    workdir: Path,
    results: Path,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Enclose a stage: copy its product from a finished sibling, keep others from making it too.

    Args:
      stage: name of the stage.
      images: digest of the data set, `Dataset.content_hash`.
      config: settings of the run; what they leave open is read from the workdir's `config.json`.
      workdir: of the run, claimed by this process.
      results: folder with the workdirs at RESULTS/TABLE/ROW/seed*.
      say: prints a line.
    """
    config = _completed(config, workdir)
    digest = key(stage, config)
    if digest is None or _there(stage, config, workdir):
        yield
        return
    with contextlib.ExitStack() as stack:
        path = _lock_path(results, stage, digest, images)
        if not stack.enter_context(lock(path)):
            say(f"{stage}: another process is making the same; waits for it")
            stack.enter_context(lock(path, wait=True))
        if (source := find(stage, images, config, workdir, results)) is not None:
            say(f"{stage}: copies from {source}")
            _copy(stage, config, source, workdir)
        yield


def find(stage: str, images: str, config: Config, workdir: Path, results: Path) -> Path | None:
    """Return another workdir in which a stage with the same settings is finished, or None.

    Of the settings nothing is open but what `key` leaves to the images. What does not say that it
    is of this version, or from which embedding, is not taken.
    """
    wanted, clusters = key(stage, config), stored_fingerprint(workdir / "tasks.npz")
    embedded, versions = pseudo_labels.made_from(config, images), product_versions(config)
    for path in sorted(results.glob("*/*/seed*/config.json")):
        other = path.parent
        if other == workdir or not _there(stage, config, other):
            continue
        vectors = _folder(stage, config, other) / "embeddings.npz"
        if stage != "train" and stored_fingerprint(vectors) not in embedded:
            continue
        # A training has ended once it was tested; its config may since have got more steps.
        found = [read_json(path)]
        if stage == "train":
            tested = read_json(other / "results.json")
            if not isinstance(tested, dict) or tested.get("content_hash") != images:
                continue
            if tested.get("product_versions", {}) != versions:
                continue
            if stored_fingerprint(other / "tasks.npz") != clusters:
                continue
            found.append(tested.get("config"))
        with contextlib.suppress(UserError):
            if all(tree and key(stage, from_dict(tree)) == wanted for tree in found):
                return other
    return None


def _completed(config: Config, workdir: Path) -> Config:
    """Take what settings leave open from the workdir's `config.json`.

    The program writes there what it has chosen from the images, before it clusters them.
    """
    values, tree = flatten(config), read_json(workdir / "config.json")
    with contextlib.suppress(UserError):
        chosen = flatten(from_dict(tree))
        return override(config, {name: chosen[name] for name in OPEN if not values[name]})
    return config  # a new workdir


def _lock_path(results: Path, stage: str, digest: str, images: str) -> Path:
    return results / ".locks" / f"{stage}-{digest}-{images[:16]}"


def _folder(stage: str, config: Config, workdir: Path) -> Path:
    return workdir if stage == "train" else rounds.folder(config, 1, workdir)


def _there(stage: str, config: Config, workdir: Path) -> bool:
    """Tell whether a stage's product is there, whole; a training that was stopped is not."""
    last = _folder(stage, config, workdir) / FILES[stage][-1]
    return (last / str(config.train.steps) if stage == "train" else last).exists()


def _copy(stage: str, config: Config, source: Path, workdir: Path) -> None:
    theirs, ours = _folder(stage, config, source), _folder(stage, config, workdir)
    for name in FILES[stage]:
        copy(theirs / name, ours / name)


def copy(source: Path, target: Path) -> None:
    """Copy a file or folder in place of what a stopped run may have left of its own.

    What is not there, as the folder of an embedding that is not trained, is not copied.

    Raises:
      UserError: it cannot be written.
    """
    half = target.with_name(f".{target.name}{_COPYING}")
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(half)
        _remove(target)
        if source.is_dir():
            shutil.copytree(source, half)
        elif source.exists():
            shutil.copy2(source, half)
        else:
            return
        os.replace(half, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
