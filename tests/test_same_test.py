"""Which lines of a table have the same test, streams and episodes: the best, the baselines."""

import pytest
from own_tables import point, results

from meml_jax import cells, comparison
from meml_jax.config import Config
from meml_jax.settings import override
from meml_jax.tables import Row, Table

FEW_SHOT = {"episodes.ways": 5}


def is_best_beside_better(values, other):
    """Tell whether a line counts as the best beside a better one of `other` settings."""
    lines = []
    for title, accuracy, fields in (("a", 0.3, values), ("b", 0.5, values | other)):
        stored = results(override(Config(), fields), sgd=(0.5, 0.6), content_hash="digest")
        cell = cells.Cell(accuracy, 0.01, 50, 0.1, (accuracy,))
        lines.append(
            comparison.Line(
                "", title, title, "sgd", "unsupervised", True, {}, {10: cell}, (0,), 1, (stored,)
            )
        )
    return comparison.is_best(lines[0], lines, 10)


@pytest.mark.parametrize(
    ("values", "other", "same"),
    [
        ({}, {}, True),
        ({}, {"test.protocol": "released"}, False),
        ({}, {"test.queries": 9}, False),
        ({}, {"test.shots": 9}, False),
        ({}, {"test.runs": 9}, True),
        ({}, {"test.learning_rates": (0.1,)}, True),
        # Of episodes the shots are the column's; `test.shots` is that of streams.
        (FEW_SHOT, {"test.shots": 9}, True),
        (FEW_SHOT, {"test.queries": 9}, False),
        (FEW_SHOT, {"test.episodes": 9}, True),
    ],
    ids=str,
)
def test_the_best_is_that_of_the_same_test(values, other, same):
    assert is_best_beside_better(values, other) == (not same)


def num_pixels(values, other):
    """Count the lines of raw pixels beside two trainings, one of them of `other` settings."""
    configs, stored = {}, {}
    for row, fields in {"a": values, "b": values | other}.items():
        configs[row] = override(Config(), fields)
        found = results(configs[row], sgd=(0.5, 0.6), content_hash="digest")
        if configs[row].episodes.ways:
            points = [point((0.5, 0.6), 5, shots=1)]
            found["meta_test"] |= {"head": "adapted", "points": points}
            found["comparisons"] = [curve | {"points": points} for curve in found["comparisons"]]
        stored[row] = {0: found}
    rows = {row: Row({"sgd": row}) for row in configs}
    table = Table(title="T", config="configs/quickstart.py", rows=rows)
    lines = comparison.make_lines(table, configs, stored)
    return len([line for line in lines if line.head == "pixels"])


@pytest.mark.parametrize(
    ("values", "other", "count"),
    [
        ({}, {"learner": "oml"}, 1),
        ({}, {"test.learning_rates": (0.1,)}, 1),  # baselines learn nothing
        ({}, {"test.episodes": 9}, 1),  # there are none
        ({}, {"test.ways_shots": ((5, 1),)}, 1),
        ({}, {"test.runs": 9}, 2),
        ({}, {"test.queries": 9}, 2),
        ({}, {"test.num_classes": (10, 50)}, 2),
        (FEW_SHOT, {"learner": "maml"}, 1),
        (FEW_SHOT, {"test.episodes": 9}, 2),
        (FEW_SHOT, {"test.ways_shots": ((5, 1),)}, 2),
        (FEW_SHOT, {"test.queries": 9}, 2),
    ],
    ids=str,
)
def test_baselines_of_the_same_test_stand_there_once(values, other, count):
    assert num_pixels(values, other) == count
