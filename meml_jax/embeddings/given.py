"""Embeddings that are given in a file, by image ids."""

from __future__ import annotations

import dataclasses

import numpy as np

from meml_jax.config import EmbeddingConfig
from meml_jax.files import expand_home, load_npz
from meml_jax.fingerprints import fingerprint
from meml_jax.types import Dataset, Split, UserError


def check(config: EmbeddingConfig) -> None:
    """Raise UserError where `embedding.file` is no file."""
    if config.file is not None and not expand_home(config.file).is_file():
        raise UserError(f"embedding.file={config.file}: there is no such file")


def attach(dataset: Dataset, config: EmbeddingConfig) -> Dataset:
    """Put the embeddings of `embedding.file` beside the images, as those of an npz with a key Z.

    Args:
      dataset: whose `ids` say which rows are wanted.
      config: `file`, an npz with `ids` str [R] and `embeddings` float [R, D], in any order and of
        more images if need be, as a run's `embeddings.npz`; None: nothing is done.

    Returns:
      The data set with `embeddings` float32 of the training images, and of the validation images
      if the file has all of them. They are in its `content_hash`: results follow from them.

    Raises:
      UserError: the file is something else, or lacks a training image.
    """
    if config.file is None:
        return dataset
    ids, z = _read(config.file)
    row_of = {str(image): row for row, image in enumerate(ids)}
    if len(row_of) < len(ids):
        twice = next(str(i) for row, i in enumerate(ids) if row_of[str(i)] != row)
        raise UserError(
            f"embedding.file={config.file}: got {len(ids)} ids of {len(row_of)} images, such as "
            f"{twice!r} twice, expected each once"
        )

    def rows(split: Split) -> np.ndarray:
        return z[[row_of[str(image)] for image in split.ids]]

    train, validation = dataset.train, dataset.validation
    if missing := [str(image) for image in train.ids if str(image) not in row_of]:
        raise UserError(
            f"embedding.file={config.file}: got no embedding of {len(missing)} of {len(train.ids)} "
            f"training images, the first is {missing[0]!r}; expected all (ids there are such as "
            f"{str(ids[0])!r})"
        )
    known = all(str(image) in row_of for image in validation.ids)
    train = dataclasses.replace(train, embeddings=rows(train))
    if known:
        validation = dataclasses.replace(validation, embeddings=rows(validation))
    return dataclasses.replace(
        dataset,
        train=train,
        validation=validation,
        content_hash=fingerprint(dataset.content_hash, train.embeddings, validation.embeddings),
    )


def unused(dataset: Dataset, config: EmbeddingConfig) -> str:
    """Say that embeddings came with the images and another one is used; empty where not so."""
    if dataset.train.embeddings is None or config.name == "npz":
        return ""
    return (
        f"{dataset.name}: embeddings (Z) are there but not used (embedding.name={config.name}); "
        "--config.embedding.name=npz uses them"
    )


def _read(file: str) -> tuple[np.ndarray, np.ndarray]:
    path = expand_home(file)
    try:
        arrays = load_npz(path)
    except (OSError, ValueError):
        raise UserError(
            f"embedding.file={path} cannot be read as an npz without Python objects, expected "
            "ids (strings) and embeddings (floats): np.savez(FILE, ids=..., embeddings=...)"
        ) from None
    if missing := {"ids", "embeddings"} - arrays.keys():
        raise UserError(
            f"embedding.file={path}: got no {' and no '.join(sorted(missing))}, expected both"
        )
    ids, z = arrays["ids"], arrays["embeddings"]
    whole = z.ndim == 2 and np.issubdtype(z.dtype, np.floating) and z.shape[1] > 0
    if not (whole and ids.dtype.kind == "U" and ids.shape == z.shape[:1] and len(ids)):
        raise UserError(
            f"embedding.file={path}: got ids {ids.dtype} {list(ids.shape)}, embeddings {z.dtype} "
            f"{list(z.shape)}; expected strings [R] and floats [R, D]"
        )
    with np.errstate(over="ignore"):  # infinite embeddings are refused with their rows
        return ids, z.astype(np.float32)
