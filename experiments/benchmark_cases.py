"""Meta-trainings to be timed: used by `benchmark_parts.py`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_timing import Case

from meml_jax import encoding, flops, meta_train, task_spec, tasks, updates
from meml_jax.config import InnerConfig, NetworkConfig, OuterConfig, TasksConfig
from meml_jax.learners import LEARNERS, Learner
from meml_jax.networks import Network, make_network
from meml_jax.samplers import Sampler, cluster_sampler
from meml_jax.types import Array, Batch, Params, Task, TaskTable


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the things measured are; the defaults are the paper's.

    Attributes:
      channels: of the FEN.
      hidden: width of the CLN.
      outputs: of the CLN, by network.
      cluster_sizes: images of a cluster, by network.
      matmul: rows and columns of the matrices whose product is the machine's peak.
      stream: classes and outputs of a meta-test; outputs of the larger head.
      small: channels, hidden and outputs of the network on which growth is measured.
      rows: embeddings that k-means is timed on.
      encoded: images whose features are timed.
    """

    channels: int = 256
    hidden: int = 1024
    outputs: tuple[int, int] = (1100, 64)
    cluster_sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((10, 20, 30), (20, 30))
    matmul: int = 2048
    stream: tuple[int, int, int] = (20, 200, 423)
    small: tuple[int, int, int] = (32, 256, 200)
    rows: int = 20_000
    encoded: int = 50


SMALL = Sizes(4, 16, (12, 12), ((10,), (20,)), 64, (4, 5, 6), (4, 16, 12), 200, 8)
"""Shows that the program works; the figures mean nothing."""


class Problem(NamedTuple):
    """A meta-training on images of noise, whose time is that of real ones.

    Attributes:
      network: pure functions.
      learner: name.
      sampler: of tasks of clusters.
      state: before the first step.
      data: further arguments of the call.
      outer: of the call.
    """

    network: Network
    learner: str
    sampler: Sampler
    state: Any
    data: tuple[Array, TaskTable, Array, Array]
    outer: OuterConfig


def make_problem(
    learner: str,
    cluster_sizes: np.ndarray,
    *,
    network: NetworkConfig,
    image: tuple[int, int, int] = (28, 28, 1),
    task: TasksConfig = TasksConfig(usable_fraction=0.75),  # noqa: B008
    meta_batch: int = 1,
) -> Problem:
    """Make clusters of given sizes; the default task is the released code's, as the yardstick's."""
    labels = np.repeat(np.arange(len(cluster_sizes)), cluster_sizes)
    table, kept = tasks.table_from_labels(labels, min_size=2)
    spec = task_spec.make_spec(task, table, kept)
    bounds = tasks.bucket_bounds(table, spec, num_buckets=task.num_buckets)
    net = make_network(network, LEARNERS[learner], image_shape=image, num_classes=len(kept))
    outer = OuterConfig(meta_batch=meta_batch)
    init = functools.partial(
        meta_train.init_state, network=net, tx=meta_train.outer_optimizer(outer)
    )
    images = np.random.default_rng(0).integers(0, 256, (len(labels), *image), np.uint8)
    data = (images, table, np.ones(len(kept), np.float32))
    return Problem(
        net,
        learner,
        cluster_sampler(spec, bounds, meta_batch=meta_batch),
        jax.jit(init)(jax.random.key(0)),
        (*jax.tree.map(jnp.asarray, data), jax.random.key(1)),
        outer,
    )


def jitted_steps(problem: Problem, *, steps_per_call: int) -> Any:
    """Build the training call as `training.train` does, with its state donated."""
    call = meta_train.make_train_call(
        network=problem.network,
        learner=LEARNERS[problem.learner],
        inner=InnerConfig(),
        outer=problem.outer,
        sampler=problem.sampler,
        steps_per_call=steps_per_call,
    )
    return jax.jit(call, donate_argnums=0)


def steps_case(problem: Problem, *, num_steps: int, call: Any = None) -> Case:
    """Time `num_steps` meta-steps in one call; training goes on from run to run."""
    call = call or jitted_steps(problem, steps_per_call=num_steps)
    states = [problem.state]

    def run() -> Any:
        state, history = call(states.pop(), jnp.int32(num_steps), *problem.data)
        states.append(state)
        return history

    return Case(run, num_steps)


def peak_case(sizes: Sizes) -> tuple[Case, float]:
    """Time a float32 matrix product, five in a row as one is short: (case, GFLOP of one)."""
    matrix = jnp.ones((sizes.matmul, sizes.matmul), jnp.float32)
    product = jax.jit(functools.partial(jnp.matmul, precision="highest"))

    def run() -> Any:
        return [jax.block_until_ready(product(matrix, matrix)) for _ in range(5)]

    return Case(run, 5), 2e-9 * sizes.matmul**3


def floor_case(problem: Problem, images: int) -> Case:
    """Time only what cannot be left out: FEN and CLN, forward and backward, once an image."""
    network, params = problem.network, jax.tree.map(jnp.array, problem.state.params)
    x = encoding.to_float(problem.data[0][:images])
    label = jnp.arange(images) % network.num_classes

    @jax.jit
    def gradient(params: Params) -> Params:
        def loss(params: Params) -> Array:
            logits = network.classify(params, network.activate(network.encode(params, x)))
            return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(images), label])

        return jax.grad(loss)(params)

    return Case(lambda: gradient(params))


def forward_gflop(problem: Problem) -> float:
    """GFLOP of the FEN on one image, by its shapes."""
    image = jax.ShapeDtypeStruct((1, *problem.data[0].shape[1:]), jnp.float32)
    return 1e-9 * flops.count(problem.network.encode, problem.state.params, image)


def task_shapes(problem: Problem) -> tuple[Batch, Batch]:
    """Shapes of the tasks of the largest bucket."""

    def largest(table: TaskTable) -> Task:
        keys = jax.random.split(jax.random.key(0))
        drawn = problem.sampler.draw(keys[0], keys[1], table, jnp.ones(table.size.shape))
        return problem.sampler.trims[-1](drawn.tasks)

    task = jax.eval_shape(largest, problem.data[1])
    return task.support, task.query


def drawn_task(problem: Problem) -> Task:
    """A task of images, as the step makes it."""
    images, table, weights, key = problem.data
    cluster_key, _, task_key, view_key, _ = meta_train.step_keys(key, jnp.int32(0))
    drawn = problem.sampler.draw(cluster_key, task_key, table, weights)
    task = meta_train.gather_images(images, problem.sampler.trims[-1](drawn.tasks))
    return problem.sampler.prepare(view_key, task)


def gradient_case(problem: Problem) -> Case:
    """Time the meta-gradient alone, of a task that is there."""
    params, task = jax.tree.map(jnp.array, (problem.state.params, drawn_task(problem)))
    compiled = jax.jit(gradient(problem))
    return Case(lambda: compiled(params, task))


def gradient(
    problem: Problem,
    *,
    inner: InnerConfig = InnerConfig(),  # noqa: B008
    learner: Learner | None = None,
    network: Network | None = None,
) -> Callable[[Params, Task], Any]:
    """Build the function from parameters and tasks to the meta-gradient."""
    return functools.partial(
        meta_train.meta_grad,
        network=network or problem.network,
        learner=learner or LEARNERS[problem.learner],
        inner=inner,
        outer=problem.outer,
        ways=1,
    )


def update_case(problem: Problem) -> Case:
    """Time clip and Adam on all parameters."""
    tx = meta_train.outer_optimizer(problem.outer)
    gradient = jax.tree.map(jnp.ones_like, problem.state.params)
    states = [jax.tree.map(jnp.array, problem.state)]
    update = jax.jit(functools.partial(updates.apply_gradients, tx=tx), donate_argnums=0)

    def run() -> Any:
        states.append(update(states.pop(), gradient))
        return states[0].params

    return Case(run)


def sampling_case(problem: Problem) -> Case:
    """Time the drawing of a task and the gathering of its images."""
    draw = jax.jit(lambda data: drawn_task(problem._replace(data=data)))
    return Case(lambda: draw(problem.data))
