import contextlib
import copy
import dataclasses
import json
import os
import re

import numpy as np
import pytest

from meml_jax import files, intervals, paper, report, rounding, run_facts, seeds
from meml_jax.config import Config, EmbeddingConfig
from meml_jax.embeddings import EMBEDDINGS
from meml_jax.results import collect
from meml_jax.settings import PRESETS, flatten, override
from meml_jax.types import Clusters, Dataset, Split, UserError


def make_point(num_classes, accuracy, *, learning_rate=3e-4, train_accuracy=0.75):
    return {
        "num_classes": num_classes, "runs": 50, "learning_rate": learning_rate,
        "accuracy": accuracy, "std": 0.05, "ci95": 0.0142, "train_accuracy": train_accuracy,
        "chance": 1 / num_classes, "accuracies": [accuracy] * 50,
    }  # fmt: skip


RESULTS = {
    "schema": 1, "dataset": "omniglot", "learner": "meml", "preset": "paper", "seed": 3,
    "device": "cpu", "versions": {"jax": "0.10.2", "meml_jax": "1.0"},
    "embedding": {"name": "pca", "dim": 64},
    "clustering": {
        "requested": 1100, "actual": 1099, "kept": 1034, "dropped": 65, "size_min": 2,
        "size_median": 18.5, "size_max": 121, "purity": 0.31249, "nmi": 0.7126,
    },
    "meta_train": {
        "steps": 40000, "seconds": 2600.25, "compile_seconds": 31.2, "steps_per_second": 15.383,
        "peak_bytes": 812 * 2**20,
    },
    "meta_test": {
        "protocol": "clean", "head": "sgd",
        "points": [make_point(10, 0.8464), make_point(75, 0.9625)],
    },
    "comparisons": [
        {
            "name": "prototype", "protocol": "clean", "head": "prototype",
            "points": [make_point(10, 1.0, learning_rate=None, train_accuracy=None)],
        }
    ],
}  # fmt: skip


def cells(text, name, nth=0):
    rows = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    return rows[nth].split(" | ")


def test_numbers_of_the_table():
    text = report.render(RESULTS)
    assert cells(text, "classes") == ["10", "75"]
    assert cells(text, "meml (sgd head)") == ["84.6 ± 1.4", "96.3 ± 1.4"]
    assert cells(text, "prototype") == ["100.0 ± 1.4", "-"]
    assert cells(text, "MEML (paper)") == ["84.6", "37.5"]
    assert cells(text, "chance") == ["10.0", "1.3"]
    assert cells(text, "meml (sgd head)", 1) == ["75.0", "75.0"]
    assert cells(text, "meml (sgd head)", 2) == ["0.0003", "0.0003"]
    assert text.count("| prototype |") == 1  # it has no learning rate and no stream accuracy


def test_the_rest_of_the_report():
    results = {**RESULTS, "config": {"inner": {"lr": 0.01}}}
    results["departures"] = {"network.cln_relu": False}
    text = report.render(results, figures=["figures/accuracy_curve.png"])
    for line in (
        "# meml on omniglot",
        "- points of docs/deviations.md: as `paper`, except `network.cln_relu`=False",
        "- seed: 3", "- versions: jax 0.10.2, meml_jax 1.0",
        "- embedding: name pca, dim 64", "- `inner.lr`: 0.01", "- clusters dropped: 65",
        "- images a cluster (min, median, max): 2, 18.5, 121", "- purity: 0.312",
        "- normalised mutual information: 0.713", "- meta-steps/s: 15.38",
        "- peak memory (MiB): 812", "![accuracy curve](figures/accuracy_curve.png)",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert "whose labels serve this report only" in text
    text = report.render(results, figures=["figures/a.png", "figures/embedding_clusters.png"])
    assert text.split("![embedding clusters](figures/embedding_clusters.png)\n\nWhat is in")[1]
    assert text.endswith("\n") and "None" not in text and "nan" not in text


def test_what_a_run_was_made_with():
    embedding = dataclasses.asdict(EmbeddingConfig("acai", dim=256, steps=4000, whiten=0.5))
    results = {
        **RESULTS,
        "config": {"data": {"image_size": 28, "channels": 1}, "embedding": embedding},
        "embedding": {"name": "acai"},
        "parts": {
            "train": {"classes": 0, "images": 400}, "validation": {"classes": 2, "images": 9},
        },
    }  # fmt: skip
    facts = run_facts.facts(results)
    assert facts["images"] == "28 x 28 pixels, grey"
    assert facts["`precision`"] is facts["`network.compute_dtype`"] is None  # not known
    results |= {"precision": "highest"}
    results["config"] |= {"network": {"compute_dtype": "bfloat16"}}
    text = report.render(results)
    assert "- `precision`: highest\n" in text and "- `network.compute_dtype`: bfloat16\n" in text
    assert facts["parts"] == "train 400 images without labels; validation 9 images of 2 classes"
    assert facts["embedding"] == (
        "name acai, steps 4000, dim 256, width 16, depth 3, whiten 0.5, normalize False"
    )
    known = {field.name for field in dataclasses.fields(EmbeddingConfig)}
    assert {name for names in run_facts._OF_EMBEDDING.values() for name in names} <= known
    assert run_facts._OF_EMBEDDING.keys() == EMBEDDINGS.keys() - {"pixels"}
    # One of a user's own is named.
    for name in (*EMBEDDINGS, "npz", "mine"):
        said = run_facts.facts(results | {"embedding": {"name": name}})["embedding"]
        assert said.startswith(f"name {name}, ") and said.endswith(", normalize False")
    assert run_facts.facts(results | {"embedding": None})["embedding"] is None
    assert run_facts.facts(RESULTS)["images"] is run_facts.facts(RESULTS)["parts"] is None


def facts_of(values, **fields):
    """What a report says of a run with these settings, from results as they are read back."""
    config = override(Config(), values)
    names = filter(None, (config.data.name, config.test_data.name))
    none = Split(np.zeros((0, 28, 28, 1), np.uint8), np.zeros(0, int), np.zeros(0, str), ())
    found = collect(
        config,
        Dataset("_".join(names), none, none, none, "digest"),
        Clusters(none.labels, None, none.labels, {}, ""),
        meta_train={},
        checkpoint_step=0,
        points={"sgd": []},
    )
    several = {"seeds": list(range(config.seeds))} if config.seeds > 1 else {}
    return run_facts.facts(json.loads(json.dumps(found | several | fields)))


def another_value(field):
    """A value of the field's type that is not its default."""
    value = flatten(Config())[field]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return value[:1]
    if value is None:
        with contextlib.suppress(UserError):
            override(Config(), {field: 7})
            return 7
    return 2 * value + 1 if isinstance(value, int | float) else "another"


OTHERS = "other settings that are not the defaults"
NOT_TOLD = (
    "data.dir", "test_data.dir", "data.cache_dir", "data.download_timeout", "train.log_every",
    "train.checkpoint_every", "train.steps_per_call", "train.images_on",
    "embedding.checkpoint_every",
)  # fmt: skip
LABELLERS = {"deepcluster", "sela"}
TRAINED = {"acai", "contrastive", *LABELLERS}
USED_BY = {  # fields of `embedding`, as the comments of config.py have it
    "file": {"npz"}, "dim": {"pca", "acai", *LABELLERS},
    "channels": {"random", "contrastive", *LABELLERS}, "views": {"contrastive", *LABELLERS},
    "temperature": {"contrastive"}, "width": {"acai"}, "depth": {"acai"}, "critic_mix": {"acai"},
    "critic_weight": {"acai"}, "num_pseudo_labels": LABELLERS, "round_steps": LABELLERS,
    "sharpness": {"sela"}, "steps": TRAINED, "batch_size": TRAINED, "learning_rate": TRAINED,
}  # fmt: skip


@pytest.mark.parametrize("field", flatten(Config()))
def test_each_setting_that_makes_a_run_another_is_told(field):
    value, default = another_value(field), facts_of({})
    assert default[OTHERS] is None
    group, _, name = field.rpartition(".")
    if group != "embedding" or name == "name":
        assert (facts_of({field: value}) != default) == (field not in NOT_TOLD)
        return
    known = {*EMBEDDINGS, "npz"}
    told = {
        one
        for one in known | {"mine"}
        if facts_of({"embedding.name": one, field: value}) != facts_of({"embedding.name": one})
    }
    used = set() if field in NOT_TOLD else USED_BY.get(name, known) | {"mine"}
    assert told == used


def test_other_settings_are_told_once_and_by_their_names():
    values = {"inner.lr": 0.1, "inner.first_order": True, "tasks.max_size": 30, "data.split": "x"}
    assert facts_of(values)[OTHERS] == (
        "`data.split`=x, `tasks.max_size`=30, `inner.first_order`=True"
    )
    values = {"embedding.name": "acai", "embedding.dim": 256, "embedding.critic_mix": 0.5}
    assert facts_of(values)[OTHERS] == "`embedding.critic_mix`=0.5"
    # Nothing of an embedding and of clusters that a run has no use for.
    values |= {"clustering.init": "ward"}
    assert facts_of(values)[OTHERS] == "`embedding.critic_mix`=0.5, `clustering.init`=ward"
    assert facts_of(values | {"tasks.labels": "true"})[OTHERS] is None
    # What a preset stands for, and what departs from it, has its own line.
    assert facts_of(PRESETS["released"])[OTHERS] is None
    released = facts_of(PRESETS["released"] | {"tasks.min_size": 5, "inner.steps": 2})
    assert released["points of docs/deviations.md"].endswith("except `tasks.min_size`=5")
    assert released[OTHERS] == "`inner.steps`=2"
    assert facts_of({"preset": "best", "tasks.min_size": 5})[OTHERS] == "`tasks.min_size`=5"


def test_a_users_own_images_go_by_the_name_of_their_folder():
    values = {"data.name": "folder", "data.dir": "/home/someone/animals/"}
    values |= {"test_data.name": "npz", "test_data.dir": "~/secret/birds.npz"}
    values |= {"embedding.name": "npz", "embedding.file": "/home/someone/z.npz"}
    told = facts_of(values)
    assert told["dataset"] == "folder_npz" and told[OTHERS] == "`embedding.file`=z.npz"
    assert told["images from"] == "animals" and told["test images from"] == "birds.npz"
    assert "someone" not in str(told) and "secret" not in str(told)
    for other in ({"data.name": "omniglot", "test_data.name": None}, {"data.dir": None}):
        assert facts_of(values | other)["images from"] is None
    assert facts_of(values | {"test_data.name": "cub"})["test images from"] is None


def test_a_preset_is_named_for_what_it_stands_for():
    text = report.render(RESULTS | {"departures": {}})
    assert "- points of docs/deviations.md: as `paper`\n" in text and "preset" not in text
    assert "- preset: best\n" in report.render(RESULTS | {"preset": "best"})


def test_what_is_not_known_is_left_out():
    results = copy.deepcopy(RESULTS)
    results |= {"dataset": "glyphs", "clustering": None, "embedding": None}
    results["meta_train"]["peak_bytes"] = None
    del results["comparisons"]
    text = report.render(results)
    assert "(paper)" not in text and "Clusters" not in text and "Figures" not in text
    assert "- peak memory (MiB): not measured" in text
    assert cells(text, "meml (sgd head)") == ["84.6 ± 1.4", "96.3 ± 1.4"]
    assert "None" not in text


def test_paper_rows():
    assert paper.paper_rows("omniglot")["MEML RS"][50] == 56.4
    assert len(paper.paper_rows("omniglot")) == 14
    assert paper.paper_rows("glyphs") == {}


def test_numbers_of_the_paper_are_written_as_there():
    rows = paper.paper_rows("slimagenet64")
    assert paper.written(rows["Oracle OML"][20]) == "15.9 ± 8.3"
    assert paper.written(rows["MEML 800"][10]) == "13.9 ± 0.0"
    assert {name: len(row) for name, row in paper.HALVES["slimagenet64"].items()} == {
        name: len(row) for name, row in rows.items()
    }
    assert paper.written(paper.paper_rows("omniglot")["MEML"][10]) == "84.6"
    row = paper.few_shot_rows("omniglot")["CACTUs-MAML balanced 20,5"]
    assert list(map(paper.written, row.values())) == ["60.50", "84.00", "40.50", "67.62"]
    # It is a number, whatever is computed of it.
    assert 100 - paper.Published(60.5) == 39.5 and str(paper.Published(60.5, 8.3)) == "60.5"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (11541.3, "11541"), (123456.7, "123457"), (1234.5678, "1235"), (999.96, "1000"),
        (38.456, "38.46"), (0.0003, "0.0003"), (3e-7, "3e-07"), (40_000, "40000"), (None, "-"),
    ],
)  # fmt: skip
def test_numbers_are_written_without_exponent_where_they_are_large(value, text):
    assert rounding.plain(value) == text
    meta_train = RESULTS["meta_train"] | {"seconds": value}
    line = f"- seconds: {text}"
    said = report.render(RESULTS | {"meta_train": meta_train}).splitlines()
    assert (line in said) == (value is not None)


def test_json_is_stable_and_exact(tmp_path):
    path = tmp_path / "results.json"
    value = {"b": np.float64(0.1) + 0.2, "a": [np.int32(3), np.arange(2), None, True], "c": "é"}
    files.write_json(path, value)
    text = path.read_text()
    assert json.loads(text) == {"a": [3, [0, 1], None, True], "b": 0.1 + 0.2, "c": "é"}
    files.write_json(path, dict(reversed(value.items())))
    assert path.read_text() == text
    files.write_json(path, RESULTS)
    assert json.loads(path.read_text()) == RESULTS


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan")])
def test_json_refuses_what_is_not_a_number_and_keeps_the_old(tmp_path, bad):
    path = tmp_path / "results.json"
    files.write_json(path, {"old": 1})
    with pytest.raises(UserError, match=r"meta_test: points\[1\]: accuracy: got (nan|inf)"):
        files.write_json(path, {"meta_test": {"points": [{}, {"accuracy": bad}]}})
    assert json.loads(path.read_text()) == {"old": 1}


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.txt"
    files.write_atomic(path, "old\n")
    files.write_atomic(path, b"new\r\n")
    assert path.read_bytes() == b"new\r\n"
    assert path.stat().st_mode & 0o777 == 0o666 & ~files._umask()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=r"cannot write .*file.txt \(disk full\)"):
        files.write_atomic(path, "newer")
    assert path.read_bytes() == b"new\r\n"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def of_seeds(counts, accuracies):
    """Results of several seeds, each with one accuracy at each number of classes."""

    def points(a):
        return [
            make_point(n, share) | {"accuracies": [share, share + 0.02], "iid_accuracy": None}
            for n, share in zip(counts, a, strict=True)
        ]

    each = [
        RESULTS
        | {"seed": seed, "comparisons": [], "clustering": {}}
        | {"meta_train": {"steps": 100}, "config": {}}
        | {"meta_test": RESULTS["meta_test"] | {"points": points(a)}}
        for seed, a in enumerate(accuracies)
    ]
    return seeds.combine(each, Config())


def test_accuracies_of_seeds_stand_under_their_numbers_of_classes():
    text = report.render(of_seeds((50, 10), [(0.5, 0.1), (0.52, 0.12), (0.54, 0.14)]))
    table = text[text.index("Each seed's result") :]
    assert cells(table, "classes") == ["10", "50"]  # as in the other tables of the report
    assert cells(table, "seed 1") == ["13.0", "53.0"]
    assert "**Only 100 meta-steps:" in text


def test_two_seeds_show_the_interval_over_their_runs():
    three = report.render(of_seeds((10,), [(0.5,), (0.6,), (0.7,)]))
    assert "with intervals over seeds" in three and "too few" not in three
    two = report.render(of_seeds((10,), [(0.5,), (0.6,)]))
    half = 4.302653 * (2 * 0.0002 / 2) ** 0.5 / 2  # variances 0.0002, t of two degrees of freedom
    assert cells(two, "meml (sgd head)") == [f"56.0 ± {100 * half:.1f}"]
    assert "too few for an interval over seeds" in two


def test_one_step_is_no_training_that_fell_short():
    results = RESULTS | {"meta_train": RESULTS["meta_train"] | {"steps": 1}}
    assert "**Only" not in report.render(results)


# Against raw pixels, run by run.

RULE = "Level: the 95 % interval of the differences on the same test runs holds 0."
SPREAD = np.array([0.2, 0.4, 0.6, 0.8])  # of raw pixels, over easy runs and hard ones


def curve(head, accuracies):
    """A curve with these accuracies of its runs, by number of classes."""
    points = [
        intervals.summarise(np.asarray(a), num_classes=n) | {"learning_rate": None}
        for n, a in accuracies.items()
    ]
    return {"name": head, "protocol": "clean", "head": head, "points": points}


def beside_pixels(gaps, pixels=SPREAD, **others):
    """Results of a head that has so much more than raw pixels in each run, by number of classes."""
    heads = {"sgd": gaps} | others
    first, *more = (
        curve(head, {n: pixels + np.array(gap) for n, gap in by.items()})
        for head, by in heads.items()
    )
    more.append(curve("pixels", {n: pixels for n in gaps}))
    return RESULTS | {"meta_test": first, "comparisons": more}


def against_pixels(results):
    """The sentence of the report, without its rule; None if there is none."""
    said = [line for line in report.render(results).splitlines() if "raw pixels at" in line]
    assert all(line.endswith(f". {RULE}") for line in said)
    return said[0].removesuffix(f". {RULE}") if said else None


GAPS = {
    10: [0.10, 0.12, 0.10, 0.12], 50: [0.10, -0.10, 0.10, -0.08], 75: [-0.10, -0.12, -0.10, -0.12],
    100: [0.0] * 4,
}  # fmt: skip


def test_heads_lie_above_raw_pixels_level_with_them_or_below():
    results = beside_pixels(GAPS)
    assert against_pixels(results) == (
        "sgd head: above raw pixels at 10 classes; level with raw pixels at 50, 100 classes; "
        "below raw pixels at 75 classes"
    )
    # What the runs have in common makes each interval wide: they overlap where each run is above.
    ours, pixels = results["meta_test"]["points"][0], results["comparisons"][0]["points"][0]
    assert ours["accuracy"] - pixels["accuracy"] < min(ours["ci95"], pixels["ci95"])
    swapped = beside_pixels({n: -np.array(gap) for n, gap in GAPS.items()})
    assert against_pixels(swapped) == (
        "sgd head: above raw pixels at 75 classes; level with raw pixels at 50, 100 classes; "
        "below raw pixels at 10 classes"
    )


def test_each_head_but_the_baselines_has_its_place_beside_raw_pixels():
    up, down = {10: GAPS[10]}, {10: GAPS[75]}
    assert against_pixels(beside_pixels(up, prototype=down, untrained=down)) == (
        "sgd head: above raw pixels at 10 classes. prototype head: below raw pixels at 10 classes"
    )
    results = beside_pixels(up)
    assert against_pixels(results | {"comparisons": []}) is None
    # What rounding leaves is no difference.
    equal = {"meta_test": curve("sgd", {10: [0.1 + 0.2] * 4})}
    equal["comparisons"] = [curve("pixels", {10: [0.3] * 4})]
    assert against_pixels(results | equal) == "sgd head: level with raw pixels at 10 classes"
    # Nothing is said of other runs.
    for other in ({10: SPREAD[1:]}, {50: SPREAD}):
        assert against_pixels(results | {"comparisons": [curve("pixels", other)]}) is None


@pytest.mark.parametrize(
    ("gaps", "place"),
    [
        # The mean of the seeds and its interval: 0.11 ± 0.02, 0.3 ± 0.5, 0.175 ± 0.03 over the
        # runs of each of two seeds. The runs of all seeds as one sample have 0.3 ± 0.2 and
        # 0.18 ± 0.23.
        ((0.10, 0.11, 0.12), "above"),
        ((0.1, 0.3, 0.5), "level with"),
        ((0.05, 0.3), "above"),
        ((-0.05, -0.3), "below"),
    ],
)
def test_seeds_are_paired_with_themselves(gaps, place):
    each = [
        beside_pixels({10: [gap - 0.01, gap + 0.01]}, pixels=np.array([0.1, 0.2]) + seed / 5)
        | {"seed": seed, "clustering": {}, "config": {}}
        for seed, gap in enumerate(gaps)
    ]
    found = against_pixels(seeds.combine(each, Config()))
    assert found == f"sgd head: {place} raw pixels at 10 classes"
