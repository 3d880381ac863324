"""The devices and processes that share a run: who computes what, who writes, who waits.

One process on one device is the plain case, in which every function here leaves things as they are.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meml_jax.samplers import Sampler
from meml_jax.types import Array, Task, UserError

AXIS = "tasks"
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Set in every process of a run on several hosts: HOST:PORT of process 0, how many, which one."""

Tree = TypeVar("Tree")
Function = TypeVar("Function", bound=Callable[..., Any])


def connect(environ: Mapping[str, str] = os.environ) -> None:
    """Join the other processes of this run, if `VARIABLES` are set; before anything uses a device.

    Raises:
      UserError: some of the variables are set and others not, one of them is wrong, or no process 0
        answers.
    """
    values = {name: environ[name] for name in VARIABLES if environ.get(name)}
    if not values or jax.distributed.is_initialized():
        return
    if missing := [name for name in VARIABLES if name not in values]:
        raise UserError(
            f"{', '.join(values)} set, but not {', '.join(missing)}; set all of them in every "
            "process of a run on several hosts, or none"
        )
    address, count, index = values.values()
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"JAX_COORDINATOR_ADDRESS={address}, expected HOST:PORT of process 0")
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise UserError(
            f"JAX_NUM_PROCESSES={count}, JAX_PROCESS_ID={index}; expected a number of processes, "
            "and in each process another index from 0 to that number less 1"
        )
    # Else JAX takes SIGTERM for itself, which here stops a run, and a training saves first.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(address, int(count), int(index), shutdown_timeout_seconds=60)
    except RuntimeError as error:
        raise UserError(
            f"process {index} of {count} cannot join the others at {address} "
            f"({(str(error).splitlines() or [''])[0]}); start all of them, with the same address"
        ) from None


def check_single(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse `VARIABLES` where each process does runs of its own, and none would join another's.

    Raises:
      UserError: one of them is set.
    """
    if several := [name for name in VARIABLES if environ.get(name)]:
        raise UserError(
            f"{', '.join(several)} set, which joins processes to one run of experiments/run.py; "
            "unset them, processes of this program share work by its folder"
        )


def process() -> int:
    """Index of this process; what it prints and writes is what process 0 prints and writes."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def train_mesh(meta_batch: int) -> Mesh | None:
    """Choose the devices that share the tasks of a meta-batch; None: one device is enough.

    As many of each process as possible, so that each device gets the same number of tasks: the
    number of devices divides `meta_batch`.

    Raises:
      UserError: the processes cannot share the tasks evenly.
    """
    processes = jax.process_count()
    if meta_batch % processes:
        raise UserError(
            f"outer.meta_batch={meta_batch} for {processes} processes, expected a multiple of "
            f"{processes}: each gets the same number of tasks"
        )
    by_process = [[d for d in jax.devices() if d.process_index == i] for i in range(processes)]
    share = meta_batch // processes
    each = max(n for n in range(1, min(map(len, by_process)) + 1) if share % n == 0)
    return _mesh([device for devices in by_process for device in devices[:each]])


def test_mesh() -> Mesh | None:
    """Return the devices of this process, which share the runs of a meta-test; None: one device."""
    return _mesh(jax.local_devices())


def _mesh(devices: list[jax.Device]) -> Mesh | None:
    return Mesh(np.array(devices), (AXIS,)) if len(devices) > 1 else None


def note(mesh: Mesh | None) -> str:
    """Say how many of the devices a training uses; nothing where there is but one."""
    used, available = 1 if mesh is None else mesh.size, jax.device_count()
    if available == 1:
        return ""
    hint = "" if used == available else ": a multiple of them as outer.meta_batch would use all"
    return f", {used} of {available} devices{hint}"


def replicate(tree: Tree, mesh: Mesh | None) -> Tree:
    """Put the same arrays on every device of a mesh; each process puts them on its own ones."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, P())

    def put(x: Any) -> Array:
        copies = [jax.device_put(x, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(np.shape(x), sharding, copies)

    return jax.tree.map(put, tree)


def local(tree: Tree, mesh: Mesh | None) -> Tree:
    """Take replicated arrays as arrays on the first device of this process."""
    return tree if mesh is None else jax.tree.map(lambda x: x.addressable_data(0), tree)


def split(tree: Tree, mesh: Mesh | None) -> Tree:
    """Give each device of a mesh its part of the leading axis of arrays, which it divides."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, P(AXIS)))


def share_tasks(sampler: Sampler, mesh: Mesh | None) -> Sampler:
    """Give each device of a mesh its part of every meta-batch.

    Each device draws all tasks, which is cheap, and gathers the images of its own. All that follows
    is independent between tasks but for the mean of their losses, so the compiled step has one sum
    over devices, that of the meta-gradient (and of a few metrics).
    """
    if mesh is None:
        return sampler

    def prepare(key: Array, tasks: Task) -> Task:
        shared = NamedSharding(mesh, P(AXIS))
        return lax.with_sharding_constraint(sampler.prepare(key, tasks), shared)

    return sampler._replace(prepare=prepare)


def largest(value: int, mesh: Mesh | None) -> int:
    """Largest value of all processes that share a mesh, which all of them must ask for."""
    if mesh is None or not mesh.is_multi_process:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).max())


def _wait_for_first(failed: bool = False) -> None:
    """Wait, in every process but the first, until the first calls this as well.

    Raises:
      UserError: process 0 has `failed`.
    """
    if jax.process_count() == 1:
        return
    if multihost_utils.broadcast_one_to_all(np.int32(failed)) and process():
        raise UserError("process 0 has stopped; its message says why")


def first_only(function: Function) -> Function:
    """Let process 0 call a function, while the others wait for its end and return None."""

    @functools.wraps(function)
    def leading(*args: Any, **kwargs: Any) -> Any:
        if process():
            return _wait_for_first()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            _wait_for_first(failed=True)
            raise
        _wait_for_first()
        return result

    return leading  # type: ignore[return-value]


def first_alone(function: Function) -> Function:
    """Let process 0 call a function; then the others call it, and find the files that it left.

    For stages that run on one device: their products are made once, and are the same everywhere.
    """
    leading = first_only(function)

    @functools.wraps(function)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        result = leading(*args, **kwargs)
        return function(*args, **kwargs) if process() else result

    return in_turn  # type: ignore[return-value]
