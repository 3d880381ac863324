"""Meta-test with FiLM layers: they adapt with the CLN, and each class has its own context.

The stream is that of every learner (`heads.learn_stream`); these are helpers that only FiLM needs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from meml_jax.types import Array


def reset_context(tree: Any, fresh: Array | bool) -> Any:
    """Set what belongs to the role `context` to 0 where `fresh`, in parameters or Adam's state."""
    role = jax.tree_util.DictKey("context")

    def reset(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.where(fresh, jnp.zeros_like(leaf), leaf) if role in path else leaf

    return jax.tree_util.tree_map_with_path(reset, tree)


def starts_class(label: Array) -> Array:
    """Tell where the class of label [T] is not that of the row before: bool [T]; so the first."""
    return jnp.concatenate([jnp.ones((1,), bool), label[1:] != label[:-1]])


def adam_by_role(
    learning_rate: Array | float, roles: tuple[str, ...]
) -> optax.GradientTransformation:
    """Build an Adam for each role: the context's step count starts again with the context."""
    adam = {role: optax.adam(learning_rate) for role in roles}
    return optax.partition(adam, {role: role for role in roles})
