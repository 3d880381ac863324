"""Updates of any training: the optimizer's step, many steps in one compiled call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meml_jax.types import Array, Metrics, Params, TrainState


def apply_gradients(
    state: TrainState, grads: Params, tx: optax.GradientTransformation
) -> TrainState:
    """Take an optimizer's step; of the meta-gradient it is eq. (4), phi <- phi - tx(grad)."""
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)


def repeat(
    step: Callable[..., tuple[TrainState, Metrics]], names: tuple[str, ...], *, steps_per_call: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Turn one step into up to `steps_per_call` steps of one compiled call.

    Args:
      step: (state, *data) -> (state, Metrics []).
      names: of the metrics.
      steps_per_call: static.

    Returns:
      train_call(state, num_steps int32 [], *data) -> (state, Metrics [steps_per_call]), 0 past
      `num_steps`.
    """

    def train_call(state: TrainState, num_steps: Array, *data: Any) -> tuple[TrainState, Metrics]:
        def body(i, carry):
            state, history = carry
            state, metrics = step(state, *data)
            return state, jax.tree.map(lambda h, m: h.at[i].set(m), history, metrics)

        history = {name: jnp.zeros((steps_per_call,), jnp.float32) for name in names}
        # A loop with a traced bound: the last, shorter call runs the same program.
        return lax.fori_loop(0, num_steps, body, (state, history))

    return train_call
