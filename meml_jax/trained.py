"""What a workdir has trained, for those who only use it: settings, parameters, learning rates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from meml_jax import checkpoints, curves, meta_train, rotations
from meml_jax.config import Config
from meml_jax.files import load_json, require_npz
from meml_jax.fingerprints import fingerprint
from meml_jax.learners import LEARNERS
from meml_jax.model import judged_by
from meml_jax.networks import Network
from meml_jax.settings import from_dict
from meml_jax.types import Params, UserError


def read_config(workdir: Path) -> Config:
    """Read the settings of a training.

    Raises:
      UserError: nothing is trained there, or with a learner that is not known here.
    """
    path = workdir / "config.json"
    try:
        config = from_dict(load_json(path))
    except OSError:
        raise UserError(
            f"{workdir}: got no readable config.json, expected the --workdir of a run of "
            "experiments/run.py"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not the settings of a run ({error})") from None
    if config.seeds > 1:
        raise UserError(f"{workdir}: runs of {config.seeds} seeds; load one of its folders seed<k>")
    if not (config.data.image_size and config.data.channels):
        raise UserError(f"{workdir}: nothing is trained there; run the train stage first")
    if config.learner not in LEARNERS:
        raise UserError(
            f"{workdir}: trained with the learner {config.learner!r}, which LEARNERS does not "
            "have; import the module that adds it, then load"
        )
    return config


def restore_params(workdir: Path, config: Config, network: Callable[..., Network]) -> Params:
    """Restore the checkpoint that `test.checkpoint` names."""
    if not (workdir / "tasks.npz").exists():
        raise UserError(f"{workdir}: nothing is trained there; run the train stage first")
    tasks = require_npz(workdir / "tasks.npz", "the clusters of a run")
    kept = rotations.count(config.tasks) * len(tasks.get("kept_labels", ()))
    rehearses = config.tasks.query_from == "coreset" and not config.episodes.ways
    start = functools.partial(
        meta_train.init_state,
        network=network(num_classes=config.episodes.ways or kept),
        tx=meta_train.outer_optimizer(config.outer),
        coreset_size=config.tasks.coreset_size if rehearses else None,
    )
    template = jax.eval_shape(start, jax.random.key(0))
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, _ = checkpoints.restore(
            manager, template, config.test.checkpoint, judged_by=judged_by(config)
        )
    return state.params


def chosen_rate(workdir: Path, head: str, capacity: int) -> float:
    """Look up the learning rate that the run's meta-test chose for a head."""
    try:
        results = load_json(workdir / "results.json")
        every = [results["meta_test"], *results["comparisons"]]
        points = [p for curve in every if curve["head"] == head for p in curve["points"]]
        rates = {p["num_classes"]: p["learning_rate"] for p in points}
        rate = float(rates[min(rates, key=lambda n: abs(n - capacity))])
        version = int(results["points_version"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        raise UserError(
            f"{workdir}: no learning rate was chosen for the head {head!r}; run the test stage "
            f"with it in test.heads, or give learning_rate"
        ) from None
    if version < curves.VERSIONS[head]:
        raise UserError(
            f"{workdir}: the learning rate of the head {head!r} was chosen as an earlier version "
            "did; run the test stage again, or give learning_rate"
        )
    return rate


def identity(params: Params, config: Config) -> str:
    """Digest of what gives images their features, and of the CLN that learning starts from."""
    used = {role: tree for role, tree in params.items() if role not in ("attention", "cln")}
    leaves = map(np.asarray, jax.tree.leaves((used, params["cln"]["hidden"])))
    data = config.data
    return fingerprint(config.network, data.name, data.image_size, data.channels, *leaves)
