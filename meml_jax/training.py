"""The training loop, of meta-training and of embeddings: what touches disk, clock and signals."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meml_jax import best_checkpoint, checkpoints, devices, environment
from meml_jax.config import TrainConfig
from meml_jax.interrupts import Interrupted, collect
from meml_jax.metrics import MetricWriter
from meml_jax.types import Array, TrainState, UserError

DEAD_SPREAD = 1e-6  # logits that differ less than this between images no longer depend on the image


class Wording(NamedTuple):
    """How the loop speaks of what it trains.

    Attributes:
      stage: begins the lines that are printed.
      settings: group of the config that holds its steps.
      label: of the progress on the console.
      loss: name of the loss.
      cure: what to do about a loss that is not finite.
    """

    stage: str = "train"
    settings: str = "train"
    label: str = "meta-train"
    loss: str = "meta-loss"
    cure: str = "lower outer.lr or inner.lr"


META_TRAIN = Wording()


def check(config: TrainConfig, wording: Wording = META_TRAIN) -> None:
    """Raise UserError for numbers of steps under 1."""
    for field in ("steps", "steps_per_call", "log_every", "checkpoint_every", "validate_every"):
        if getattr(config, field) < 1:
            raise UserError(
                f"{wording.settings}.{field}={getattr(config, field)}, expected at least 1"
            )


def train(
    train_call: Callable[..., tuple[TrainState, dict[str, Array]]],
    fresh_state: Callable[[], TrainState],
    data: tuple[Any, ...] | Callable[[int], tuple[Any, ...]],
    config: TrainConfig,
    *,
    workdir: Path,
    fingerprint: str,
    validate: Callable[[TrainState], float] | None,
    report: Callable[[str], None],
    judged_by: Mapping[str, Any] | None = None,
    wording: Wording = META_TRAIN,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Train up to `config.steps`, going on from the last checkpoint in `workdir`, if any.

    The state after step s is a function of the settings and s, whatever stops lie between. The
    metrics of steps since the last record are kept in the checkpoint, so records too are the same.

    Args:
      train_call: (state, num_steps, *data) -> (state, history), history a dict of metrics
        [steps_per_call] with `loss` among them, e.g. from `meta_train.make_train_call`.
      fresh_state: makes the state at step 0.
      data: further arguments of `train_call`; or a function from the first step of a call to them.
      config: how long, how often.
      workdir: gets `checkpoints/`, `metrics.jsonl`, `tensorboard/`.
      fingerprint: of the settings and inputs; a checkpoint of another one is refused.
      validate: accuracy on validation classes, for the best checkpoint; None: not done.
      report: prints a line.
      judged_by: JSON-able settings that `validate` follows, kept with each checkpoint; those of
        others are not compared with it, which is reported. None: none.
      wording: how the lines name what is trained.
      mesh: devices that `train_call` runs on together, with state and data on each; where it spans
        processes, all of them call this, and process 0 writes. None: one device.

    Returns:
      {'steps', 'seconds', 'compile_seconds', 'steps_per_second', 'peak_bytes', 'commit', 'device'}
      of the whole training, earlier processes included; `seconds` counts steps, validation and
      checkpoints. `compile_seconds`, and `peak_bytes` of the compiled call, are those of the last
      process that trained.

    Raises:
      UserError: checkpoints of other settings; a loss or parameters that are not finite; a dead
        representation; a full disk.
      Interrupted: SIGINT or SIGTERM, after the state was saved.
    """
    check(config, wording)
    several = mesh is not None and mesh.is_multi_process
    writes = not several or devices.process() == 0
    open_folder = checkpoints.open_checkpoints
    if several:  # the first makes the folder, and tidies it
        open_folder = devices.first_alone(open_folder)
    with open_folder(workdir / "checkpoints", read_only=not writes) as manager:
        if checkpoints.latest_step(manager) is None:
            state: TrainState = fresh_state()
            meta: dict[str, Any] = {"seconds": 0.0, "pending": {}}
        else:
            state, meta = checkpoints.restore(manager, jax.eval_shape(fresh_state))
            if meta["fingerprint"] != fingerprint:
                raise UserError(
                    f"{workdir / 'checkpoints'} belongs to other settings or other images, or to "
                    "other code of an own learner or embedding; use another --workdir, or delete "
                    "the folder to train anew"
                )
        step = int(state.step)
        if step > config.steps:
            raise UserError(
                f"{wording.settings}.steps={config.steps}, but {workdir} has been trained for "
                f"{step} steps; use {wording.settings}.steps={step} or another --workdir"
            )
        for line in _left_out(best_checkpoint.judged(manager), judged_by, more=step < config.steps):
            report(f"{wording.stage}: {line}")
        if step == config.steps:
            report(f"{wording.stage}: reuses {step} steps of {workdir / 'checkpoints'}")
            return _summary(step, meta)
        if step:
            report(f"{wording.stage}: goes on from step {step}")
        report(f"{wording.stage}: compiles")
        state = devices.replicate(state, mesh)
        if callable(data):
            data_of = lambda step: devices.replicate(data(step), mesh)  # noqa: E731
        else:
            placed = devices.replicate(data, mesh)
            data_of = lambda step: placed  # noqa: E731
        call, compiled = _compile(train_call, state, data_of(step), mesh)
        seconds, pending = meta["seconds"], meta["pending"]
        made = {"commit": environment.commit(), "device": environment.device_name()}
        if step:
            made = {name: environment.each_once([meta.get(name), made[name]]) for name in made}
        started = time.monotonic()

        def save(metric: float | None) -> dict[str, Any]:
            elapsed = seconds + time.monotonic() - started
            record = {
                "fingerprint": fingerprint,
                "judged_by": judged_by,
                "pending": pending,
                "seconds": elapsed,
                **compiled,
                **made,
            }
            if writes:
                checkpoints.save(manager, state, record, metric)
            return record

        with contextlib.ExitStack() as stack:
            write = _ignore
            if writes:
                writer = MetricWriter(workdir, config.steps, start_step=step, label=wording.label)
                write = stack.enter_context(writer).write
            received = stack.enter_context(collect())
            while step < config.steps:
                num_steps = steps_of_call(step, config)
                asked = devices.replicate(jnp.int32(num_steps), mesh)
                state, history = call(state, asked, *data_of(step))
                history = {k: np.asarray(v)[:num_steps] for k, v in history.items()}
                _check_finite(history["loss"], step, wording)
                step += num_steps
                for name, values in history.items():  # inf: the step had nothing to tell
                    spoken = (float(value) for value in values if not np.isposinf(value))
                    pending.setdefault(name, []).extend(spoken)
                last, metric = step == config.steps, None
                signum = devices.largest(received[0] if received else 0, mesh)
                validates = validate and (step % config.validate_every == 0 or last)
                saves = validates or step % config.checkpoint_every == 0 or last or signum
                if saves:
                    _check_parameters(state, wording)
                if validate and validates:
                    metric = validate(devices.local(state, mesh))
                told = {}
                if step % config.log_every == 0 or last:
                    _check_alive(pending, step)
                    told = {f"train/{name}": np.mean(v) for name, v in pending.items() if v}
                    pending = {}
                if metric is not None:
                    told["validation/accuracy"] = metric
                if told:
                    write(step, told)
                if saves:
                    meta = save(metric)
                if signum:
                    where = f"step {step} of {config.steps}"
                    raise Interrupted(
                        signum, f"stopped and saved at {where}; the same command goes on"
                    )
            # One that came after the last look: later stages must not start.
            if signum := devices.largest(received[0] if received else 0, mesh):
                raise Interrupted(signum, "stopped and saved; the same command goes on")
    summary = _summary(step, meta)
    speed = f"{summary['steps_per_second']:.1f} steps/s"
    report(f"{wording.stage}: {step} steps in {summary['seconds']:.0f} s, {speed}")
    return summary


def _summary(step: int, meta: dict[str, Any]) -> dict[str, Any]:
    names = ("seconds", "compile_seconds", "peak_bytes", "commit", "device")
    summary = {"steps": step} | {name: meta.get(name) for name in names}
    return summary | {"steps_per_second": step / meta["seconds"]}


def _left_out(
    judged: Mapping[int, tuple[float, Any]], judged_by: Mapping[str, Any] | None, *, more: bool
) -> Iterator[str]:
    """Name the checkpoints whose accuracies are of other settings than those of `judged_by`.

    Says nothing if every checkpoint was judged by other settings and no step is to come (`more`):
    the best one is then looked for among these.
    """
    ours = judged_by or {}
    others = {
        step: by
        for step, (_, by) in judged.items()
        if by is not None and any(by.get(name) != value for name, value in ours.items())
    }
    if judged_by is None or not more and len(others) == len(judged):
        return
    for step, then in others.items():
        differing = [name for name in judged_by if then.get(name) != judged_by[name]]
        was, now = (
            ", ".join(f"{name}={values.get(name)}" for name in differing)
            for values in (then, judged_by)
        )
        yield f"step {step} was judged with {was}, now {now}; test.checkpoint=best leaves it out"


def _ignore(step: int, values: dict[str, Any]) -> None:
    """Leave the record to process 0."""


def _compile(train_call, state, data, mesh):
    """Compile ahead of time: (compiled call, seconds and bytes that this takes)."""
    start = time.monotonic()
    asked = devices.replicate(jnp.int32(1), mesh)
    call = jax.jit(train_call, donate_argnums=0).lower(state, asked, *data).compile()
    memory = call.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak -= memory.alias_size_in_bytes  # the donated state is argument and output at once
    return call, {"compile_seconds": time.monotonic() - start, "peak_bytes": int(peak)}


def steps_of_call(step: int, config: TrainConfig) -> int:
    """Number of steps of the call that begins at `step`: up to where something is written."""
    every = (config.log_every, config.checkpoint_every, config.validate_every)
    stop = min(config.steps, *(step - step % n + n for n in every))
    return min(config.steps_per_call, stop - step)


def _check_finite(loss: np.ndarray, step: int, wording: Wording) -> None:
    bad = ~np.isfinite(loss)
    if bad.any():
        raise UserError(
            f"the {wording.loss} is {loss[bad.argmax()]} at step {step + int(bad.argmax()) + 1}; "
            f"{wording.cure} and use another --workdir to start anew: the same command goes on "
            "from the last checkpoint"
        )


def _check_parameters(state: TrainState, wording: Wording) -> None:
    """Keep out of a checkpoint what a gradient has spoilt in its last step, after a finite loss."""
    for name, leaf in checkpoints.named_leaves(state.params).items():
        if not np.isfinite(np.asarray(leaf)).all():
            raise UserError(
                f"the parameters {name} are not finite after step {int(state.step)}; "
                f"{wording.cure} and use another --workdir to start anew: the same command goes on "
                "from the last checkpoint"
            )


def _check_alive(pending: dict[str, list[float]], step: int) -> None:
    spread = pending.get("logit_spread", [])
    if spread and max(spread) < DEAD_SPREAD:
        raise UserError(
            f"the representation is dead at step {step}: for {len(spread)} steps the logits have "
            f"not depended on the image ({np.mean(pending['active']):.0%} of the features active, "
            f"loss {np.mean(pending['loss']):.3f}); lower outer.lr or set network.cln_relu=False, "
            "and use another --workdir"
        )
