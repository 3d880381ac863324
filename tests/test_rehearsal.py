"""The reservoir is uniform, never too full, and replays only what came before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from meml_jax import rehearsal

STREAMS = 2000


def inclusion_p_value(insert, *, length: int, capacity: int) -> float:
    """Chi-square p-value that every position of a stream is kept equally often."""

    @jax.jit
    def counts(keys):
        def stream(key):
            def step(reservoir, item):
                return insert(jax.random.fold_in(key, item), reservoir, item), None

            items = jnp.arange(length, dtype=jnp.int32)
            return jax.lax.scan(step, rehearsal.init(capacity), items)[0].slots

        slots = jax.lax.map(stream, keys, batch_size=200)
        return jnp.zeros(length, jnp.int32).at[slots.reshape(-1)].add(1)

    found = np.asarray(counts(jax.random.split(jax.random.key(1), STREAMS)))
    assert found.sum() == STREAMS * capacity
    expected = STREAMS * capacity / length
    # Exactly `capacity` of `length` are kept, so a count varies less than a multinomial one.
    shrink = (1 - capacity / length) * length / (length - 1)
    statistic = np.sum((found - expected) ** 2 / expected) / shrink
    return float(scipy.stats.chi2.sf(statistic, length - 1))


def window_rule(key, reservoir, item):
    """The released code's rule: any of the slots, whatever the number of items seen."""
    capacity = reservoir.slots.shape[0]
    full = jax.random.randint(key, (), 0, jnp.minimum(reservoir.seen, capacity) + 1)
    slot = jnp.where(reservoir.seen < capacity, reservoir.seen, full % capacity)
    return rehearsal.Reservoir(reservoir.slots.at[slot].set(item), reservoir.seen + 1)


# The short stream sees an error of one in the number of items, which long ones hide in their noise.
@pytest.mark.parametrize("length, capacity", [(3000, 500), (150, 10), (12, 4)])
def test_inclusion_is_uniform(length, capacity):
    assert inclusion_p_value(rehearsal.insert, length=length, capacity=capacity) > 1e-3


@pytest.mark.parametrize("length, capacity", [(3000, 500), (150, 10)])
def test_the_released_rule_is_not_uniform(length, capacity):
    assert inclusion_p_value(window_rule, length=length, capacity=capacity) < 1e-6


def test_the_first_items_are_all_kept():
    reservoir = rehearsal.init(7)
    for item in range(7):
        reservoir = rehearsal.insert(jax.random.key(item), reservoir, jnp.int32(item + 10))
        kept = set(np.asarray(reservoir.slots[: item + 1]).tolist())
        assert kept == {10 + i for i in range(item + 1)}
    assert reservoir.slots.shape == (7,)


@pytest.mark.parametrize("length, capacity, num", [(40, 6, 3), (5, 30, 4), (20, 2, 5)])
def test_replay_is_distinct_and_of_the_past(length, capacity, num):
    items, mask = rehearsal.replay_schedule(jax.random.key(0), length, capacity=capacity, num=num)
    assert items.shape == mask.shape == (length, num)
    for now in range(length):
        replayed = np.asarray(items[now])[np.asarray(mask[now])]
        assert len(replayed) == min(now, capacity, num)
        assert len(set(replayed.tolist())) == len(replayed)
        assert (replayed < now).all()
