"""Random orders of rows: real ones first, every order equally likely."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from meml_jax.orders import random_order


def test_real_rows_come_first_and_padding_follows():
    count = jnp.array([0, 1, 3, 5])
    order = np.asarray(random_order(jax.random.key(0), count, 5))
    assert order.shape == (4, 5)
    for row, n in zip(order, count.tolist(), strict=True):
        assert sorted(row[:n]) == list(range(n)) and row[n:].tolist() == list(range(n, 5))


def test_all_orders_are_equally_likely():
    keys = jax.random.split(jax.random.key(1), 3000)
    found = np.asarray(jax.vmap(lambda key: random_order(key, 3, 4))(keys))[:, :3]
    times = collections.Counter(map(tuple, found.tolist()))
    assert times.keys() == set(itertools.permutations(range(3)))
    assert scipy.stats.chisquare(list(times.values())).pvalue > 1e-3
