"""Checkpoints of meta-training: the one place that touches Orbax.

A checkpoint is a `TrainState` as named arrays and a small JSON `meta`. The latest two are kept, and
the one with the highest validation metric of each `judged_by` in the meta, the settings that the
metric follows. The process may be killed at any moment: a checkpoint is complete or absent, and the
one before stays readable. Of several processes, each reads for itself, and only process 0 writes.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import devices
from meml_jax.best_checkpoint import META, BestOfEach, best_step
from meml_jax.types import TrainState, UserError

if TYPE_CHECKING:  # importing Orbax takes 0.3 s, which commands that do not train need not wait for
    import orbax.checkpoint as ocp

KEEP_LAST = 2
_DELETED = "deleted"
_metric = operator.itemgetter("validation")


def open_checkpoints(
    directory: str | os.PathLike[str], *, read_only: bool = False
) -> ocp.CheckpointManager:
    """Open a folder of checkpoints; use it as a context manager or call `close()`.

    Args:
      directory: absolute or relative; made if missing, unless `read_only`.
      read_only: leave the folder as it is, so that another process may be writing to it. Otherwise
        what an interrupted save left is removed.

    Returns:
      The manager that the other functions take.

    Raises:
      UserError: `read_only` and there is no such folder, or `directory` is a file.
    """
    path = Path(directory).absolute()  # Orbax refuses relative paths
    if path.exists() and not path.is_dir() or read_only and not path.exists():
        raise UserError(f"got {path}, expected a folder of checkpoints; run the train stage first")
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers as policies

    logging.getLogger("absl").addFilter(_not_orbax_chatter)
    if not read_only:
        path.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        best_fn=_metric,  # without it Orbax does not store the metrics, whatever the policies say
        preservation_policy=policies.AnyPreservationPolicy(
            [policies.LatestN(KEEP_LAST), BestOfEach(path)]
        ),
        enable_async_checkpointing=False,
        todelete_subdir=_DELETED,  # one rename, so no half-deleted folder passes for a checkpoint
        save_root_metadata=False,
        create=False,
        read_only=read_only,
        multiprocessing_options=_alone(ocp),
    )
    # Named handlers let shapes be read before anything is restored.
    handlers: Any = {
        "state": ocp.StandardCheckpointHandler(),
        "meta": ocp.JsonCheckpointHandler(META),
    }
    try:
        manager = ocp.CheckpointManager(path, options=options, item_handlers=handlers)
    except (OSError, ValueError, RecursionError) as error:
        # A step's metrics, which it reads, are damaged.
        raise _unreadable(path, error) from error
    if not read_only:
        _tidy(path)
    return manager


def _alone(ocp: Any) -> Any:
    """Keep Orbax from waiting for other processes: a manager belongs to the one that opened it."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    me = devices.process()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )


def latest_step(manager: ocp.CheckpointManager) -> int | None:
    """Return the step of the newest checkpoint, None if there is none."""
    return manager.latest_step()


def save(
    manager: ocp.CheckpointManager,
    state: TrainState,
    meta: Mapping[str, Any],
    metric: float | None = None,
) -> None:
    """Store `state` under its own step and drop what is neither among the latest nor a best one.

    A step that is already the latest is left as it is: the same step of one run is the same state.

    Args:
      manager: from `open_checkpoints`.
      state: arrays of any device; `state.step` names the checkpoint.
      meta: JSON values kept beside it, e.g. the configuration; `judged_by` are the settings that
        `metric` follows.
      metric: validation accuracy, higher is better; None where this step was not validated.

    Raises:
      UserError: the disk is full or cannot be written.
      ValueError: the metric is not finite, or a later step is already stored.
      TypeError: `meta` is not JSON.
    """
    import orbax.checkpoint as ocp

    if metric is not None and not np.isfinite(metric):
        raise ValueError(f"validation metric: got {metric}, expected a finite number or None")
    step, latest = int(state.step), latest_step(manager)
    if latest is not None and step <= latest:
        if step == latest:
            return
        raise ValueError(f"{manager.directory} holds step {latest}, so step {step} cannot be added")
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    plain = json.loads(json.dumps(dict(meta)))  # fails before anything is written, if it fails
    items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(plain))
    metrics = None if metric is None else {"validation": float(metric)}
    try:
        manager.save(step, args=items, metrics=metrics)
    except (OSError, ValueError) as error:  # of the file system, or of Orbax's storage about it
        left, then = "the one before it is whole", "goes on from it"
        if latest is None:
            left, then = "there is none before it", "begins anew"
        raise UserError(
            f"cannot save the checkpoint {manager.directory / str(step)} ({_reason(error)}); "
            f"{left}: make room there, then the same command {then}"
        ) from error
    _tidy(manager.directory)


def restore(
    manager: ocp.CheckpointManager,
    template: TrainState,
    which: str = "last",
    *,
    judged_by: Mapping[str, Any] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Read a checkpoint into the structure of `template`, bit for bit.

    Args:
      manager: from `open_checkpoints`.
      template: a state, or its `jax.eval_shape`, with the shapes and dtypes that are expected.
      which: `last`, or `best` by validation metric.
      judged_by: settings by which the best one is chosen, as of `best_step`.

    Returns:
      The state, on the devices of `template` where those were chosen, and its `meta`.

    Raises:
      UserError: no such checkpoint, or it does not fit; the message names the parameter.
    """
    import orbax.checkpoint as ocp

    if which not in ("last", "best"):
        raise UserError(f"test.checkpoint: got {which!r}, expected 'last' or 'best'")
    if latest_step(manager) is None:
        raise UserError(f"no checkpoint in {manager.directory}; run the train stage first")
    step = latest_step(manager) if which == "last" else best_step(manager, judged_by)
    if step is None:
        raise UserError(
            f"no checkpoint in {manager.directory} has a validation accuracy, so none is the best; "
            "set test.checkpoint=last, or train.validate_every to at most train.steps"
        )
    expected = named_leaves(template)
    folder = manager.directory / str(step)
    try:
        saved = dict(manager.item_metadata(step).state.tree)
        _check(saved, expected, folder)
        blank = {k: np.empty(v.shape, v.dtype) for k, v in saved.items()}  # numpy in, numpy out
        arrays, meta = ocp.args.StandardRestore(blank), ocp.args.JsonRestore()
        restored = manager.restore(step, args=ocp.args.Composite(state=arrays, meta=meta))
    except (UserError, MemoryError):
        raise
    except Exception as error:  # Orbax and its storage raise many kinds for a damaged file
        raise _unreadable(folder, error) from error
    leaves = [_place(restored.state[name], like) for name, like in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves), dict(restored.meta)


def _unreadable(folder: Any, error: Exception) -> UserError:
    """Say what to do about a checkpoint, or a folder of them, that cannot be read."""
    said = f"cannot read the checkpoint {folder} ({_reason(error)}); "
    places = [Path(folder), *sorted(Path(folder).rglob("*"))]
    closed = next((place for place in places if not os.access(place, os.R_OK)), None)
    if closed is not None or isinstance(error, PermissionError):
        return UserError(f"{said}make {closed or folder} readable")
    return UserError(
        f"{said}if that comes again, move that step's folder away to go on from the one before it"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def named_leaves(tree: Any) -> dict[str, Any]:
    """Flatten to `params/fen/...` names: independent of optax's classes, readable in messages."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _check(saved: Mapping[str, Any], expected: Mapping[str, Any], folder: Any) -> None:
    """Raise a UserError that names the first parameters in which the two differ."""
    got = {name: _describe(leaf) for name, leaf in saved.items()}
    want = {name: _describe(leaf) for name, leaf in expected.items()}
    wrong = [name for name in {**want, **got} if got.get(name) != want.get(name)]
    wrong.sort(key=lambda name: not name.startswith("params"))  # the optimizer's follow from them
    if not wrong:
        return
    lines = [f"{n}: got {got.get(n, 'nothing')}, expected {want.get(n, 'nothing')}" for n in wrong]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise UserError(
        f"the checkpoint {folder} does not fit: {'; '.join(lines[:3])}{more}. "
        "Use the settings it was trained with, or another --workdir"
    )


def _describe(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    return f"{np.dtype(dtype).name}{list(np.shape(leaf))}"


def _place(value: np.ndarray, like: Any) -> jax.Array:
    """Put an array where `like` is pinned, else leave the place to JAX as for a fresh state."""
    array = jnp.array(value)  # a copy: jitted steps may donate it
    return jax.device_put(array, like.sharding) if getattr(like, "committed", False) else array


def _tidy(directory: os.PathLike[str]) -> None:
    """Remove what was deleted or half saved; here, because Orbax does it later in a thread."""
    for path in [Path(directory, _DELETED), *Path(directory).glob("*.orbax-checkpoint-tmp*")]:
        shutil.rmtree(path, ignore_errors=True)


def _not_orbax_chatter(record: logging.LogRecord) -> bool:
    """Keep Orbax's errors and what others log; its warnings describe its own internals."""
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname
