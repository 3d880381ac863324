"""Floating point operations of matrix products and convolutions, counted from shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params


def count(function: Callable[..., Any], *args: Any) -> int:
    """Count the operations of a function's products: two for each multiplication and addition.

    Args:
      function: traced, not run.
      args: arrays, or `jax.ShapeDtypeStruct`s in their place.

    Returns:
      Operations of all `dot_general`s and convolutions, by their shapes; a scan counts as often as
      it repeats, of the branches of a `cond` the dearest one counts. All else counts nothing.

    Raises:
      ValueError: a `while` loop, of which the number of repetitions cannot be seen.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        outputs = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * equation.outvars[0].aval.size * kernel.size // outputs
    if name == "while":
        raise ValueError("a while loop cannot be counted; use a scan")
    inside = [_count(jaxpr) for jaxpr in jaxprs_in_params(params)]
    if name == "cond":
        return max(inside)
    return params.get("length", 1) * sum(inside) if name == "scan" else sum(inside)
