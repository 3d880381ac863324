"""What embeddings that are trained share: checks, training with checkpoints, encoding in chunks."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meml_jax import checkpoints, chunks, metrics, training
from meml_jax.config import Config, EmbeddingConfig, TrainConfig
from meml_jax.fingerprints import fingerprint
from meml_jax.types import Array, Info, Params, TrainState, UserError

STEPS_PER_CALL = 10  # in one compiled call; a stop is heeded after it


def check(config: EmbeddingConfig, images: np.ndarray, *, positive: tuple[str, ...] = ()) -> None:
    """Raise UserError for settings with which nothing can be trained on images [N, H, W, C].

    Fields in `positive` must be above 0, as those that every training reads.
    """
    for field in ("steps", "checkpoint_every", "learning_rate", *positive):
        value = getattr(config, field)
        if not 0 < value < np.inf:
            least = "at least 1" if isinstance(value, int) else "above 0"
            raise UserError(f"embedding.{field}={value}, expected {least}")
    if not 2 <= config.batch_size <= len(images):
        raise UserError(
            f"embedding.batch_size={config.batch_size}, expected 2 to the number of training "
            f"images, {len(images)}"
        )


def optimizer(config: EmbeddingConfig) -> optax.GradientTransformation:
    """Adam whose learning rate falls to 0 along a half cosine over all steps."""
    return optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))


def train(
    train_call: Callable[..., tuple[TrainState, dict[str, Array]]],
    init_state: Callable[[Array], TrainState],
    images: np.ndarray,
    key: Array,
    config: EmbeddingConfig,
    *,
    name: str,
    trained_by: tuple[str, ...],
    loss: str,
    checkpoint_dir: Path | None,
    report: Callable[[str], None],
) -> tuple[Params, Info]:
    """Train up to `config.steps`, going on from the last checkpoint, if any.

    Args:
      train_call: (state, num_steps, images, key) -> (state, history [STEPS_PER_CALL] of each
        metric).
      init_state: key -> state at step 0.
      images: uint8 [N, H, W, C].
      key: random key.
      config: `name` of the row, whose version counts (`embeddings.version`), `steps`,
        `checkpoint_every` and what is in `trained_by`.
      name: of the embedding.
      trained_by: fields of `config` that the trained parameters depend on.
      loss: its name.
      checkpoint_dir: gets `checkpoints/`, `metrics.jsonl` and `tensorboard/`; None: nothing is
        kept.
      report: prints a line.

    Returns:
      (parameters by role, info: the metrics of the last steps, `seconds`, `commit`, `device`).

    Raises:
      UserError: checkpoints of other settings or images; a loss that is not finite.
      interrupts.Interrupted: SIGINT or SIGTERM, after the state was saved.
    """
    from meml_jax import embeddings  # here, as its rows are made from modules that import this one

    init_key, train_key = jax.random.split(key)
    fresh_state = functools.partial(jax.jit(init_state), init_key)
    settings = [getattr(config, field) for field in trained_by]
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    identity: list[Any] = [name, settings, images, np.asarray(jax.random.key_data(key))]
    # A first version, a precision at its default: not in it, so what there was before is found.
    identity += embeddings.version(config)
    identity += [precision] if precision not in (None, Config().precision) else []
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
            (jnp.asarray(images), train_key),
            schedule,
            workdir=checkpoint_dir,
            fingerprint=fingerprint(*identity),
            validate=None,
            report=report,
            wording=wording,
        )
        with checkpoints.open_checkpoints(checkpoint_dir / "checkpoints") as manager:
            state, _ = checkpoints.restore(manager, jax.eval_shape(fresh_state))
        if not (records := metrics.read(checkpoint_dir / metrics.FILE_NAME)):
            raise UserError(
                f"{checkpoint_dir / metrics.FILE_NAME} has lost the records of the training beside "
                f"it; delete {checkpoint_dir} to train anew"
            )
    record = records[-1]
    last = {k.removeprefix("train/"): v for k, v in record.items() if k.startswith("train/")}
    made = {field: summary[field] for field in ("seconds", "commit", "device")}
    return state.params, last | made


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


def chunked_encoder(
    encode: Callable[[Params, Array], Array], params: Params
) -> Callable[[np.ndarray], np.ndarray]:
    """Turn (params, images [N, H, W, C]) -> [N, D] into an encoder of any number of images.

    Each image is encoded in a chunk of the same size, so neither order nor number matters.
    """
    compiled = jax.jit(encode)

    def encode_all(images: np.ndarray) -> np.ndarray:
        return chunks.in_chunks(functools.partial(compiled, params), images, chunks.size())

    return encode_all
