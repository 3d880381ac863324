"""Reservoir sampling as a pytree of stream positions: a uniform memory of fixed size."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meml_jax.types import Array


class Reservoir(NamedTuple):
    """A uniform sample of the items seen so far.

    Attributes:
      slots: int32 [capacity], stored items; the first min(seen, capacity) are real.
      seen: int32 [], number of items offered.
    """

    slots: Array
    seen: Array


def init(capacity: int) -> Reservoir:
    """Start an empty reservoir of `capacity` slots."""
    return Reservoir(jnp.zeros((capacity,), jnp.int32), jnp.zeros((), jnp.int32))


def insert(key: Array, reservoir: Reservoir, item: Array) -> Reservoir:
    """Offer an item (algorithm R): the t-th, from 0, enters with chance capacity / (t + 1).

    After t items each of them is in the reservoir with probability min(1, capacity / t).

    Differs from the paper: nothing; the released code keeps a window of recent items instead.
    """
    capacity = reservoir.slots.shape[0]
    drawn = jax.random.randint(key, (), 0, reservoir.seen + 1)
    slot = jnp.where(reservoir.seen < capacity, reservoir.seen, drawn)
    # `drop` leaves the reservoir alone where the slot lies past its end.
    return Reservoir(reservoir.slots.at[slot].set(item, mode="drop"), reservoir.seen + 1)


def sample(key: Array, reservoir: Reservoir, num: int) -> tuple[Array, Array]:
    """Draw up to `num` distinct stored items.

    Returns:
      (items int32 [num], mask bool [num]); fewer are real while fewer are stored.
    """
    capacity = reservoir.slots.shape[0]
    filled = jnp.minimum(reservoir.seen, capacity)
    draw = jnp.where(jnp.arange(capacity) < filled, jax.random.uniform(key, (capacity,)), 2.0)
    order = jnp.argsort(draw)[:num]
    order = jnp.pad(order, (0, num - order.shape[0]))
    return reservoir.slots[order], jnp.arange(num) < filled


def replay_schedule(key: Array, length: int, *, capacity: int, num: int) -> tuple[Array, Array]:
    """List what a learner replays beside each item of a stream: items stored before that item came.

    Which items are stored depends on their order alone, so the whole schedule is known beforehand
    and the learner's own loop only gathers.

    Args:
      key: random key.
      length: T, items of the stream; item t is called t.
      capacity: slots of the reservoir.
      num: items replayed a step.

    Returns:
      (items int32 [T, num], mask bool [T, num]).
    """

    def step(reservoir: Reservoir, item: Array):
        sample_key, insert_key = jax.random.split(jax.random.fold_in(key, item))
        replayed = sample(sample_key, reservoir, num)
        return insert(insert_key, reservoir, item), replayed

    return lax.scan(step, init(capacity), jnp.arange(length, dtype=jnp.int32))[1]
