"""Rounds of clustering: what the meta-trained FEN sees is clustered and trained on again.

The last round's products are the workdir's own; those of an earlier round r, the first embedding
among them, lie in its folder `round{r}`, and are reused and resumed in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import clustering, devices, embeddings, encoding, pseudo_labels, stages
from meml_jax.config import Config
from meml_jax.embeddings import contrastive
from meml_jax.encoding import to_float
from meml_jax.files import write_npz
from meml_jax.fingerprints import fingerprint
from meml_jax.layers import FEN, STRIDES
from meml_jax.model import Model, make_model, restore_params
from meml_jax.types import Array, Dataset, Params, Report, UserError
from meml_jax.workdir import load_product

SCALE_IMAGES = 500


def check(config: Config) -> None:
    """Raise UserError for settings of `clustering.rounds` and `train.init` that cannot be."""
    rounds, labels, init = config.clustering.rounds, config.tasks.labels, config.train.init
    if rounds < 1:
        raise UserError(f"clustering.rounds={rounds}, expected at least 1")
    if rounds > 1 and labels == "true":
        raise UserError(
            f"clustering.rounds={rounds}, but tasks.labels='true' clusters nothing; set rounds to 1"
        )
    if init not in ("random", "embedding"):
        raise UserError(f"train.init={init!r}, expected 'random' or 'embedding'")
    if init == "random":
        return
    if config.embedding.name != "contrastive":
        raise UserError(
            "train.init='embedding' starts from the contrastive embedding's FEN, but "
            f"embedding.name={config.embedding.name!r}, expected 'contrastive'; set that, or "
            "train.init=random"
        )
    if config.embedding.channels != config.network.channels:
        raise UserError(
            f"train.init='embedding' needs one width of the FEN, but embedding.channels="
            f"{config.embedding.channels} and network.channels={config.network.channels}"
        )


def folder(config: Config, number: int, workdir: Path) -> Path:
    """Folder of round `number`, from 1 to `clustering.rounds`."""
    return workdir if number == config.clustering.rounds else workdir / f"round{number}"


def embed(
    config: Config,
    dataset: Dataset,
    workdir: Path,
    say: Report,
    *,
    first: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> np.ndarray | None:
    """Make the embeddings that the last round clusters, with all that lies before them.

    Args:
      config: settings.
      dataset: its training images.
      workdir: of the run.
      say: prints a line.
      first: encloses the first embedding, which other runs may share; not what is trained on it.

    Returns:
      float32 [N, D]; None for an oracle, as `pseudo_labels.embed`.
    """
    with first():
        z = pseudo_labels.embed(config, dataset, folder(config, 1, workdir), say)
    for number in range(1, config.clustering.rounds):
        say(f"round {number} of {config.clustering.rounds}")
        here = folder(config, number, workdir)
        clusters = pseudo_labels.cluster(config, dataset, z, here, say)
        model = make_model(config, dataset, clusters)
        fen = initial_fen(config, dataset, workdir)
        stages.train(config, dataset, model, here, say, fen=fen)
        z = _embed_again(config, dataset, model, here, folder(config, number + 1, workdir), say)
    if config.clustering.rounds > 1:
        say(f"round {config.clustering.rounds} of {config.clustering.rounds}")
    return z


def initial_fen(config: Config, dataset: Dataset, workdir: Path) -> Params | None:
    """Load the FEN that every round's training starts from; None: it is drawn at random.

    Its last convolution is brought to the scale of a FEN drawn at random. With p and q what both
    give, before the ReLU, on images at even steps, at most `SCALE_IMAGES`, and all of its entries,

      theta_last <- c theta_last, c = sqrt(mean q^2 / mean p^2), rounded to a power of 2

    so that no result depends on the last bits of c. The contrastive loss sees directions only and
    lets lengths grow, to twentyfold on Omniglot; with them the CLN's first losses are in the
    hundreds, and their gradients destroy what the FEN has learned.
    """
    if config.train.init == "random":
        return None
    shape = dataset.train.images.shape[1:]
    trained = folder(config, 1, workdir) / "embedding"
    fen = contrastive.load(trained, shape, config.embedding)["fen"]
    images = dataset.train.images
    sample = to_float(jnp.asarray(images[:: -(-len(images) // SCALE_IMAGES)]))
    module = FEN(config.network.channels)
    fresh = module.init(jax.random.key(0), sample[:1])["params"]
    ratio = _mean_square(module, fresh, sample) / _mean_square(module, fen, sample)
    factor = 2.0 ** round(float(jnp.log2(ratio)) / 2)
    last = f"Conv_{len(STRIDES) - 1}"  # linear, so its output is multiplied
    return {**fen, last: jax.tree.map(lambda x: factor * x, fen[last])}


@functools.partial(jax.jit, static_argnums=0)
def _mean_square(module: FEN, params: Params, images: Array) -> Array:
    """Compute mean p^2 of what the FEN makes of images [N, H, W, C], before the ReLU."""
    p: Any = module.apply({"params": params}, images)
    return jnp.mean(jnp.square(p))


@devices.first_alone
def _embed_again(
    config: Config, dataset: Dataset, model: Model, before: Path, here: Path, say: Report
) -> np.ndarray:
    """Embed by the FEN that was trained in the folder `before`; writes `embeddings.npz`."""
    # Whatever the meta-test takes: other test settings must not change what is trained.
    last = dataclasses.replace(config, test=dataclasses.replace(config.test, checkpoint="last"))
    params, step = restore_params(last, model, before)
    path, settings = here / "embeddings.npz", config.embedding
    wanted = fingerprint("FEN", model.fingerprint, step, settings.whiten, settings.normalize)
    if (stored := load_product(path, wanted, names=("embeddings",), report=say)) is not None:
        say(f"embed: reuses {path}")
        return stored["embeddings"]
    split = dataset.train
    z, others = (
        np.asarray(encoding.encode(params, images, network=model.network))
        for images in (split.images, dataset.validation.images)
    )
    clustering.check_embeddings(z, ids=split.ids)
    rescale = embeddings.fit_rescale(z, settings)
    z, others = rescale(z), rescale(others) if len(others) else others
    write_npz(path, ids=split.ids, embeddings=z, validation=others, fingerprint=wanted)
    say(f"embed: meta-trained FEN, {z.shape[0]} x {z.shape[1]}")
    return z
