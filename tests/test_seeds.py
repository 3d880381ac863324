"""Several seeds of one config: a workdir each, their results together."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import programs
import pytest

from meml_jax import environment, intervals, report, seeds
from meml_jax.config import Config
from meml_jax.results import points_version, product_versions
from meml_jax.settings import override
from meml_jax.types import Dataset, Split

# True classes have the same sizes whatever the seed, so the training is compiled once.
TINY = {
    "train__steps": 4,
    "train__steps_per_call": 4,
    "tasks__labels": "true",
    "test__heads": "('prototype',)",
    "test__num_classes": "(2,)",
}


def point(accuracies, *, rate=0.01, train=0.5):
    return {
        "num_classes": 4, "accuracies": list(accuracies), "learning_rate": rate,
        "train_accuracy": train, "iid_accuracy": None,
    }  # fmt: skip


def test_statistics_are_by_hand():
    accuracies = np.array([[0.5, 0.7, 0.6], [0.8, 0.8, 0.8], [0.4, 0.5, 0.3]])
    rates = (0.1, 0.1, 0.01)
    found = intervals.combine_points(
        [point(a, rate=r, train=t) for a, r, t in zip(accuracies, rates, (1, 0, 0.5), strict=True)]
    )
    means = np.array([0.6, 0.8, 0.4])
    std = np.sqrt(((means - 0.6) ** 2).sum() / 2)  # 0.2
    assert found["accuracy"] == pytest.approx(0.6) and found["std"] == pytest.approx(std)
    quantile = 4.302652729749464  # of Student's t with 2 degrees of freedom, from a table
    assert found["ci95"] == pytest.approx(quantile * std / np.sqrt(3))
    np.testing.assert_allclose(found["seed_accuracies"], means)
    assert found["accuracies"] == accuracies.ravel().tolist() and found["runs"] == 9
    variances = np.array([0.01, 0.0, 0.01])
    within = found["within_seeds"]
    assert within["std"] == pytest.approx(np.sqrt(variances.mean()))
    # Student's t with 6 degrees of freedom, from a table.
    expected = 2.446911851 * np.sqrt((variances / 3).sum()) / 3
    assert within["ci95"] == pytest.approx(expected) and expected < found["ci95"]
    assert found["chance"] == 0.25 and found["train_accuracy"] == 0.5
    assert found["learning_rate"] is None and found["learning_rates"] == list(rates)
    assert found["iid_accuracy"] is None and "shots" not in found


def test_seeds_without_differences_have_an_interval_of_zero_and_their_order_does_not_count():
    same = [point([0.5, 0.7])] * 4
    assert intervals.combine_points(same)["ci95"] == 0.0
    assert intervals.combine_points(same)["learning_rate"] == 0.01
    parts = [point([0.5, 0.7]), point([0.2, 0.3]), point([0.9, 0.8])]
    one, other = intervals.combine_points(parts), intervals.combine_points(parts[::-1])
    assert one["accuracy"] == pytest.approx(other["accuracy"])
    assert one["ci95"] == pytest.approx(other["ci95"])


def test_the_interval_covers_what_a_new_seed_adds():
    """Seeds that differ: the interval over seeds holds the true mean, that over runs does not."""
    rng = np.random.default_rng(0)
    covered = np.zeros(2)
    for _ in range(400):
        level = 0.5 + 0.1 * rng.normal(size=(5, 1))
        found = intervals.combine_points(
            [point(a) for a in level + 0.05 * rng.normal(size=(5, 20))]
        )
        half = np.array([found["ci95"], found["within_seeds"]["ci95"]])
        covered += np.abs(found["accuracy"] - 0.5) < half
    assert 0.92 < covered[0] / 400 < 0.98 and covered[1] / 400 < 0.5


def test_results_name_every_commit_and_device_that_made_them():
    assert environment.each_once(["a", "a"]) == "a"
    assert environment.each_once(["a", "b; a", None]) == "a; b; not known"
    each = [
        {"seed": seed, "commit": commit, "device": "cpu", "clustering": {}, "meta_train": {}}
        | {"meta_test": {"points": [point([0.5, 0.7])]}, "comparisons": []}
        for seed, commit in enumerate(("a", "b"))
    ]
    found = seeds.combine(each, override(Config(), {"seeds": 2}))
    assert (found["commit"], found["device"]) == ("a; b", "cpu")


def test_one_seed_is_the_workdir_itself(tmp_path):
    config = override(Config(), {"seed": 7})
    assert seeds.runs(config, tmp_path) == [(config, tmp_path)]
    several = seeds.runs(override(config, {"seeds": 2}), tmp_path)
    assert several == [
        (config, tmp_path / "seed7"), (override(config, {"seed": 8}), tmp_path / "seed8"),
    ]  # fmt: skip


def test_results_of_another_version_are_not_finished(tmp_path):
    config = override(Config(), {"embedding.name": "acai"})
    part = Split(np.zeros((2, 6, 6, 1), np.uint8), np.zeros(2, np.int32), np.arange(2), ("a",))
    data = Dataset("mine", part, part, part, "hash")
    found = {
        "config": dataclasses.asdict(config), "points_version": points_version(config),
        "content_hash": "hash", "test_hash": None,
    }  # fmt: skip

    def is_finished(**fields):
        (tmp_path / "results.json").write_text(json.dumps(found | fields))
        return seeds.finished(config, data, tmp_path, files=("results.json",)) is not None

    assert is_finished() and is_finished(product_versions=product_versions(config))
    assert not is_finished(product_versions={"embedding": 1})
    assert not is_finished(points_version=-1) and not is_finished(content_hash="other")
    # A field that an earlier version did not have is at its default; one of a later is unknown.
    stored = found["config"]
    earlier = {k: v for k, v in stored["tasks"].items() if k != "rotations"}
    assert is_finished(config=stored | {"tasks": earlier})
    assert not is_finished(config=stored | {"tasks": earlier | {"rotations": True}})
    assert not is_finished(config=stored | {"tasks": earlier | {"unknown": 1}})


@pytest.mark.slow
def test_two_seeds_are_two_runs_and_a_finished_one_is_skipped(tmp_path):
    run = functools.partial(programs.run_here, seed=3, seeds=2, **TINY)
    lines = programs.succeed(tmp_path, call=run)
    assert f"seed 4: in {tmp_path / 'seed4'}" in lines
    assert lines[-1] == f"report on 2 seeds: {tmp_path / 'report.md'}"
    found = programs.results(tmp_path)
    each = [programs.results(tmp_path / f"seed{seed}") for seed in (3, 4)]
    assert found["seeds"] == [3, 4] and found["config"]["seeds"] == 2
    assert each[0]["config"] | {"seed": 4} == each[1]["config"]
    assert each[0]["meta_test"]["points"] != each[1]["meta_test"]["points"]
    for i, curve in enumerate([found["meta_test"], *found["comparisons"]]):
        parts = [([one["meta_test"], *one["comparisons"]])[i] for one in each]
        points = [[p["accuracy"] for p in part["points"]] for part in parts]
        got = [p["accuracy"] for p in curve["points"]]
        np.testing.assert_allclose(got, np.mean(points, axis=0))
        assert curve["head"] == parts[0]["head"]
    assert [one["clustering"] for one in found["each"]] == [one["clustering"] for one in each]
    text = (tmp_path / "report.md").read_text()
    assert text == report.render(found, figures=["figures/accuracy.png"])
    assert "- seed: 3, 4" in text and "| seed 3 |" in text and "means over 2 seeds" in text
    assert (tmp_path / "figures" / "accuracy.png").stat().st_size > 10_000

    # Stopped before the second one's report.
    before = programs.times(tmp_path / "seed3")
    (tmp_path / "seed4" / "report.md").unlink()
    lines = programs.succeed(tmp_path, "--stage=report", call=run)
    assert f"seed 3: reuses {tmp_path / 'seed3'}" in lines
    assert any(line.startswith("train: reuses 4 steps") for line in lines)
    assert programs.times(tmp_path / "seed3") == before
    assert programs.results(tmp_path) == found

    # Tested in another way: the results of all seeds follow, their report is of the old ones.
    lines = programs.succeed(tmp_path, "--stage=test", call=run, test__queries=1)
    assert lines[-1] == f"results of 2 seeds: {tmp_path / 'results.json'}"
    assert programs.results(tmp_path)["config"]["test"]["queries"] == 1
    assert not (tmp_path / "report.md").exists()

    before = programs.snapshot(tmp_path)
    error = programs.refuse(tmp_path, call=run, network__hidden=8)
    assert f"{tmp_path / 'seed3'} holds training of another config: network.hidden is 16" in error
    error = programs.refuse(tmp_path, call=run, seeds=1)
    assert "holds a run of each of several seeds (seed3, seed4), but seeds=1" in error
    assert "holds the run of one seed, but" in programs.refuse(tmp_path / "seed4", call=run)
    assert programs.snapshot(tmp_path) == before


@pytest.mark.slow
def test_each_seed_is_the_run_of_that_seed(tmp_path):
    run = functools.partial(programs.run_here, **TINY)
    programs.succeed(tmp_path / "both", call=run, seed=3, seeds=2)
    programs.succeed(tmp_path / "alone", call=run, seed=4)
    found, expected = (
        programs.without_circumstances(programs.results(tmp_path / folder))
        for folder in ("both/seed4", "alone")
    )
    assert found == expected
    lines = programs.succeed(tmp_path / "both", call=run, seed=2, seeds=3)  # more of them
    assert [line for line in lines if line.startswith("seed ") and "reuses" in line] == [
        f"seed {seed}: reuses {tmp_path / 'both' / f'seed{seed}'}" for seed in (3, 4)
    ]
    assert programs.results(tmp_path / "both")["seeds"] == [2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 0}, "seeds=0, expected at least 1"),
        ({"seeds": "two"}, "seeds=two"),
        ({"seed": 2**32 - 1, "seeds": 2}, f"expected a sum up to {2**32}"),
    ],
)
def test_numbers_of_seeds_that_cannot_be(tmp_path, fields, message):
    assert message in programs.refuse(tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()


def test_a_report_of_episodes_over_seeds():
    points = [
        [point(a) | {"shots": 5, "ci95": 0.1} for a in ([0.5, 0.6], [0.7, 0.7])],
    ]
    found = {
        "seeds": [0, 1], "dataset": "glyphs", "learner": "maml", "config": {
            "episodes": {"ways": 4, "shots": 1}
        },
        "meta_test": {
            "protocol": "few_shot", "head": "adapted",
            "points": [intervals.combine_points(points[0])],
        },
    }  # fmt: skip
    text = report.render(json.loads(json.dumps(found)))
    assert "| ways,shots | 4,5 |" in text and "| seed 1 | 70.0 |" in text
