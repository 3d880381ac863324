"""Rows of a table against each other, by hand."""

import dataclasses

import numpy as np
import pytest
import scipy.stats

from meml_jax import cells, comparison, row_settings, table_sheets, tables
from meml_jax.config import Config
from meml_jax.config import TestConfig as Settings
from meml_jax.differences import make_differences
from meml_jax.settings import override
from meml_jax.types import UserError


def point(accuracies, n=10):
    return {
        "num_classes": n, "runs": len(accuracies), "accuracy": float(np.mean(accuracies)),
        "ci95": 0.5, "chance": 1 / n, "accuracies": list(accuracies), "learning_rate": 0.1,
    }  # fmt: skip


def line(row, accuracies, *, beside="", head="sgd"):
    """A line whose seeds 0, 1, ... have these accuracies of their runs at 10 classes."""
    results = tuple(
        {
            "content_hash": "a",
            "config": dataclasses.asdict(Config()),
            "meta_test": {"head": head, "points": [point(runs)]},
            "comparisons": [{"head": "other", "points": [point([0.1, 0.1])]}],
        }
        for runs in accuracies
    )
    measured = {10: cells.combine([one["meta_test"]["points"][0] for one in results])}
    return comparison.Line(
        "", row, row.upper(), head, "unsupervised", True, {}, measured, tuple(range(len(results))),
        100, results, beside,
    )  # fmt: skip


def test_what_runs_have_in_common_drops_out():
    # Runs differ by 0.4 and 0.5, rows by 0.1 and 0.2.
    [found] = make_differences([line("a", [[0.3, 0.8]], beside="b"), line("b", [[0.2, 0.6]])])
    assert found.title == "A - B" and found.seeds == (0,)
    cell = found.cells[10]
    half = scipy.stats.t.ppf(0.975, 1) * np.std([0.1, 0.2], ddof=1) / 2**0.5
    assert cell.accuracy == pytest.approx(0.15) and cell.ci95 == pytest.approx(half)
    assert cell.runs == 2


def test_seeds_that_both_have():
    a = line("a", [[0.5, 0.5], [0.7, 0.7], [0.0, 0.9]], beside="b")
    b = line("b", [[0.4, 0.6], [0.4, 0.6]])
    [found] = make_differences([b, a])
    assert found.seeds == (0, 1)
    assert found.cells[10].by_seed == pytest.approx((0.0, 0.2))


@pytest.mark.parametrize(
    "changes",
    [{"steps": 200}, {"head": "prototype"}, {"part": "p"}, {"row": "c"}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_something_else_is_not_compared(changes):
    a, b = line("a", [[0.3, 0.8]], beside="b"), line("b", [[0.2, 0.6]])
    assert make_differences([a, b])
    assert not make_differences([a, dataclasses.replace(b, **changes)])
    assert not make_differences([dataclasses.replace(a, beside=""), b])


def test_runs_on_other_images_are_not_compared():
    a, b = line("a", [[0.3, 0.8]], beside="b"), line("b", [[0.2, 0.6]])
    for name in ("content_hash", "test_hash", "note"):
        other = dataclasses.replace(b, results=(b.results[0] | {name: "x"},))
        assert not make_differences([a, other])
    assert not make_differences([a, line("b", [[0.2]])])
    settings = {"config": {"test": {"shots": 5}}}
    other = dataclasses.replace(b, results=(b.results[0] | settings,))
    assert not make_differences([a, other])


DRAWS = ("protocol", "num_classes", "shots", "queries", "runs", "episodes", "ways_shots")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Settings)])
def test_only_rows_on_the_same_draws_are_compared(name):
    """Heads and how they learn may differ: that is what rows are compared in."""
    a, b = line("a", [[0.3, 0.8]], beside="b"), line("b", [[0.2, 0.6]])
    value = getattr(Settings(), name)
    another = {str: "other", int: 9, bool: False, type(None): 9, tuple: ()}[type(value)]
    config = dataclasses.asdict(Config())
    config["test"] |= {name: another}
    other = dataclasses.replace(b, results=(b.results[0] | {"config": config},))
    assert bool(make_differences([a, other])) == (name not in DRAWS)


def trained(row, *, head="sgd", defined=None, learner="meml", **done):
    """A line of a training with settings `done` of a row that the table defines otherwise."""
    config = override(Config(), {"learner": learner} | (defined or {}))
    values = {name.replace("__", "."): value for name, value in done.items()}
    one = line(row, [[0.3, 0.8]], head=head, beside="" if row == "meml" else "meml")
    settings = dataclasses.asdict(override(config, values))
    stored = tuple(results | {"config": settings} for results in one.results)
    return dataclasses.replace(one, results=stored, defined=config)


def test_settings_in_which_rows_are_not_what_they_are_defined_as():
    lines = [
        trained("oml", learner="oml"),
        trained("oml_balanced", learner="oml", defined={"tasks.balance": "truncate"}),
        trained("meml_mean", learner="meml_mean", inner__lr=0.1),
        trained("meml", inner__lr=0.1),
        trained("oracle", learner="oml", defined={"tasks.labels": "true"}),
    ]
    text = "Rows differ in `inner.lr`: 0.1 (MEML_MEAN, MEML), 0.01 (others)."
    assert row_settings.unlike(lines) == [text]
    [pair] = make_differences([lines[0], lines[3]])
    assert pair.lines == (lines[0], lines[3])
    said = "Rows differ in `inner.lr`: 0.1 (MEML), 0.01 (OML)."
    [sheet] = table_sheets._differences([lines[0], lines[3]])
    assert sheet.text.endswith(said)
    assert table_sheets._accuracies("", "", lines, lines).text.endswith(f" {text}")
    # Once for a training, not for each of its heads.
    heads = [lines[0], dataclasses.replace(lines[3], head="prototype"), lines[3]]
    assert row_settings.unlike(heads) == [said]
    # All have it, or the table says it.
    both = [trained(name, inner__lr=0.1) for name in ("a", "b")]
    assert row_settings.unlike(both) == row_settings.unlike([trained("a"), trained("b")]) == []
    assert not row_settings.unlike([trained("a"), trained("b", defined={"inner.lr": 0.1})])


@pytest.mark.parametrize(
    ("done", "said"),
    [
        ({"seed": 3, "train__steps": 7, "data__dir": "x", "test__runs": 5, "test__iid": False}, []),
        ({"test__heads": ("sgd",), "test__num_classes": (10,), "train__images_on": "host"}, []),
        ({"test__reservoir_size": 50}, []),  # of another head
        ({"network__compute_dtype": "bfloat16"}, ["network.compute_dtype"]),
        ({"precision": "default", "outer__fen_lr": 1e-5}, ["precision", "outer.fen_lr"]),
        ({"test__learning_rates": (0.1,)}, ["test.learning_rates"]),
        ({"test__checkpoint": "best"}, ["test.checkpoint"]),
        ({"embedding__name": "acai", "embedding__dim": 9}, ["embedding.name"]),
        ({"embedding__dim": 9}, ["embedding.dim"]),
    ],
)
def test_what_rows_differ_in(done, said):
    found = row_settings.unlike([trained("a"), trained("b", **done), trained("c")])
    assert sorted(one.split("`")[1] for one in found) == sorted(said)
    assert all(one.endswith("(others).") and "(B), " in one for one in found)


def test_what_differs_with_one_head_alone_is_said_of_that_head():
    rates = {"a": 0.5, "b": 0.1, "c": 0.2}
    lines = [trained(n, test__learning_rates=(lr,)) for n, lr in rates.items()]
    lines += [dataclasses.replace(line, head="sgd_reservoir") for line in lines[1:]]
    sgd, reservoir = row_settings.unlike(lines)
    assert sgd == (
        "Rows differ, with the sgd head, in `test.learning_rates`: (0.1,) (B), (0.2,) (C), "
        "(0.5,) (A)."
    )
    assert reservoir.startswith("Rows differ, with the sgd head + reservoir, in ")
    assert "(0.5,)" not in reservoir and "(0.1,) (B)" in reservoir


def test_what_follows_from_nothing_that_differs_is_not_said():
    oracles = {"defined": {"tasks.labels": "true"}}
    assert not row_settings.unlike(
        [trained("a", **oracles), trained("b", embedding__dim=9, **oracles)]
    )
    heads = [trained(name, head="prototype", test__trajectories=len(name)) for name in ("a", "bb")]
    assert not row_settings.unlike(heads)
    open_ = {"defined": {"clustering.num_clusters": 0}}  # and chosen from the images
    assert not row_settings.unlike(
        [trained(n, clustering__num_clusters=i, **open_) for i, n in enumerate("abc", start=2)]
    )


def test_each_part_has_its_own_sheet():
    lines = [
        dataclasses.replace(one, part=part)
        for part in ("p", "q")
        for one in (line("a", [[0.3, 0.8]], beside="b"), line("b", [[0.2, 0.6]]))
    ]
    sheets = [table_sheets._differences([x for x in lines if x.part == part]) for part in "pq"]
    assert [sheet.heading for [sheet] in sheets] == ["p: differences", "q: differences"]
    assert all(sheet.rows == [["A - B", "0", "+15.0 ± 63.5"]] for [sheet] in sheets)


@pytest.mark.parametrize(
    ("share", "text"), [(0.0125, "+1.3"), (-0.0125, "-1.3"), (-0.0001, "0.0"), (0.0, "0.0")]
)
def test_points_are_rounded_as_by_hand(share, text):
    assert table_sheets._signed(share) == text


def test_a_row_names_a_row(tmp_path):
    for i, (rows, message) in enumerate(
        {
            "'a': Row({'sgd': 'A'}, beside='b')": "'a' has beside='b', expected another row of its",
            "'a': Row({'sgd': 'A'}, beside='a')": "'a' has beside='a', expected another row of its",
            "'a': Row({'sgd': 'A'}, beside='b'), 'b': Row({'sgd': 'B'}, part='p')": "beside='b'",
            "'a': Row({})": "got row 'a' = Row",
            "'a': {}": "got row 'a' = {}",
        }.items()
    ):
        path = tmp_path / f"t{i}.py"
        path.write_text(
            f"from meml_jax.tables import Row, Table\nROWS = {{{rows}}}\n"
            "TABLE = Table(title='T', config='configs/quickstart.py', rows=ROWS)\n"
        )
        with pytest.raises(UserError, match=message):
            tables.load(str(path), tmp_path)
