"""Embeddings that are given: in a file by image ids, or beside the images of the data set."""

from __future__ import annotations

import numpy as np

from meml_jax.config import EmbeddingConfig
from meml_jax.files import expand_home, load_npz
from meml_jax.types import Dataset, UserError


def check(config: EmbeddingConfig) -> None:
    """Raise UserError where `embedding.file` is no file."""
    if config.file is not None and not expand_home(config.file).is_file():
        raise UserError(f"embedding.file={config.file}: there is no such file")


def load(config: EmbeddingConfig, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Read the embeddings of a data set's images, in their order.

    Args:
      config: `file`, an npz with `ids` str [R] and `embeddings` float [R, D], in any order and of
        more images if need be, as a run's `embeddings.npz`; None: those of the data set.
      dataset: whose `ids` say which rows are wanted.

    Returns:
      (of the training images float32 [N, D]; of the validation images [M, D], or [0, D] where they
      are not given).

    Raises:
      UserError: there are none, or the file is something else or lacks a training image.
    """
    if config.file is None:
        z = dataset.train.embeddings
        if z is None:
            raise UserError(
                f"embedding.name='npz', but the data set {dataset.name!r} has no embeddings; use "
                "one that is an npz with a key Z, embedding.file=FILE.npz, or another embedding"
            )
        return z, np.zeros((0, z.shape[1]), np.float32)
    ids, z = _read(config.file)
    row_of = {str(image): row for row, image in enumerate(ids)}
    if len(row_of) < len(ids):
        twice = next(str(i) for row, i in enumerate(ids) if row_of[str(i)] != row)
        raise UserError(
            f"embedding.file={config.file}: got {len(ids)} ids of {len(row_of)} images, such as "
            f"{twice!r} twice, expected each once"
        )
    wanted = list(map(str, dataset.train.ids))
    if missing := [image for image in wanted if image not in row_of]:
        raise UserError(
            f"{config.file}: got no embedding of {len(missing)} of {len(wanted)} training images, "
            f"the first is {missing[0]!r} (ids there are such as {str(ids[0])!r}); expected all"
        )
    others = list(map(str, dataset.validation.ids))
    known = all(image in row_of for image in others)
    return z[[row_of[i] for i in wanted]], z[[row_of[i] for i in others if known]]


def _read(file: str) -> tuple[np.ndarray, np.ndarray]:
    path = expand_home(file)
    try:
        arrays = load_npz(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: got {error}; expected an npz of ids and embeddings") from None
    if missing := {"ids", "embeddings"} - arrays.keys():
        raise UserError(f"{path}: got no {' and no '.join(sorted(missing))}, expected both")
    ids, z = arrays["ids"], arrays["embeddings"]
    whole = z.ndim == 2 and np.issubdtype(z.dtype, np.floating) and z.shape[1] > 0
    if not (whole and ids.dtype.kind == "U" and ids.shape == z.shape[:1] and len(ids)):
        raise UserError(
            f"{path}: got ids {ids.dtype} {list(ids.shape)}, embeddings {z.dtype} {list(z.shape)}; "
            "expected strings [R] and floats [R, D]"
        )
    with np.errstate(over="ignore"):  # infinite embeddings are refused with their rows
        return ids, z.astype(np.float32)
