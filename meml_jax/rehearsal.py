"""Reservoir sampling as a pytree: a uniform memory of fixed size, of indices or other items."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meml_jax.orders import random_order
from meml_jax.types import Array, Batch, Task

POSITION = np.int32(0)  # what an item is that says where the real one lies


class Reservoir(NamedTuple):
    """A uniform sample of the items seen so far.

    Attributes:
      slots: stored items, a pytree with leaves [capacity, ...]; the first min(seen, capacity) are
        real.
      seen: int32 [], number of items offered.
    """

    slots: Any
    seen: Array

    @property
    def capacity(self) -> int:
        """Items that it can hold."""
        return len(jax.tree.leaves(self.slots)[0])


def init(capacity: int, item: Any = POSITION) -> Reservoir:
    """Start an empty reservoir of `capacity` slots for items like `item`, a pytree of arrays."""
    slots = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), item)
    return Reservoir(slots, jnp.zeros((), jnp.int32))


def insert(key: Array, reservoir: Reservoir, item: Any) -> Reservoir:
    """Offer an item (algorithm R): the t-th, from 0, enters with chance capacity / (t + 1).

    After t items each of them is in the reservoir with probability min(1, capacity / t).

    Differs from the paper: nothing; the released code keeps a window of recent items instead.
    """
    drawn = jax.random.randint(key, (), 0, reservoir.seen + 1)
    slot = jnp.where(reservoir.seen < reservoir.capacity, reservoir.seen, drawn)

    def put(slots: Array, value: Array) -> Array:
        return slots.at[slot].set(value, mode="drop")  # where it lies past the end, nothing

    return Reservoir(jax.tree.map(put, reservoir.slots, item), reservoir.seen + 1)


def insert_all(key: Array, reservoir: Reservoir, items: Any, mask: Array) -> Reservoir:
    """Offer the real items in turn, as `insert` would, but at once.

    Args:
      key: random key; item i draws with `fold_in(key, i)`.
      reservoir: to insert into.
      items: leaves [n, ...].
      mask: bool [n], items that are real.

    Returns:
      The reservoir after all of them.
    """
    capacity, count = reservoir.capacity, len(mask)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
    before = reservoir.seen + jnp.cumsum(mask) - mask
    drawn = jax.vmap(lambda key, t: jax.random.randint(key, (), 0, t + 1))(keys, before)
    slot = jnp.where(mask, jnp.where(before < capacity, before, drawn), capacity)
    # Of several items for one slot the last one stays; a scatter may take any.
    replaced = jnp.any(jnp.triu(slot[:, None] == slot[None], k=1), axis=1)
    slot = jnp.where(replaced, capacity, slot)

    def put(slots: Array, values: Array) -> Array:
        return slots.at[slot].set(values, mode="drop")

    return Reservoir(jax.tree.map(put, reservoir.slots, items), reservoir.seen + jnp.sum(mask))


def sample(key: Array, reservoir: Reservoir, num: int) -> tuple[Any, Array]:
    """Draw up to `num` distinct stored items.

    Returns:
      (items, leaves [num, ...], mask bool [num]); fewer are real while fewer are stored.
    """
    filled = jnp.minimum(reservoir.seen, reservoir.capacity)
    order = random_order(key, filled, reservoir.capacity)[:num]
    order = jnp.pad(order, (0, num - order.shape[0]))
    items = jax.tree.map(lambda slots: slots[order], reservoir.slots)
    return items, jnp.arange(num) < filled


def replay_beside(
    key: Array, reservoir: Reservoir, item: Any, num: int
) -> tuple[tuple[Any, Array], Reservoir]:
    """Draw what is replayed beside the next item of a stream, then offer that item.

    Args:
      key: random key of the whole stream; the item's place in it is folded in.
      reservoir: of the items before.
      item: like those of the reservoir.
      num: items replayed.

    Returns:
      ((items, mask bool [num]) as of `sample`, the reservoir after the item).
    """
    sample_key, insert_key = jax.random.split(jax.random.fold_in(key, reservoir.seen))
    return sample(sample_key, reservoir, num), insert(insert_key, reservoir, item)


def init_coreset(capacity: int) -> Reservoir:
    """Start an empty coreset: its items are (dataset position, cluster)."""
    return init(capacity, np.zeros(2, np.int32))


def replace_query(key: Array, coreset: Reservoir, tasks: Task, num: int) -> tuple[Task, Reservoir]:
    """Put S_coreset in the place of S_query (supplement, Rehearsal at Meta-Train Time).

    The rows are drawn from what earlier meta-steps have stored, anew for each task; in the first
    step there are none, and its loss is 0. Then the images of the tasks' own clusters, S_cluster
    and what would have been their part of S_query, are offered; views of images are not.

    Args:
      key: random key.
      coreset: from `init_coreset`.
      tasks: a meta-batch, leaves with leading [B], without random query images; inputs are dataset
        positions.
      num: rows of S_coreset.

    Returns:
      (tasks whose query has `num` rows, the coreset after the step).
    """
    insert_key, draw_key = jax.random.split(key)
    keys = jax.random.split(draw_key, len(tasks.weight))
    drawn, mask = jax.vmap(sample, (0, None, None))(keys, coreset, num)
    query = Batch(drawn[..., 0], drawn[..., 1], mask)

    def offered(rows: Batch) -> tuple[Array, Array]:
        real = rows.mask if rows.altered is None else rows.mask & ~rows.altered
        return jnp.stack([rows.inputs, rows.label], axis=-1), real

    parts = [offered(tasks.support), offered(tasks.query)]
    items, real = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    coreset = insert_all(insert_key, coreset, items.reshape(-1, 2), real.reshape(-1))
    if tasks.support.altered is not None:  # all parts of a task say which rows are altered
        query = dataclasses.replace(query, altered=jnp.zeros_like(mask))
    return dataclasses.replace(tasks, query=query), coreset


def replay_schedule(
    key: Array, size: int, *, capacity: int, num: int, length: Array | int | None = None
) -> tuple[Array, Array]:
    """List what a learner replays beside each item of a stream: items stored before that item came.

    Which items are stored depends on their order alone, so the whole schedule is known beforehand
    and the learner's own loop only gathers.

    Args:
      key: random key.
      size: T, rows of the schedule; item t is called t.
      capacity: slots of the reservoir.
      num: items replayed a step.
      length: [], items that the stream has, at most `size`; None: so many.

    Returns:
      (items int32 [T, num], mask bool [T, num], False beyond the stream's end).
    """

    def step(item: Array, carry: tuple[Reservoir, tuple[Array, Array]]):
        reservoir, schedule = carry
        replayed, reservoir = replay_beside(key, reservoir, item, num)
        schedule = jax.tree.map(lambda all_, row: all_.at[item].set(row), schedule, replayed)
        return reservoir, schedule

    nothing = jnp.zeros((size, num), jnp.int32), jnp.zeros((size, num), bool)
    end = jnp.asarray(size if length is None else length, jnp.int32)
    return lax.fori_loop(0, end, step, (init(capacity), nothing))[1]
