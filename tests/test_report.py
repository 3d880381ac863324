import copy
import dataclasses
import json
import os
import re

import numpy as np
import pytest

from meml_jax import files, paper, report, rounding, run_facts, seeds
from meml_jax.config import Config, EmbeddingConfig
from meml_jax.embeddings import EMBEDDINGS
from meml_jax.types import UserError


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
