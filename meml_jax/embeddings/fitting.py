"""What embeddings that are trained share: checks, training with checkpoints, encoding in chunks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meml_jax import checkpoints, metrics, training
from meml_jax.config import EmbeddingConfig, TrainConfig
from meml_jax.types import Array, Params, TrainState, UserError
from meml_jax.workdir import fingerprint

STEPS_PER_CALL = 10  # in one compiled call; a stop is heeded after it
CHUNK = 250  # images encoded at a time


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for settings with which nothing can be trained on images [N, H, W, C]."""
    for field in ("channels", "steps", "checkpoint_every"):
        if getattr(config, field) < 1:
            raise UserError(f"embedding.{field}={getattr(config, field)}, expected at least 1")
    for field in ("temperature", "learning_rate"):
        if not 0 < getattr(config, field) < np.inf:
            raise UserError(f"embedding.{field}={getattr(config, field)}, expected above 0")
    if not 2 <= config.batch_size <= len(images):
        raise UserError(
            f"embedding.batch_size={config.batch_size}, expected 2 to the number of training "
            f"images, {len(images)}"
        )


def train(
    train_call: Callable[..., tuple[TrainState, dict[str, Array]]],
    fresh_state: Callable[[], TrainState],
    data: tuple[Any, ...],
    config: EmbeddingConfig,
    *,
    identity: tuple[Any, ...],
    loss: str,
    checkpoint_dir: Path | None,
    report: Callable[[str], None],
) -> tuple[Params, dict[str, Any]]:
    """Train up to `config.steps`, going on from the last checkpoint, if any.

    Args:
      train_call: (state, num_steps, *data) -> (state, history [STEPS_PER_CALL] of each metric).
      fresh_state: makes the state at step 0.
      data: further arguments of `train_call`.
      config: `steps` and `checkpoint_every`.
      identity: values, settings and arrays that the trained parameters depend on.
      loss: its name.
      checkpoint_dir: gets `checkpoints/`, `metrics.jsonl` and `tensorboard/`; None: nothing is
        kept.
      report: prints a line.

    Returns:
      (parameters by role, info: the metrics of the last steps and `seconds`).

    Raises:
      UserError: checkpoints of another identity; a loss that is not finite.
      training.Interrupted: SIGINT or SIGTERM, after the state was saved.
    """
    schedule = TrainConfig(
        steps=config.steps,
        steps_per_call=STEPS_PER_CALL,
        log_every=STEPS_PER_CALL,
        checkpoint_every=config.checkpoint_every,
    )
    wording = training.Wording("embed", "embedding", "embed", loss, "lower embedding.learning_rate")
    with contextlib.ExitStack() as stack:
        if checkpoint_dir is None:
            checkpoint_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        summary = training.train(
            train_call,
            fresh_state,
            data,
            schedule,
            workdir=checkpoint_dir,
            fingerprint=fingerprint(*identity),
            validate=None,
            report=report,
            wording=wording,
        )
        with checkpoints.open_checkpoints(checkpoint_dir / "checkpoints") as manager:
            state, _ = checkpoints.restore(manager, jax.eval_shape(fresh_state))
        record = metrics.read(checkpoint_dir / metrics.FILE_NAME)[-1]
    last = {k.removeprefix("train/"): v for k, v in record.items() if k.startswith("train/")}
    return state.params, last | {"seconds": summary["seconds"]}


def restore(folder: Path, fresh_state: Callable[[], TrainState]) -> Params:
    """Read the parameters that a training of an embedding left in its `checkpoint_dir`.

    Raises:
      UserError: there are none, or they are of other settings.
    """
    if not (folder / "checkpoints").is_dir():
        raise UserError(
            f"the trained embedding is not in {folder} any more; delete embeddings.npz beside it, "
            "so that the same command trains it again"
        )
    with checkpoints.open_checkpoints(folder / "checkpoints", read_only=True) as manager:
        return checkpoints.restore(manager, jax.eval_shape(fresh_state))[0].params


def in_chunks(
    encode: Callable[[Params, Array], Array], params: Params
) -> Callable[[np.ndarray], np.ndarray]:
    """Turn (params, images [N, H, W, C]) -> [N, D] into an encoder of any number of images.

    Each image is encoded in a chunk of the same size, so neither order nor number matters.
    """
    compiled = jax.jit(encode)

    def encode_all(images: np.ndarray) -> np.ndarray:
        chunks = []
        for start in range(0, len(images), CHUNK):
            chunk = images[start : start + CHUNK]
            padded = np.pad(chunk, [(0, CHUNK - len(chunk))] + [(0, 0)] * (chunk.ndim - 1))
            chunks.append(np.asarray(compiled(params, padded))[: len(chunk)])
        return np.concatenate(chunks)

    return encode_all
