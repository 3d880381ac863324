"""The training loop: a state is a function of settings and step, whatever stops lie between."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest

from meml_jax import best_checkpoint, checkpoints, interrupts, training
from meml_jax.config import TrainConfig
from meml_jax.types import TrainState, UserError

# No interval divides another one, nor the number of steps.
CONFIG = TrainConfig(steps=23, steps_per_call=4, log_every=5, checkpoint_every=7, validate_every=9)
SAVED = (7, 9, 14, 18, 21, 23)  # multiples of 7 and 9, and the end
TX = optax.adam(0.1)


def fresh_state():
    params = {"fen": jnp.arange(3.0), "cln": jnp.ones((2, 2))}
    return TrainState(jnp.zeros((), jnp.int32), params, TX.init(params))


def train_call(state, num_steps, seed, bad_step, spread):
    """A random walk by Adam; the loss of step `bad_step` is NaN."""

    def body(i, carry):
        state, history = carry
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        grads = jax.tree.map(lambda x: jax.random.normal(key, x.shape), state.params)
        updates, opt_state = TX.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        loss = jnp.where(state.step + 1 == bad_step, jnp.nan, jnp.sum(params["fen"] ** 2))
        row = {"loss": loss, "active": params["fen"][0], "logit_spread": spread}
        history = jax.tree.map(lambda h, x: h.at[i].set(x), history, row)
        return TrainState(state.step + 1, params, opt_state), history

    history = {name: jnp.zeros(4) for name in ("loss", "active", "logit_spread")}
    return jax.lax.fori_loop(0, num_steps, body, (state, history))


def validate(state):
    """Highest at step 9, which must survive as the best one."""
    return 1.0 if int(state.step) == 9 else float(jax.nn.sigmoid(state.params["fen"][1])) / 2


def train(
    workdir,
    *,
    config=CONFIG,
    stop=None,
    bad_step=-1,
    spread=1.0,
    lines=None,
    call=None,
    validate=validate,
    judged_by=None,
    **fields,
):
    """Train; `stop` is called with the first step of each compiled call."""
    config = TrainConfig(**(vars(config) | fields))
    data = (jnp.int32(0), jnp.int32(bad_step), jnp.float32(spread))

    def data_of(step):
        if stop is not None:
            stop(step)
        return data

    return training.train(
        call or train_call,
        fresh_state,
        data_of,
        config,
        workdir=workdir,
        fingerprint="settings",
        validate=validate,
        report=(lambda line: None) if lines is None else lines.append,
        judged_by=judged_by,
    )


def stored(workdir, which="last"):
    """(state, meta without clocks, step of the best checkpoint, records)."""
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, meta = checkpoints.restore(manager, jax.eval_shape(fresh_state), which)
        best = best_checkpoint.best_step(manager)
    return state, programs.without_circumstances(meta), best, programs.records(workdir)


def assert_same_run(workdir, other):
    state, *rest = stored(workdir)
    expected, *others = stored(other)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert rest == others


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a stop."""
    workdir = tmp_path_factory.mktemp("whole")
    summary = train(workdir)
    assert summary["steps"] == 23 and summary["steps_per_second"] == 23 / summary["seconds"]
    assert summary["compile_seconds"] > 0 and summary["peak_bytes"] > 0
    return workdir


def test_what_a_run_stores(whole):
    state, meta, best, records = stored(whole)
    assert int(state.step) == 23 and best == 9 and meta["pending"] == {}
    logged = [r["step"] for r in records if "train/loss" in r]
    assert logged == [5, 10, 15, 20, 23]
    assert [r["step"] for r in records if "validation/accuracy" in r] == [9, 18, 23]
    # A record is the mean over the steps since the one before.
    losses, fresh = [], fresh_state()
    call = jax.jit(train_call)
    for _ in range(5):
        fresh, history = call(fresh, jnp.int32(1), jnp.int32(0), jnp.int32(-1), jnp.float32(1))
        losses.append(float(history["loss"][0]))
    assert records[0]["train/loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_the_steps_of_a_call_do_not_count(tmp_path, whole, steps_per_call):
    train(tmp_path, steps_per_call=steps_per_call)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize(
    ("signum", "stops"),
    [
        (signal.SIGTERM, (5,)),
        (signal.SIGINT, (5,)),
        (signal.SIGINT, (0, 7)),
        (signal.SIGTERM, (4, 9, 14, 20)),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, whole, signum, stops):
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    for at in stops:
        shown = []

        def stop(step, at=at, shown=shown):
            if shown and step >= at:  # the first time is to compile, before signals are collected
                os.kill(os.getpid(), signum)
            shown.append(step)

        with pytest.raises(interrupts.Interrupted, match=r"saved at step \d+ of 23") as info:
            train(tmp_path, stop=stop)
        assert info.value.signum == signum
        assert at < int(stored(tmp_path)[0].step) <= at + 4
    lines = []
    train(tmp_path, lines=lines)
    assert any("goes on from step" in line for line in lines)
    assert_same_run(tmp_path, whole)
    assert before == [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("at", [4, 10, 15, 20])
def test_a_crash_loses_the_steps_since_the_last_checkpoint_only(tmp_path, whole, at):
    def stop(step):
        if step == at:
            raise MemoryError("crash")

    with pytest.raises(MemoryError, match="crash"):
        train(tmp_path, stop=stop)
    lines, first = [], []
    train(tmp_path, lines=lines, stop=first.append)
    last = max((s for s in SAVED if s <= at), default=0)
    assert first[0] == last
    said = [f"train: goes on from step {last}"] if last else []
    assert lines[: len(said) + 1] == [*said, "train: compiles"]
    assert_same_run(tmp_path, whole)


def test_a_finished_training_is_reused_as_it_is(tmp_path):
    lines = []
    summary = train(tmp_path, steps=5, lines=lines)
    assert lines[-1].startswith("train: 5 steps in ") and lines[-1].endswith(" steps/s")
    before = programs.times(tmp_path)
    lines.clear()
    assert train(tmp_path, steps=5, lines=lines) == summary
    assert lines == [f"train: reuses 5 steps of {tmp_path / 'checkpoints'}"]
    assert programs.times(tmp_path) == before


def test_more_steps_go_on(tmp_path, whole):
    train(tmp_path, steps=11)
    train(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, stored(tmp_path)[0], stored(whole)[0])
    extra = [r for r in programs.records(tmp_path) if r["step"] == 11]
    assert len(extra) == 1  # the end of the first training was logged and validated


def test_accuracies_judged_by_other_settings_are_not_compared(tmp_path):
    """They are left out, which is said first; the best before and the best after both stay."""
    settings = {"test.shots": 1, "test.queries": 1}, {"test.shots": 15, "test.queries": 1}
    accuracy = {9: 0.9, 18: 0.8, 27: 0.5, 36: 0.4}

    def judge(state):
        return accuracy.get(int(state.step), 0.1)

    def best(judged_by):
        with checkpoints.open_checkpoints(tmp_path / "checkpoints", read_only=True) as manager:
            return best_checkpoint.best_step(manager, judged_by)

    lines = []
    train(tmp_path, steps=18, validate=judge, judged_by=settings[0], lines=lines)
    train(tmp_path, steps=18, validate=judge, judged_by=settings[1], lines=lines)
    assert not any("leaves it out" in line for line in lines)  # there is no other to choose
    lines.clear()
    train(tmp_path, steps=50, validate=judge, judged_by=settings[1], lines=lines)
    told = [
        f"train: step {step} was judged with test.shots=1, now test.shots=15; "
        "test.checkpoint=best leaves it out"
        for step in (9, 18)
    ]
    assert lines[:3] == [*told, "train: goes on from step 18"]
    assert (best(settings[0]), best(settings[1])) == (9, 27)
    lines.clear()
    train(tmp_path, steps=50, validate=judge, judged_by=settings[0], lines=lines)
    assert [" ".join(line.split()[1:4]) for line in lines] == [
        "step 27 was", "step 50 was", "reuses 50 steps",
    ]  # fmt: skip


def test_fewer_steps_than_trained_are_refused(tmp_path):
    train(tmp_path, steps=11)
    before = programs.snapshot(tmp_path)
    with pytest.raises(UserError, match="train.steps=4, .* trained for 11 steps; use"):
        train(tmp_path, steps=4)
    assert programs.snapshot(tmp_path) == before


def test_checkpoints_of_other_settings_are_refused(tmp_path):
    train(tmp_path, steps=3)
    with pytest.raises(UserError, match="checkpoints belongs to other settings"):
        training.train(
            train_call,
            fresh_state,
            (),
            CONFIG,
            workdir=tmp_path,
            fingerprint="others",
            validate=None,
            report=print,
        )


@pytest.mark.parametrize(
    "field", ["steps", "steps_per_call", "log_every", "checkpoint_every", "validate_every"]
)
def test_intervals_are_at_least_one(tmp_path, field):
    with pytest.raises(UserError, match=f"train.{field}=0, expected at least 1"):
        train(tmp_path, **{field: 0})


@pytest.mark.parametrize("bad_step", [1, 7, 12, 23])
def test_a_loss_that_is_not_finite_stops(tmp_path, bad_step):
    for _ in range(2):  # the same command meets it again, the checkpoint before is left
        with pytest.raises(UserError, match=f"loss is nan at step {bad_step}; lower outer.lr or"):
            train(tmp_path, bad_step=bad_step)
        latest = max((s for s in SAVED if s < bad_step), default=None)
        with checkpoints.open_checkpoints(tmp_path / "checkpoints") as manager:
            assert checkpoints.latest_step(manager) == latest


@pytest.mark.parametrize("bad_step", [7, 23])
def test_parameters_that_are_not_finite_reach_no_checkpoint(tmp_path, bad_step):
    """Of the last step before a checkpoint: no later loss tells of them."""

    def spoils(state, *rest):
        state, history = train_call(state, *rest)
        bad = state.step == bad_step
        params = state.params | {"cln": jnp.where(bad, jnp.inf, state.params["cln"])}
        return TrainState(state.step, params, state.opt_state), history

    with pytest.raises(UserError, match=rf"parameters cln are not finite after step {bad_step};"):
        train(tmp_path, call=spoils)
    saved = [s for s in SAVED if s < bad_step]
    if saved:
        assert int(stored(tmp_path)[0].step) == saved[-1]
    else:
        assert not any((tmp_path / "checkpoints").iterdir())


def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch):
    class Full:
        name = str(tmp_path / "metrics.jsonl")

        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    writer = training.MetricWriter(tmp_path, 3, tensorboard=False)
    writer._file.close()
    writer._file = Full()
    with pytest.raises(UserError, match=r"metrics.jsonl \(No space left on device\); make room"):
        with writer:
            writer.write(1, {"train/loss": 1.0})


def test_a_dead_representation_stops(tmp_path):
    with pytest.raises(UserError, match="dead at step 5: for 5 steps the logits .*outer.lr"):
        train(tmp_path, spread=1e-9)
    assert programs.records(tmp_path) == []


def test_steps_of_which_nothing_can_be_told_do_not_make_it_dead(tmp_path):
    """As where the query is a single row: the spread is inf, and not recorded."""
    assert train(tmp_path, spread=np.inf)["steps"] == 23
    records = [record for record in programs.records(tmp_path) if "train/loss" in record]
    assert records and not any("train/logit_spread" in record for record in records)


def test_without_validation_nothing_is_best(tmp_path):
    data = (jnp.int32(0), jnp.int32(-1), jnp.float32(1))
    training.train(
        train_call,
        fresh_state,
        data,
        CONFIG,
        workdir=tmp_path,
        fingerprint="settings",
        validate=None,
        report=lambda line: None,
    )
    _, _, best, records = stored(tmp_path)
    assert best is None and not any("validation/accuracy" in r for r in records)
    with pytest.raises(UserError, match="none is the best; set test.checkpoint=last"):
        stored(tmp_path, "best")


# The program.

LONG = {
    "train__steps": 61,
    "train__steps_per_call": 3,
    "train__log_every": 5,
    "train__checkpoint_every": 7,
    "train__validate_every": 13,
}


@pytest.mark.slow
def test_signals_to_the_program(tmp_path):
    """SIGTERM, SIGINT and the same command: parameters and records as without a stop."""
    whole = programs.finished("long", programs.run, **LONG, **{"test__num_classes": "(2,)"})
    workdir = tmp_path / "run"

    def last_step():
        return max((r["step"] for r in programs.records(workdir)), default=0)

    for signum, step in ((signal.SIGTERM, 10), (signal.SIGINT, 25)):
        process = programs.start(workdir, "--stage=train", **LONG)
        programs.wait(lambda step=step: last_step() >= step, process)
        process.send_signal(signum)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 128 + signum, out + err
        line = out.splitlines()[-1]
        assert line.startswith("stopped and saved at step ") and line.endswith(
            " of 61; the same command goes on"
        )
        assert "Traceback" not in err
    lines = programs.succeed(workdir, "--stage=train", **LONG)
    assert any(line.startswith("train: goes on from step ") for line in lines)
    assert programs.records(workdir) == programs.records(whole)
    states = []
    for folder in (workdir, whole):
        import orbax.checkpoint as ocp

        with checkpoints.open_checkpoints(folder / "checkpoints", read_only=True) as manager:
            assert checkpoints.latest_step(manager) == 61
            items = ocp.args.Composite(state=ocp.args.StandardRestore())
            states.append(manager.restore(61, args=items).state)
    jax.tree.map(np.testing.assert_array_equal, *states)
