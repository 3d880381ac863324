import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meml_jax import best_checkpoint, checkpoints, interrupts
from meml_jax.types import TrainState, UserError

TX = optax.chain(optax.clip(5.0), optax.adam(1e-4))


def make_state(step=0, outputs=7, **extra):
    rng = np.random.default_rng(step)
    params = {
        "fen": {"conv_0": {"kernel": jnp.asarray(rng.normal(size=(3, 3, 1, 8)), jnp.float32)}},
        "cln": {"w": jnp.asarray(rng.normal(size=(8, outputs)), jnp.float32)},
        **extra,
    }
    opt_state = TX.update(jax.tree.map(jnp.ones_like, params), TX.init(params))[1]
    return TrainState(jnp.int32(step), params, opt_state)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array) and a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_round_trip_is_bit_exact_with_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = make_state(3, film=jnp.array([np.nan, -0.0, 1e-45, np.inf], jnp.float32))
    meta = {"config": {"outer": {"lr": 1e-4}}, "seed": 0}
    with checkpoints.open_checkpoints("run/checkpoints") as manager:
        checkpoints.save(manager, state, meta)
    with checkpoints.open_checkpoints("run/checkpoints", read_only=True) as manager:
        assert checkpoints.latest_step(manager) == 3
        template = jax.eval_shape(lambda: state)
        got, got_meta = checkpoints.restore(manager, template)
    assert_same(got, state)
    assert got_meta == meta
    # a jitted step may donate what was restored
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(got)


def test_keeps_the_latest_two_and_the_best_also_after_reopening(tmp_path):
    metrics = {1: None, 2: 0.5, 3: 0.9, 4: None, 5: 0.6, 6: None, 7: None, 8: 0.2}
    kept = []
    for step, metric in metrics.items():
        with checkpoints.open_checkpoints(tmp_path) as manager:
            checkpoints.save(manager, make_state(step), {}, metric)
            kept.append(tuple(manager.all_steps()))
    assert kept == [(1,), (1, 2), (2, 3), (3, 4), (3, 4, 5), (3, 5, 6), (3, 6, 7), (3, 7, 8)]
    assert sorted(os.listdir(tmp_path)) == ["3", "7", "8"]
    with checkpoints.open_checkpoints(tmp_path) as manager:
        assert best_checkpoint.best_step(manager) == 3
        assert_same(checkpoints.restore(manager, make_state(), "best")[0], make_state(3))
        assert_same(checkpoints.restore(manager, make_state(), "last")[0], make_state(8))


def test_steps_only_go_forward_and_metrics_are_finite(tmp_path):
    with checkpoints.open_checkpoints(tmp_path) as manager:
        checkpoints.save(manager, make_state(5), {"first": True})
        checkpoints.save(manager, make_state(5), {"first": False})
        assert checkpoints.restore(manager, make_state())[1] == {"first": True}
        with pytest.raises(ValueError, match="step 5.*step 4"):
            checkpoints.save(manager, make_state(4), {})
        with pytest.raises(ValueError, match="nan"):
            checkpoints.save(manager, make_state(6), {}, float("nan"))


def test_nothing_to_restore_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="run the train stage"):
        checkpoints.open_checkpoints(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()
    with checkpoints.open_checkpoints(tmp_path / "new") as manager:
        assert checkpoints.latest_step(manager) is None
        assert best_checkpoint.best_step(manager) is None
        with pytest.raises(UserError, match="run the train stage"):
            checkpoints.restore(manager, make_state())
        checkpoints.save(manager, make_state(1), {})
        with pytest.raises(UserError, match="test.checkpoint=last"):
            checkpoints.restore(manager, make_state(), "best")
        with pytest.raises(UserError, match="got 'newest'"):
            checkpoints.restore(manager, make_state(), "newest")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (make_state(outputs=9), r"params/cln/w: got float32\[8, 7\], expected float32\[8, 9\]"),
        (make_state(film=jnp.ones(3)), r"params/film: got nothing, expected float32\[3\]"),
        (
            jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 2 else x, make_state()),
            r"params/fen/conv_0/kernel: got float32\[3, 3, 1, 8\], expected bfloat16",
        ),
    ],
)
def test_mismatch_names_the_parameter(tmp_path, template, message):
    with checkpoints.open_checkpoints(tmp_path) as manager:
        checkpoints.save(manager, make_state(1), {})
        with pytest.raises(UserError, match=message):
            checkpoints.restore(manager, template)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (interrupts.Interrupted(15, "stopped"), "stopped"),
        (MemoryError("too large"), "^too large"),
        (PermissionError("not yours"), "not yours\\); make .* readable"),
        (OSError("stale"), "stale\\); if that comes again, move that step"),
    ],
)
def test_only_a_damaged_file_is_called_damaged(tmp_path, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    with checkpoints.open_checkpoints(tmp_path) as manager:
        checkpoints.save(manager, make_state(1), {})
        monkeypatch.setattr(manager, "restore", fail)
        kind = type(error) if not isinstance(error, OSError) else UserError
        with pytest.raises(kind, match=message):
            checkpoints.restore(manager, make_state())


def test_damaged_metrics_are_a_user_error_that_names_the_folder(tmp_path):
    with checkpoints.open_checkpoints(tmp_path) as manager:
        checkpoints.save(manager, make_state(1), {}, 0.5)
    for damaged in (b"\xff", b"[" * 100_000):
        (tmp_path / "1" / "metrics" / "metrics").write_bytes(damaged)
        with pytest.raises(UserError, match=f"cannot read the checkpoint {tmp_path}"):
            with checkpoints.open_checkpoints(tmp_path) as manager:
                checkpoints.restore(manager, make_state(), "best")


def test_damaged_file_is_a_user_error_that_names_the_folder(tmp_path):
    with checkpoints.open_checkpoints(tmp_path) as manager:
        checkpoints.save(manager, make_state(1), {})
        for path in (tmp_path / "1" / "state" / "d").iterdir():
            path.write_bytes(b"")
        with pytest.raises(UserError, match=str(tmp_path / "1")):
            checkpoints.restore(manager, make_state())


def test_failed_save_leaves_the_previous_and_can_be_repeated(tmp_path, monkeypatch):
    rename = os.rename

    def fail(source, *target, **options):  # where the finished folder gets its name
        if os.path.basename(source).startswith("2."):
            raise OSError("disk full")
        rename(source, *target, **options)

    with checkpoints.open_checkpoints(tmp_path) as manager:
        checkpoints.save(manager, make_state(1), {})
        with pytest.raises(TypeError):
            checkpoints.save(manager, make_state(2), {"not json": object()})
        assert os.listdir(tmp_path) == ["1"]
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            with pytest.raises(UserError, match=r"2 \(OSError: disk full\); the one before it is"):
                checkpoints.save(manager, make_state(2), {})
        assert_same(checkpoints.restore(manager, make_state())[0], make_state(1))
        checkpoints.save(manager, make_state(2), {})
        assert_same(checkpoints.restore(manager, make_state())[0], make_state(2))


def test_the_first_checkpoint_that_cannot_be_saved_has_none_before_it(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    with checkpoints.open_checkpoints(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(manager, "save", fail)
            with pytest.raises(UserError, match="there is none before it: make room .* anew$"):
                checkpoints.save(manager, make_state(1), {})
        checkpoints.save(manager, make_state(1), {})
        assert checkpoints.latest_step(manager) == 1


def test_the_best_is_chosen_among_those_judged_by_the_same_settings(tmp_path):
    easy, hard = {"test.shots": 15}, {"test.shots": 1}
    saved = {1: (easy, 0.8), 2: (easy, 0.9), 3: (hard, 0.5), 4: (hard, 0.3), 5: (hard, None)}
    saved |= {6: (None, 0.4), 7: (hard, None), 8: (hard, None)}
    for step, (judged_by, metric) in saved.items():
        with checkpoints.open_checkpoints(tmp_path) as manager:
            checkpoints.save(manager, make_state(step), {"judged_by": judged_by}, metric)
    with checkpoints.open_checkpoints(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == [2, 3, 6, 7, 8]
        assert best_checkpoint.judged(manager) == {2: (0.9, easy), 3: (0.5, hard), 6: (0.4, None)}
        for judged_by, step in ((easy, 2), (hard, 3), (None, 2), ({"test.shots": 9}, 6)):
            assert best_checkpoint.best_step(manager, judged_by) == step
            state, _ = checkpoints.restore(manager, make_state(), "best", judged_by=judged_by)
            assert int(state.step) == step


def test_the_best_of_other_settings_only_is_the_best_there_is(tmp_path):
    """Whoever asks for it compares its meta, and names both."""
    with checkpoints.open_checkpoints(tmp_path) as manager:
        checkpoints.save(manager, make_state(1), {"judged_by": {"test.shots": 1}}, 0.5)
        assert best_checkpoint.best_step(manager, {"test.shots": 2}) == 1


CHILD = """
import os, sys
import jax.numpy as jnp
from meml_jax import checkpoints
from meml_jax.types import TrainState
directory, stop_at = sys.argv[1], sys.argv[2]

def make(step):
    return TrainState(step=jnp.int32(step), params={"w": jnp.full((64, 64), step)}, opt_state=())

manager = checkpoints.open_checkpoints(directory)
checkpoints.save(manager, make(1), {})
checkpoints.save(manager, make(2), {})
changes = []

def hook(event, arguments):  # every change of the file system made from Python passes here
    if not changes and event != "os.mkdir" or directory not in str(arguments):
        return
    if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"):
        changes.append(event)
        if stop_at == str(len(changes)) or stop_at == event and changes[0] != event:
            os._exit(9)

sys.addaudithook(hook)
checkpoints.save(manager, make(3), {})
"""


@pytest.mark.parametrize("stop_at", ["1", "8", "os.rename", "os.rmdir"])
def test_killed_while_saving_leaves_a_whole_checkpoint(tmp_path, stop_at):
    code = textwrap.dedent(CHILD)
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path), stop_at], timeout=60)
    assert child.returncode == 9
    template = TrainState(
        step=jnp.int32(0), params={"w": jnp.zeros((64, 64), jnp.int32)}, opt_state=()
    )
    names = sorted(os.listdir(tmp_path))
    with checkpoints.open_checkpoints(tmp_path, read_only=True) as manager:
        state, _ = checkpoints.restore(manager, template)
    assert sorted(os.listdir(tmp_path)) == names  # reading cleans nothing
    step = int(state.step)
    assert step == (3 if stop_at == "os.rmdir" else 2)
    assert (np.asarray(state.params["w"]) == step).all()
    with checkpoints.open_checkpoints(tmp_path) as manager:
        assert all(name.isdigit() for name in os.listdir(tmp_path))
        checkpoints.save(manager, TrainState(jnp.int32(4), state.params, ()), {})
        assert checkpoints.latest_step(manager) == 4


def test_says_nothing(tmp_path, capfd, caplog):
    for step in (1, 2, 3, 4):
        with checkpoints.open_checkpoints(tmp_path) as manager:
            checkpoints.save(manager, make_state(step), {}, 0.1 if step == 2 else None)
            checkpoints.restore(manager, make_state())
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
