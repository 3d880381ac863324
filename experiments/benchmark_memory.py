"""The part of `experiments/benchmark.py` that compares what meta-gradients keep in memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import benchmark_cases as lib
import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmark_cases import Sizes, make_problem
from benchmark_timing import Case, Rounds, interleave

from meml_jax import convolution
from meml_jax.config import InnerConfig, NetworkConfig
from meml_jax.learners import LEARNERS
from meml_jax.networks import Network

NATIVE = "native convolution"


def memory(sizes: Sizes, rounds: Rounds) -> list[dict[str, Any]]:
    """Read the memory that compiled meta-gradients need, and time each once a round.

    On a CPU twice: with its own convolution, and with the native one, which needs no windows and is
    that of accelerators. The latter are not timed.
    """
    config = NetworkConfig(channels=sizes.channels, hidden=sizes.hidden)
    cases: dict[str, Case] = {}
    needed: dict[str, int] = {}

    def compiled(row: str, *, in_the_loop: bool = False, **form: Any) -> functools.partial[Any]:
        problem = make_problem(row, np.full(sizes.outputs[0], 20), network=config)
        params, task = jax.tree.map(jnp.array, (problem.state.params, lib.drawn_task(problem)))
        if in_the_loop:
            form["network"] = encoding_in_the_loop(problem.network)
        call = jax.jit(lib.gradient(problem, **form)).lower(params, task).compile()
        return functools.partial(call, params, task)

    # Not known to be plain SGD, this optimizer gets the general loop, which copies all kernels.
    plain = dataclasses.replace(LEARNERS["oml"], optimizer=lambda lr, params: optax.sgd(lr))
    remat, whole = InnerConfig(remat=True), "oml, plain loop, encoded in it"
    forms: dict[str, dict[str, Any]] = {
        "meml": {"row": "meml"},
        "meml, encoded in the loop": {"row": "meml", "in_the_loop": True},
        "oml": {"row": "oml"},
        "oml, plain loop": {"row": "oml", "learner": plain},
        "oml, plain loop, remat": {"row": "oml", "learner": plain, "inner": remat},
        whole: {"row": "oml", "learner": plain, "in_the_loop": True},
        f"{whole}, remat": {"row": "oml", "learner": plain, "in_the_loop": True, "inner": remat},
    }
    for name, form in forms.items():
        call = compiled(**form)
        needed[name] = _temp_bytes(call.func)
        cases[name] = Case(call)
    if jax.default_backend() == "cpu":
        with mock.patch.object(convolution, "_conv", convolution.native):
            for name in ("meml", "oml", whole):
                call = compiled(**forms[name])
                needed[f"{name}, {NATIVE}"] = _temp_bytes(call.func)
    found = interleave(cases, dataclasses.replace(rounds, seconds=rounds.seconds / 3, least=1))

    def row(name: str) -> dict[str, Any]:
        beside = f"{whole}, {NATIVE}" if name.endswith(NATIVE) else whole
        row = {
            "name": name,
            "temp_mb": needed[name] / 1e6,
            "of_oml_encoded_in_it": needed[name] / needed[beside],
        }
        timed = found.get(name)
        return row | ({"ms": timed.ms, "cpu_ms": timed.cpu_ms} if timed else {})

    return [row(name) for name in needed]


def _temp_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def encoding_in_the_loop(network: Network) -> Network:
    """Make the network that encodes in every inner step, as the authors' code does."""
    return network._replace(stem=lambda params, images: images, tail=network.encode)
