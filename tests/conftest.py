"""Settings that must precede the import of JAX, and what several tests share."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["MPLBACKEND"] = "Agg"
os.environ.pop("XLA_FLAGS", None)
if "PYTEST_XDIST_WORKER" not in os.environ:
    # One folder of caches for all processes of a run of the tests, never the user's: what was
    # compiled once is loaded by the other worker and by the programs that tests start.
    os.environ["MEML_JAX_CACHE"] = tempfile.mkdtemp(prefix="meml_jax_tests_")
    atexit.register(shutil.rmtree, os.environ["MEML_JAX_CACHE"], ignore_errors=True)

import jax
import pytest
from own_tables import done, mini, stored, undrawn  # noqa: F401, fixtures

from meml_jax.compilation_cache import keep_compiled
from meml_jax.data import cache

keep_compiled(cache.folder(None), report=print)
# Tests spend their time on compiling what then runs for a moment. It holds in this process alone:
# programs that tests start are compiled as for a user. With MEML_JAX_TEST_OPTIMIZED=1 all are.
if os.environ.get("MEML_JAX_TEST_OPTIMIZED") != "1":
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Compute in float64 for one test."""
    with jax.enable_x64(True):
        yield
