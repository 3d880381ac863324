"""Settings that must precede the import of JAX, and what several tests share."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["MPLBACKEND"] = "Agg"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # One cache for all workers of a run, never the user's.
    os.environ["MEML_JAX_CACHE"] = tempfile.mkdtemp(prefix="meml_jax_tests_")
    atexit.register(shutil.rmtree, os.environ["MEML_JAX_CACHE"], ignore_errors=True)

import jax
import pytest


@pytest.fixture
def x64():
    """Compute in float64 for one test."""
    with jax.enable_x64(True):
        yield
