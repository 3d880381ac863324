"""Compiled programs that are kept: what is loaded gives what was compiled, bit for bit."""

import functools
from pathlib import Path

import jax
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from meml_jax import compilation_cache, meta_train
from meml_jax.config import InnerConfig, OuterConfig
from meml_jax.learners import LEARNERS


@pytest.fixture
def no_cache():
    """JAX as when a program starts: with optimisation and no cache; later that of the tests."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_disable_most_optimizations",
    )
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_disable_most_optimizations", False)
    jax_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def events():
    """What JAX tells of its cache."""
    told = []

    def listen(event, **details):
        if event.startswith("/jax/compilation_cache/cache_"):
            told.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    yield told
    jax.monitoring.unregister_event_listener(listen)


@pytest.mark.slow
def test_loaded_programs_give_the_same_bit_for_bit(tmp_path, no_cache, events):
    net = tiny.network("meml")
    arguments = tiny.parameters(net), tiny.tasks()
    settings = {"network": net, "learner": LEARNERS["meml"]}
    settings |= {"inner": InnerConfig(), "outer": OuterConfig(), "ways": 1}

    def compile_and_run():
        events.clear()
        program = jax.jit(functools.partial(meta_train.meta_grad, **settings))
        compiled = program.lower(*arguments).compile()
        memory = compiled.memory_analysis()
        return compiled(*arguments), memory.temp_size_in_bytes, list(events)

    plain, memory, told = compile_and_run()
    assert told == []
    compilation_cache.keep_compiled(tmp_path, report=pytest.fail)
    compiled, _, told = compile_and_run()
    assert told == ["cache_misses"]
    loaded, same_memory, told = compile_and_run()
    assert told == ["cache_hits"]
    tiny.assert_same(compiled, plain)
    tiny.assert_same(loaded, plain)
    assert same_memory == memory


def test_where_they_are_kept(tmp_path, no_cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compilation_cache.keep_compiled(Path("mine"), report=pytest.fail)
    kept = jax.config.jax_compilation_cache_dir
    assert kept.startswith(f"{tmp_path / 'mine' / 'compiled'}/")
    compilation_cache.keep_compiled(tmp_path / "other", report=pytest.fail)  # set: left as it is
    assert jax.config.jax_compilation_cache_dir == kept and not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, no_cache):
    (tmp_path / "file").write_text("mine")
    lines = []
    compilation_cache.keep_compiled(tmp_path / "file", report=lines.append)
    assert len(lines) == 1 and f"cannot write {tmp_path / 'file'}/compiled" in lines[0]
    assert jax.config.jax_compilation_cache_dir is None


def test_each_kind_of_cpu_has_its_own_folder(tmp_path):
    def key(flags, clock):
        core = f"model name\t: A CPU\ncpu MHz\t\t: {clock}\nflags\t\t: {flags}\n\n"
        (tmp_path / "cpuinfo").write_text(2 * core)
        return compilation_cache._cpu(tmp_path / "cpuinfo")

    assert key("fpu avx2", 2000) == key("fpu avx2", 3100) != key("fpu avx2 avx512f", 2000)
    assert compilation_cache._cpu(tmp_path / "absent") == compilation_cache._cpu(
        tmp_path / "absent"
    )
