"""The program with each learner, and with the options that every learner has."""

from __future__ import annotations

import programs
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["oml_single", "meml_mean", "meml_released", "maml", "fomaml", "anil"]
)
def test_runs(tmp_path, name):
    programs.succeed(tmp_path, learner=name, test__num_classes="(2,)", tasks__num_buckets=1)
    results = programs.results(tmp_path)
    assert results["learner"] == name
    heads = [c["head"] for c in (results["meta_test"], *results["comparisons"])]
    assert heads == ["sgd", "prototype", "pixels", "untrained"]


@pytest.mark.slow
def test_first_order_changes_what_is_trained_and_remat_does_not(tmp_path):
    def losses(workdir, **fields):
        programs.succeed(
            workdir, "--stage=train", learner="oml", tasks__num_buckets=1, inner__lr=0.5, **fields
        )
        return [r["train/loss"] for r in programs.records(workdir) if "train/loss" in r]

    plain = losses(tmp_path / "plain")
    assert losses(tmp_path / "remat", inner__remat="true") == pytest.approx(plain, rel=1e-3)
    first = losses(tmp_path / "first", inner__first_order="true")
    assert first != pytest.approx(plain, rel=1e-3)
