"""Images for meta-training: all of them on the device, or those of the next call from the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import meta_train
from meml_jax.config import TrainConfig
from meml_jax.samplers import Sampler
from meml_jax.training import steps_of_call
from meml_jax.types import Array, TaskTable, UserError

DEVICE_SHARE = 0.5  # of the device's memory that the images may take; the rest is for training

Data = tuple[Any, ...]
"""images, table, weights, key: what `meta_train.make_train_call` takes beside state and steps."""


def place(images_on: str, num_bytes: int) -> str:
    """Decide where the images lie, `device` or `host`.

    Args:
      images_on: `device`, `host`, or `auto`: on the device if they take at most half of its memory,
        or if that is not known (a CPU, whose memory is the host's).
      num_bytes: size of all images.

    Raises:
      UserError: another word.
    """
    if images_on not in ("auto", "device", "host"):
        raise UserError(f"train.images_on={images_on!r}, expected 'auto', 'device' or 'host'")
    if images_on != "auto":
        return images_on
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return "host" if limit is not None and num_bytes > DEVICE_SHARE * limit else "device"


def check(place: str, sampler: Sampler) -> None:
    """Raise UserError for a coreset with images on the host: it is not known a call ahead."""
    if place == "host" and sampler.coreset_batch is not None:
        raise UserError(
            "tasks.query_from='coreset' with images on the host, expected on the device: which "
            "images a step uses depends on the steps before; set train.images_on='device'"
        )


@contextlib.contextmanager
def open_feed(
    place: str,
    data: Data,
    *,
    sampler: Sampler,
    train: TrainConfig,
) -> Iterator[Data | Callable[[int], Data]]:
    """Make the data of `training.train`: as they are, or from the host, call by call.

    Args:
      place: `device` or `host`.
      data: images uint8 [N, H, W, C] and clusters on the host, weights float32 [C], key.
      sampler: how tasks are drawn.
      train: which steps a call takes.

    Yields:
      The data, or a function from the first step of a call to them.

    Raises:
      UserError: as `check`.
    """
    images, table, weights, key = data
    if place == "device":
        yield jnp.asarray(images), jax.tree.map(jnp.asarray, table), weights, key
        return
    check(place, sampler)
    positions = meta_train.make_positions(sampler, steps_per_call=train.steps_per_call)
    with ThreadPoolExecutor(1) as pool:
        yield _from_host(images, table, weights, key, positions, train, pool)


def _from_host(
    images: np.ndarray,
    table: TaskTable,
    weights: Array,
    key: Array,
    positions: Callable[[Array, TaskTable, Array], Array],
    train: TrainConfig,
    pool: ThreadPoolExecutor,
) -> Callable[[int], Data]:
    """Feed training calls with the few images that their steps use, gathered one call ahead.

    Tasks depend on (key, step) alone, so the positions of the next call are known before this one
    ends. The call gets the gathered images as if they were the whole set, and a table whose
    `index` points into them: the same program on the same values as with all images on the device.
    """
    on_device = jax.tree.map(jnp.asarray, table)
    row = np.zeros(len(images), np.int32)  # of each image that is needed, in what is gathered
    find = jax.jit(positions)
    ahead: dict[int, Future[Data]] = {}

    def gather(found: Array) -> Data:
        needed = np.asarray(found)
        row[needed] = np.arange(len(needed), dtype=np.int32)
        remapped = TaskTable(jnp.asarray(row[table.index]), on_device.start, on_device.size)
        return jnp.asarray(images[needed]), remapped, weights, key

    def start(step: int) -> Future[Data]:
        # Asked for here, so that a device with one queue answers before the call that follows.
        return pool.submit(gather, find(jnp.int32(step), on_device, key))

    def data(step: int) -> Data:
        current = ahead.pop(step, None) or start(step)
        ahead.clear()
        following = step + steps_of_call(step, train)
        if following < train.steps:
            ahead[following] = start(following)
        return current.result()

    return data
