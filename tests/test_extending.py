"""The code of docs/extending.md does what the page says."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import tiny
from own_tables import results

from meml_jax import inner, meta_train, seeds, stored_results
from meml_jax.config import Config, InnerConfig, OuterConfig
from meml_jax.continual import ContinualClassifier
from meml_jax.learners import LEARNERS, identity
from meml_jax.results import product_versions
from meml_jax.settings import override
from meml_jax.types import Dataset, Split, UserError

PAGE = (programs.ROOT / "docs" / "extending.md").read_text()
ONE_LINE, FILE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def learners(monkeypatch, tmp_path):
    """Add the rows of the page to the table for one test."""
    for name in list(LEARNERS):
        monkeypatch.setitem(LEARNERS, name, LEARNERS[name])
    before = dict(LEARNERS)
    path = tmp_path / "learned_rate.py"
    path.write_text(FILE)
    exec(ONE_LINE, {})
    spec = importlib.util.spec_from_file_location("learned_rate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in set(LEARNERS) - set(before):
        del LEARNERS[name]


def test_the_example_is_short_and_names_the_fields():
    assert len(FILE.strip().splitlines()) < 50
    fields = {"fast", "phases", "resets_class_row", "first_order", "extra_roles", "optimizer"}
    assert {f.name for f in LEARNERS["meml"].__dataclass_fields__.values()} == fields
    assert all(f"`{name}`" in PAGE for name in fields)


def test_learned_rates(learners, x64):
    net = tiny.network("meml_learned_rate", dtype=jnp.float64)
    params = tiny.parameters(net, dtype=np.float64)
    tasks = tiny.tasks(3, dtype=np.float64)
    start = params | {"log_rate": jax.tree.map(jnp.zeros_like, params["log_rate"])}

    def loss_and_grad(name):
        loss = functools.partial(
            meta_train.meta_loss, network=net, learner=LEARNERS[name], inner=InnerConfig(lr=0.5),
            outer=OuterConfig(), ways=1,
        )  # fmt: skip
        return jax.jit(jax.value_and_grad(lambda p: loss(p, tasks)[0]))

    learned, plain = loss_and_grad("meml_learned_rate"), loss_and_grad("meml")
    value, grads = learned(start)
    expected, expected_grads = plain(start)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for role in ("fen", "cln"):
        tiny.assert_close(grads[role], expected_grads[role], 1e-9)
    assert not any(np.any(g) for g in jax.tree.leaves(expected_grads["log_rate"]))

    value, grads = learned(params)  # away from the start
    flat, structure = jax.tree.flatten(params["log_rate"])
    for i, found in enumerate(jax.tree.leaves(grads["log_rate"])):
        ends = []
        for step in (1e-6, -1e-6):
            moved = [x + step * (i == j) for j, x in enumerate(flat)]
            ends.append(learned(params | {"log_rate": jax.tree.unflatten(structure, moved)})[0])
        np.testing.assert_allclose(found, (ends[0] - ends[1]) / 2e-6, rtol=1e-4, atol=1e-9)


def test_the_one_line_method_adapts_every_role(learners):
    learner = LEARNERS["meml_all"]
    net = tiny.network(learner)
    params = tiny.parameters(net)
    run = functools.partial(inner.adapt, network=net, learner=learner, tx=optax.sgd(0.3), ways=1)
    adapted, _ = jax.jit(run)(params, tiny.first(tiny.tasks()).support)
    for role in ("fen", "cln", "attention"):
        kernels = zip(jax.tree.leaves(adapted[role]), jax.tree.leaves(params[role]), strict=True)
        assert any(np.any(a != b) for a, b in kernels), role


def test_a_row_that_says_something_else_is_another_training(learners):
    names = ("meml", "meml_all", "meml_learned_rate")
    before = [identity(name) for name in names]
    assert before[0] == "meml"  # what comes with the package is known by its name
    LEARNERS["meml_all"] = dataclasses.replace(LEARNERS["meml_all"], resets_class_row=False)
    assert [identity(name) == old for name, old in zip(names, before, strict=True)] == [
        True, False, True,
    ]  # fmt: skip
    LEARNERS["meml_learned_rate"] = dataclasses.replace(
        LEARNERS["meml_learned_rate"], optimizer=lambda lr, params: optax.adam(lr)
    )
    assert identity("meml_learned_rate") != before[2]

    def told(momentum, rate=0.1):
        def optimizer(lr, params):
            return optax.sgd(lr, momentum)

        for row in (optimizer, functools.partial(optax.sgd, momentum=rate)):
            LEARNERS["meml_all"] = dataclasses.replace(LEARNERS["meml_all"], optimizer=row)
            yield identity("meml_all")

    # What a closure or a partial holds is part of it.
    first, *others = (list(told(*values)) for values in ((0.1,), (0.2,), (0.1, 0.2)))
    assert [[a == b for a, b in zip(first, one, strict=True)] for one in others] == [
        [False, True], [True, False],
    ]  # fmt: skip
    assert first == list(told(0.1))


def test_results_of_a_row_that_says_something_else_are_not_finished(learners, tmp_path):
    config = override(Config(), {"learner": "meml_all", "tasks.labels": "true"})
    part = Split(np.zeros((2, 6, 6, 1), np.uint8), np.zeros(2, np.int32), np.arange(2), ("a",))
    data = Dataset("mine", part, part, part, "hash")
    images = {"content_hash": "hash", "test_hash": None}
    found = results(config, sgd=(0.5, 0.6), product_versions=product_versions(config)) | images
    (tmp_path / "report.md").touch()

    def finished(**fields):
        (tmp_path / "results.json").write_text(json.dumps(found | fields))
        one = seeds.finished(config, data, tmp_path, files=()) is not None
        assert stored_results.finished(config, tmp_path) == one
        return one

    assert found["product_versions"].keys() == {"learner"}
    assert finished() and not finished(product_versions={})
    row = LEARNERS["meml_all"]
    LEARNERS["meml_all"] = dataclasses.replace(row, resets_class_row=False)
    assert not finished()
    del found["product_versions"]  # as before there were any
    assert not finished()
    found["product_versions"] = product_versions(config)
    assert finished()
    del LEARNERS["meml_all"]  # where results are read, the row need not be
    assert finished() and product_versions(config) == {}
    assert product_versions(override(config, {"learner": "meml"})) == {}  # ours


@pytest.mark.slow
def test_the_program_trains_the_example(tmp_path, learners):
    path = tmp_path / "learned_rate.py"
    workdir = tmp_path / "run"
    settings = {
        "train__steps": 20, "train__steps_per_call": 10, "data__num_classes": 60,
        "test__num_classes": "(2,)", "test__trajectories": 1, "tasks__num_buckets": 1,
    }  # fmt: skip
    programs.succeed(workdir, config=str(path), **settings)
    assert programs.results(workdir)["learner"] == "meml_learned_rate"
    assert "log_rate" in ContinualClassifier.load(workdir).params
    del LEARNERS["meml_learned_rate"]
    with pytest.raises(UserError, match="which LEARNERS does not have; import the"):
        ContinualClassifier.load(workdir)
