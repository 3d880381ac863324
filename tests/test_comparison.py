"""Lines of a table: ours beside the paper's, intervals, verdicts, which is the best."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from own_tables import NAMES, point, results, settings, table

from meml_jax import (
    cells,
    comparison,
    curves,
    paper,
    stored_results,
    table_sheets,
)
from meml_jax.config import Config
from meml_jax.paper import Published
from meml_jax.settings import override


def test_lines_stand_beside_the_numbers_of_the_paper():
    found, without = {}, set()
    for name in NAMES:
        configs = {row: settings(name, row) for row in table(name).rows}
        for line in comparison.make_lines(table(name), configs, {}):
            found[name, line.title, line.part] = tuple(line.paper.values())
            named = line.paper or name in ("cost", "best") or line.head == "prototype"
            without |= set() if named else {line.title}
    at_train = {f"{m} RS at meta-train {n}" for m in ("OML", "MEML") for n in (200, 500, 1000)}
    assert without == {
        "OML balanced 1100", "OML RS both 200", "OML RS both 1000", "MEML RS both 200",
        "MEML RS both 1000", *at_train,
    }  # fmt: skip
    # Read off the paper's tables by hand.
    for key, numbers in {
        ("omniglot", "OML balancing param", ""): (59.4, 27.2, 24.3, 18.4, 15.5, 11.8),
        ("omniglot", "MEML RS", ""): (81.6, 56.4, 54.0, 44.6, 34.1, 27.4),
        ("mini_imagenet", "MEML 64 RS", ""): (54.0, 39.0, 31.2, 27.3, 16.4),
        ("slimagenet64", "MEML 1600", ""): (27.2, 16.1, 26.4, 4.2, 8.1, 2.3),
        ("released", "MEML trained as released", "Tested as the authors' code"): (
            84.6,
            37.3,
            37.5,
            30.9,
            25.4,
            20.7,
        ),
        ("ood", "MEML", "CUB"): (66.0, 53.3, 28.3, 26.2, 25.6),
        ("ood", "Oracle OML", "CIFAR-100"): (66.0, 45.0, 34.0, 30.0, 29.5),
        ("rehearsal", "OML RS both", ""): (75.9, 56.8, 51.2, 39.7, 30.5, 25.0),
        ("sela", "SeLa: MEML 256", ""): (64.0, 31.0, 17.3, 32.5, 18.3),
        ("film_omniglot", "Oracle OML FiLM", ""): (91.1, 79.5, 80.6, 68.6, 64.0, 52.7),
        ("film_cifar100", "Oracle OML FiLM Omniglot", ""): (50.0, 25.0, 16.7, 31.3, 13.9),
        ("few_shot", "MEML 20,5", "MAML and MEML, from true classes"): (95.0, 99.95, 85.63, 96.25),
    }.items():
        assert found[key] == numbers
    # Each of the paper's rows is a line of some table.
    titles = {title for _, title, _ in found}
    for _, rows in [*paper.PAPER.values(), *paper.FEW_SHOT.values()]:
        assert set(rows) <= titles
    assert paper.COST["omniglot"]["oml"] == (60 + 32, 2.239)
    assert paper.COST["mini_imagenet"]["meml"] == (3 * 60 + 58, 1.147)


def test_one_seed_keeps_its_interval():
    cell = cells.combine([point([0.5, 0.7])])
    assert cell == (0.6, point([0.5, 0.7])["ci95"], 2, 0.1, (0.6,))


def test_several_seeds_have_the_interval_over_seeds():
    cell = cells.combine([point([0.4, 0.4]), point([0.5, 0.7]), point([0.8, 0.8])])
    # Variance of 0.4, 0.6, 0.8: 0.04; three seeds; t of 2.
    assert cell.accuracy == pytest.approx(0.6) and cell.runs == 6
    assert cell.ci95 == pytest.approx(4.302653 * (0.04 / 3) ** 0.5, rel=1e-6)
    assert cell.by_seed == pytest.approx((0.4, 0.6, 0.8))


def test_two_seeds_have_the_interval_over_their_runs():
    cell = cells.combine([point([0.4, 0.6]), point([0.5, 0.7])])
    assert cell.accuracy == pytest.approx(0.55) and cell.runs == 4
    # Variances 0.02; t of two degrees of freedom; what lies between the seeds is not in it.
    assert cell.ci95 == pytest.approx(4.302653 * (0.02 / 2 + 0.02 / 2) ** 0.5 / 2, rel=1e-6)


def test_oracles_are_the_best_only_where_all_rows_are():
    def line(kind, accuracy):
        cell = cells.Cell(accuracy, 0.01, 50, 0.1, (accuracy,))
        return comparison.Line("", kind, kind, "sgd", kind, True, {}, {10: cell})

    oracle, ours, pixels = line("oracle", 0.9), line("unsupervised", 0.8), line("baseline", 0.5)
    best = functools.partial(comparison.is_best, at=10)
    lines = [oracle, ours, pixels]
    assert [best(one, lines) for one in lines] == [False, True, False]
    lines = [oracle, pixels]
    assert [best(one, lines) for one in lines] == [True, False]


def test_the_best_is_the_best_of_its_test_the_baselines_of_the_part_included():
    def line(title, accuracy, kind="unsupervised", named=True, shots=15, **fields):
        config = override(Config(), {"test.shots": shots})
        stored = results(config, sgd=(0.5, 0.6), **{"content_hash": "a"} | fields)
        cell = cells.Cell(accuracy, 0.01, 50, 0.1, (accuracy,))
        return comparison.Line(
            "", title, title, "sgd", kind, named, {}, {10: cell}, (0,), None, (stored,)
        )

    ours, pixels = line("MEML", 0.3), line("raw pixels", 0.5, "baseline")
    there = line("pixels of other images", 0.9, "baseline", test_hash="b")
    other = line("MEML, prototype head", 0.4, named=False)

    def bold(*lines):
        sheets = table_sheets.make_sheets(lines)
        return [row[0] for sheet in sheets for row in sheet.rows if row[-1].startswith("**")]

    assert bold(ours, pixels, there, other) == ["raw pixels", "pixels of other images"]
    # As those of other images are not compared with, neither are those of other streams.
    assert bold(ours, line("pixels of 5 shots", 0.9, "baseline", shots=5), other) == [
        "MEML", "pixels of 5 shots", "MEML, prototype head",
    ]  # fmt: skip
    # The heads that the table does not name are measured by the baselines too.
    assert bold(line("MEML", 0.6), pixels, other) == ["MEML"]
    # Twice as many seeds are no other test.
    one = line("OML", 0.7)
    twice = dataclasses.replace(one, seeds=(0, 1), results=one.results * 2)
    assert bold(line("MEML", 0.6), twice, pixels) == ["OML"]


def test_verdicts():
    cell = cells.Cell(0.5, 0.02, 50, 0.1, (0.5,))
    verdicts = {47.9: "above", 48.1: "within", 50.0: "within", 51.9: "within", 52.1: "below"}
    assert {x: cells.verdict(cell, Published(x)) for x in verdicts} == verdicts


def test_intervals_that_overlap_are_within():
    cell = cells.Cell(0.20, 0.01, 50, 0.05, (0.2,))
    verdicts = {None: "above", 0.0: "above", 3.0: "above", 3.2: "within", 8.3: "within"}
    assert {x: cells.verdict(cell, Published(15.9, x)) for x in verdicts} == verdicts
    assert cells.verdict(cell, Published(24.0, 2.0)) == "below"


def test_guessing_and_equal_runs_give_no_verdict():
    for accuracies, n, said in (
        ([0.5] * 5, 2, "at chance"),  # one class is named, whatever comes
        ([1 / 3] * 7, 3, "at chance"),  # which has a spread of rounding
        ([0.4, 0.7], 2, "at chance"),
        ([0.9] * 5, 2, "no spread"),
        ([0.9], 2, "no spread"),
        ([0.9, 0.91], 2, "above"),
    ):
        half = 0.0 if len(accuracies) == 1 else point(accuracies, n)["ci95"]
        cell = cells.Cell(float(np.mean(accuracies)), half, len(accuracies), 1 / n, ())
        assert cells.verdict(cell, Published(49.3)) == said
        assert (said in cells.COMPARED) == (said == "above")


def test_baselines_stand_beside_the_rows_that_are_tested_likewise():
    rows = {"oracle_oml_cifar100": "a", "oracle_meml_mini_imagenet": "b", "meml_mini_imagenet": "b"}
    pixels, found = {"a": (0.5, 0.6), "b": (0.2, 0.3)}, {}
    for row, where in rows.items():
        config = settings("ood", row, "short")
        hashes = {"content_hash": row, "test_hash": config.test_data.name and "cifar"}
        images = results(config, sgd=(0.4, 0.4), pixels=pixels[where], **hashes)
        found[row] = {0: images}
    configs = {row: settings("ood", row) for row in table("ood").rows}

    def baselines():
        lines = comparison.make_lines(table("ood"), configs, found)
        shown = [line for line in lines if line.kind == "baseline" and line.part == "CIFAR-100"]
        return {line.title: round(line.cells[10].accuracy, 3) for line in shown}

    title = curves.NAMES["pixels"]
    both = {f"{title} (all classes of cifar100)": 0.25, f"{title} (test classes of cifar100)": 0.55}
    assert baselines() == both and list(baselines()) == list(both)  # of most rows first
    # Another number of runs is another test.
    other = override(settings("ood", "meml_mini_imagenet", "short"), {"test.runs": 7})
    same_images = {"content_hash": "meml_mini_imagenet", "test_hash": "cifar"}
    found["meml_mini_imagenet"] = {0: results(other, sgd=(0.4, 0.4), **same_images)}
    assert set(baselines()) == {
        f"{title} (test classes of cifar100)",
        f"{title} (all classes of cifar100, beside Oracle MEML)",
        f"{title} (all classes of cifar100, beside MEML)",
    }
    del found["oracle_meml_mini_imagenet"], found["meml_mini_imagenet"]
    assert baselines() == {title: 0.55}


@pytest.mark.parametrize(("feature", "count"), [("relu", 1), ("preactivation", 2)])
def test_untrained_networks_of_other_features_are_not_one_baseline(feature, count):
    """Only a learner with attention has the features that `attention_feature` names."""
    stored = {}
    for row in ("oml", "meml", "oracle_meml"):
        config = override(settings("omniglot", row), {"network.attention_feature": feature})
        found = results(config, sgd=(0.5, 0.6))
        [pixels] = [curve for curve in found["comparisons"] if curve["head"] == "pixels"]
        found["comparisons"].append(pixels | {"head": "untrained"})
        stored[row] = {0: found}
    own = {row: settings("omniglot", row) for row in table("omniglot").rows}
    lines = comparison.make_lines(table("omniglot"), own, stored)
    heads = [line.head for line in lines if line.kind == "baseline"]
    assert heads.count("pixels") == 1 and heads.count("untrained") == count


def test_seeds_of_other_settings_are_not_mixed(stored):
    path = stored / "omniglot" / "meml" / "seed1" / "results.json"
    longer = settings("omniglot", "meml", "paper", 1)
    path.write_text(json.dumps(results(longer, sgd=(0.9, 0.9))))
    configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
    lines = comparison.make_lines(
        table("omniglot"), configs, stored_results.read(stored / "omniglot", say=print)
    )
    found = {line.title: (line.seeds, line.steps) for line in lines if line.row == "meml"}
    assert found["MEML (seeds 0)"] == ((0,), 10_000) and found["MEML (seeds 1)"] == ((1,), 40_000)
    text = table_sheets.make_sheets(lines)[0].text
    assert "Rows differ in meta-steps." in text and "The paper trains" not in text
    short = [line for line in lines if line.steps == 10_000]
    assert "The paper trains 40,000 steps." in table_sheets.make_sheets(short)[0].text


def test_each_group_of_seeds_stands_beside_the_paper_as_its_own_settings_say(stored):
    config = override(settings("omniglot", "meml", "short", 1), {"data.name": "glyphs"})
    path = stored / "omniglot" / "meml" / "seed1" / "results.json"
    path.write_text(json.dumps(results(config, sgd=(0.9, 0.92))))
    oracle = override(settings("omniglot", "meml", "short", 2), {"tasks.labels": "true"})
    (stored / "omniglot" / "meml" / "seed2").mkdir()
    path = stored / "omniglot" / "meml" / "seed2" / "results.json"
    path.write_text(json.dumps(results(oracle, sgd=(0.9, 0.92))))
    configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
    every = stored_results.read(stored / "omniglot", say=print)
    lines = {x.title: x for x in comparison.make_lines(table("omniglot"), configs, every)}
    omniglot, glyphs, labels = (lines[f"MEML (seeds {seed})"] for seed in range(3))
    assert omniglot.paper[10] == 84.6 and not glyphs.paper
    assert [line.kind for line in (omniglot, glyphs, labels)] == [
        "unsupervised", "unsupervised", "oracle",
    ]  # fmt: skip
    # Alone, they give the lines that they give beside others.
    for seed, line in enumerate((omniglot, glyphs, labels)):
        alone = {"meml": {seed: every["meml"][seed]}}
        [one] = [
            x
            for x in comparison.make_lines(table("omniglot"), configs, alone)
            if x.row == "meml" and x.head == "sgd"
        ]
        assert dataclasses.replace(one, title=line.title) == line


@pytest.mark.parametrize("name", ["content_hash", "test_hash", "note"])
def test_seeds_on_other_images_are_not_mixed(stored, name):
    path = stored / "omniglot" / "meml" / "seed1" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "other"}))
    configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
    found = stored_results.read(stored / "omniglot", say=print)
    lines = comparison.make_lines(table("omniglot"), configs, found)
    titles = {line.title for line in lines if line.row == "meml" and line.head == "sgd"}
    assert titles == {"MEML (seeds 0)", "MEML (seeds 1)"}


def test_settings_without_influence_do_not_part_seeds():
    def parts(fields, every=None):
        configs = [settings("omniglot", "meml", seed=s) for s in range(3)]
        configs = [override(config, every or {}) for config in configs]
        configs[0] = override(configs[0], fields)
        stored = {"meml": {c.seed: results(c, sgd=(0.5, 0.6)) for c in configs}}
        own = {row: settings("omniglot", row) for row in table("omniglot").rows}
        lines = comparison.make_lines(table("omniglot"), own, stored)
        return [(x.title, x.seeds) for x in lines if x.head in ("sgd", "pixels") and x.cells]

    whole = [("MEML", (0, 1, 2)), (curves.NAMES["pixels"], (0, 1, 2))]
    assert parts({"train.log_every": 1, "train.checkpoint_every": 7, "data.dir": "x"}) == whole
    for fields in (
        {"train.steps_per_call": 3}, {"preset": "mine"}, {"test.reservoir_size": 7},
        {"test.iid": False}, {"train.validate_every": 7},
    ):  # fmt: skip
        assert parts(fields) == whole, fields
    parted = [("MEML (seeds 0)", (0,)), ("MEML (seeds 1, 2)", (1, 2))]
    # No training decides on what learns nothing; its runs are the test's.
    for fields in ({"inner.lr": 0.5}, {"test.checkpoint": "best"}):
        assert parts(fields) == [*parted, whole[1]], fields
    best = {"test.checkpoint": "best"}
    assert parts({"train.validate_every": 7}, best) == [*parted, whole[1]]
    *ours, first, second = parts({"test.shots": 3})
    assert ours == parted and {first[1], second[1]} == {(0,), (1, 2)}
    assert "beside MEML" in first[0] and "beside MEML" in second[0] and first[0] != second[0]


def test_a_head_that_one_seed_lacks_does_not_part_the_others():
    configs = [settings("omniglot", "meml", seed=s) for s in range(3)]
    stored = {c.seed: results(c, sgd=(0.5, 0.6)) for c in configs}
    [pixels] = [one for one in stored[0]["comparisons"] if one["head"] == "pixels"]
    stored[0]["comparisons"].append(pixels | {"head": "sgd_reservoir"})
    own = {row: settings("omniglot", row) for row in table("omniglot").rows}
    lines = comparison.make_lines(table("omniglot"), own, {"meml": stored})
    seeds = {line.head: line.seeds for line in lines if line.cells}
    assert seeds["sgd"] == (0, 1, 2) and seeds["sgd_reservoir"] == (0,)


def test_one_draw_for_all_runs_is_said():
    def text(protocol):
        config = override(settings("omniglot", "meml"), {"test.protocol": protocol})
        stored = {"meml": {0: results(config, sgd=(0.5, 0.6))}}
        own = {row: settings("omniglot", row) for row in table("omniglot").rows}
        lines = comparison.make_lines(table("omniglot"), own, stored)
        return table_sheets.make_sheets(lines)[0].text

    assert "all runs are on one draw of classes" in text("released")
    assert "one draw" not in text("clean")
