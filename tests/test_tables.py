"""Tables of the paper: their rows, their report, and the command that does them."""

import base64
import contextlib
import csv
import dataclasses
import functools
import html.parser
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import programs
import pytest
import scipy.stats

from meml_jax import (
    checks,
    comparison,
    files,
    paper,
    pseudo_labels,
    sharing,
    stored_results,
    table_figures,
    table_flags,
    table_report,
    table_sheets,
    tables,
)
from meml_jax.config import Config
from meml_jax.data import datasets
from meml_jax.model import INIT_VERSION
from meml_jax.paper import Published
from meml_jax.results import points_version, product_versions
from meml_jax.settings import flatten, from_dict, override
from meml_jax.tables import Choice
from meml_jax.types import UserError
from meml_jax.workdir import check_same_training, open_workdir, record_config

ROOT = programs.ROOT
NAMES = sorted(path.stem for path in (ROOT / "configs" / "tables").glob("*.py"))
MINI = '''"""A table on generated characters."""

from meml_jax.tables import Row, Table

TABLE = Table(
    title="Mini",
    config="configs/quickstart.py",
    rows={
        "oracle": Row({"sgd": "Oracle MEML"}, values={"tasks.labels": "true"}),
        "oml": Row({"sgd": "OML"}, values={"learner": "oml"}),
        "meml": Row({"sgd": "MEML"}),
    },
    smoke=SMOKE,
)
'''


@functools.cache
def program():
    """The module `experiments/tables.py`, on the same `run` as other tests."""
    sys.modules["run"] = programs.program()
    spec = importlib.util.spec_from_file_location("tables_program", ROOT / "experiments/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(*args):
    """Call the program's `main`: (exit code, standard output, standard error)."""
    for name in program().FLAGS:
        program().FLAGS[name].unparse()
    precision = jax.config.jax_default_matmul_precision
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = program().main(["tables.py", *map(str, args)])
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def mini(tmp_path):
    """The file of a small table, with settings that other tests have compiled."""
    fields = {k: v for k, v in programs.TINY.items() if not k.startswith("test.")}
    fields |= {"test.num_classes": (2, 4), "test.runs": 2, "test.learning_rates": (0.01, 0.001)}
    fields |= {"train.steps": 40, "train.log_every": 20, "train.checkpoint_every": 20}
    fields |= {"embedding.dim": 64}
    path = tmp_path / "mini.py"
    path.write_text(MINI.replace("SMOKE", repr(fields)))
    return path


# Rows as data.


@functools.cache
def table(name):
    return tables.load(name, ROOT)


def settings(name, row, budget="paper", seed=0, **choice):
    return tables.settings(table(name), row, ROOT, Choice(budget, **choice), seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_every_table_resolves_in_every_budget(name):
    for budget in tables.BUDGETS:
        every = {row: settings(name, row, budget, seed=3) for row in table(name).rows}
        for row, config in every.items():
            checks.before_loading(config)
            assert config.seed == 3
            for head in table(name).rows[row].lines:
                assert head in config.test.heads or config.episodes.ways, (budget, row, head)
        # No budget makes two rows the same.
        values = [json.dumps(dataclasses.asdict(config)) for config in every.values()]
        assert len(set(values)) == len(values), budget
        steps = {each.train.steps for each in every.values()} - {1}  # best: nothing is trained
        if budget != "paper":
            assert steps == {10_000 if budget == "short" else 50 if name == "few_shot" else 100}
    trained = {settings(name, row).train.steps for row in table(name).rows} - {1}
    short_of_the_paper = {"few_shot": {20_000}, "best": {10_000}}
    photographs = name in ("mini_imagenet", "slimagenet64", "sela")
    if name in ("ood", "cost"):
        photographs, trained = False, trained - {200_000}
    assert trained == short_of_the_paper.get(name, {200_000 if photographs else 40_000})


def test_lines_stand_beside_the_numbers_of_the_paper():
    found, without = {}, set()
    for name in NAMES:
        configs = {row: settings(name, row) for row in table(name).rows}
        for line in comparison.make_lines(table(name), configs, {}):
            found[name, line.title, line.part] = tuple(line.paper.values())
            named = line.paper or name in ("cost", "best")
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


def test_what_a_row_is(tmp_path):
    config = settings("omniglot", "oml_balanced_500", "short")
    assert (config.learner, config.tasks.balance, config.clustering.num_clusters) == (
        "oml", "truncate", 500,
    )  # fmt: skip
    for name, row in (("omniglot", "meml"), ("few_shot", "cactus_balanced_20_5")):
        assert settings(name, row).embedding.name == "acai"
        assert settings(name, row, presets="contrastive").embedding.name == "contrastive"
    (tmp_path / "omniglot").mkdir()
    config = settings("film_cifar100", "oracle_oml", data_root=tmp_path)
    assert config.data.dir == str(tmp_path / "omniglot") and config.test_data.dir is None
    overrides = ("--config.train.steps=7", "--config.test.num_classes=(2,4)")
    config = settings("omniglot", "meml", "short", overrides=overrides)
    assert config.train.steps == 7 and config.test.num_classes == (2, 4)
    flags = table_flags.flags_for(table("omniglot"), "meml", ROOT, config)
    assert flags.text == "--budget=paper --config.train.steps=7 '--config.test.num_classes=(2,4,)'"
    assert flags.replaced == (40_000, (10, 50, 75, 100, 150, 200))


def test_flags_give_back_the_settings(tmp_path):
    overrides = ("--config.train.steps=20000", "--config.network.channels=64")
    for name, row in (
        ("omniglot", "meml_mean"),
        ("few_shot", "maml_20_5"),
        ("ood", "meml_omniglot"),
    ):
        config = settings(name, row, "smoke", seed=5, overrides=overrides)
        words = table_flags.flags_for(table(name), row, ROOT, config).text.replace("'", "").split()
        budget = words.pop(0).removeprefix("--budget=")
        assert settings(name, row, budget, seed=5, overrides=tuple(words)) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--table=omniglott"], "--table='omniglott', expected one of ['best', 'cost', "),
        ([], "--table=NAME is needed"),
        (["--table=omniglot", "--rows=oml,memll"], "'memll', expected one or more of oracle_"),
        (["--table=omniglot", "--rows=oml,memll"], "; did you mean 'meml'?"),
        (["--table=omniglot", "--config.learner=oml"], "differ in it: 'oml' in oracle_oml, 'meml'"),
        (["--table=omniglot", "--config.seed=1"], "use --seeds=0,1 instead"),
        (["--table=omniglot", "--config.seeds=2"], "use --seeds=0,1 instead"),
        (["--table=omniglot", "--config.trian.steps=3"], "did you mean 'train.steps'?"),
        (["--table=omniglot", "--config.train.steps", "many"], "train.steps=many"),
        (["--table=omniglot", "--config.train.steps=0"], "train.steps=0, expected at least 1"),
        (["--table=omniglot", "--seeds=0,x"], "--seeds=0,x, expected numbers"),
        (["--table=omniglot", "--presets=acaii"], "unknown preset 'acaii'"),
        (["--table=best", "--presets=contrastive"], "than row 'embedding', which is one of 'con"),
        (["--table=ood", "--presets=contrastive"], "which is one of 'deepcluster'; leave"),
        (["--table=omniglot", "--presets=oml"], "of learner='meml', got 'oml'"),
        (["--table=omniglot", "--rows=oml", "--config.learner=meml"], "learner='oml', got 'meml'"),
        (["--table=few_shot", "--presets=shots5", "--rows=maml_20_1"], "episodes.shots=1, got 5"),
        (["--table=omniglot", "--rows="], "--rows is empty, expected one or more of oracle_oml,"),
        (["--table=omniglot", "--data_root="], "--data_root is empty, expected a path"),
        (["--table=omniglot", "--seeds=²"], "--seeds=², expected numbers"),
        (["--table=omniglot", "--budget=huge"], "huge"),
        (["--table=omniglot", "--row=oml"], "Unknown command line flag 'row'"),
        (["--table=omniglot", "oml"], "got the argument 'oml'"),
        (["--table=omniglot", "--data_root=missing"], "--data_root=missing: there is no such"),
    ],
)
def test_wrong_command_lines(tmp_path, flags, message):
    code, out, err = call(f"--results={tmp_path / 'results'}", *flags)
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1, out + err
    assert message in err
    assert not (tmp_path / "results").exists()


def test_rows_that_start_from_several_files_take_the_presets_that_they_have(tmp_path, undrawn):
    """One file's presets, and one call's overrides, need not fit the rows of another file."""
    of_rows = functools.partial(table_flags.presets_of, table("cost"), root=ROOT)
    assert of_rows("omniglot_oml", presets="coreset500") == "coreset500"
    assert of_rows("mini_imagenet_oml", presets="coreset500") == ""
    assert of_rows("omniglot_oml", presets="contrastive") == ""  # the row's embedding is PCA
    for name in ("omniglot_oml", "mini_imagenet_oml"):  # as two calls make them
        config = settings("cost", name, overrides=("--config.train.steps=400",))
        folder = tmp_path / "cost" / name / "seed0"
        folder.mkdir(parents=True)
        stored = results(config, sgd=(0.5, 0.5))
        (folder / "results.json").write_text(json.dumps(stored))
    flags = ("--table=cost", f"--results={tmp_path}", "--presets=coreset500", "--report_only")
    flags += ("--rows=omniglot_oml",)
    code, out, err = call(*flags)
    text = (tmp_path / "cost" / "report.md").read_text()
    commands = re.findall("^ +python .*--table=cost (--rows.*)", text, re.MULTILINE)
    assert code == 0 and len(commands) == 2, (out, err, commands)
    for command in commands:
        words = command.replace("--data_root=DIR", f"--data_root={tmp_path}")
        assert call("--table=cost", *shlex.split(words), "--report_only")[0] == 0


def test_how_long_and_what_of_a_row_is_tested_is_free():
    """Though another row of the part is one that is hardly trained, and tested in one way."""
    flags = ("--table=best", "--rows=meml", "--config.train.steps=5", "--report_only")
    flags += ("--config.test.heads=(prototype,)", f"--results={ROOT / 'nowhere'}")
    with contextlib.redirect_stdout(io.StringIO()):
        _, runs = program().parse(["tables.py", *flags])
    for name in program().FLAGS:
        program().FLAGS[name].unparse()
    assert runs["meml", 0].test.heads == ("prototype",) and runs["meml", 0].train.steps == 5


def test_several_hosts_are_refused(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    code, _, err = call("--table=omniglot")
    assert code == 2 and err.startswith("error: JAX_PROCESS_ID set, which joins processes")


def test_data_that_are_not_below_the_root_are_named(tmp_path, done):
    (tmp_path / "data" / "omniglot").mkdir(parents=True)
    configs = [
        settings("film_cifar100", "oracle_oml", data_root=tmp_path / "data"),
        settings("omniglot", "oml", data_root=tmp_path / "data"),
    ]
    assert tables.data_without_folder(configs) == ["cifar100"]
    assert tables.data_without_folder([configs[1]]) == []
    flags = ("--table=film_cifar100", "--rows=oracle_oml", f"--data_root={tmp_path / 'data'}")
    _, out, _ = call(*flags, f"--results={tmp_path}", "--budget=smoke")
    assert out.splitlines()[0] == (
        f"data: {tmp_path / 'data'} has no folder cifar100; it is fetched, if that can be"
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("{}", "expected rows by name, one or more"),
        ("{'a/b': Row({'sgd': 'x'})}", "got a row 'a/b', expected the name of a folder"),
        ("{'x,y': Row({'sgd': 'x'})}", "got a row 'x,y', expected the name of a folder"),
        ("{'..': Row({'sgd': 'x'})}", "got a row '..', expected the name of a folder"),
        ("{1: Row({'sgd': 'x'})}", "got a row 1, expected the name of a folder"),
        ("{'a': Row('MEML')}", "expected a tables.Row with lines by head"),
        ("{'a': Row({})}", "expected a tables.Row with lines by head"),
        ("{'a': Row({'sgd': 3})}", "expected text, and values by field"),
        ("{'a': Row({'sgd': 'x'}, values={'seeds': 2})}", "sets its seed; leave it to --seeds=0,1"),
        ("{'a': Row({'sgd': 'x'}, beside='b')}", "beside='b', expected another row of its part"),
        ("{'a': Row({'sgd': 'x'}), 'b': Row({'sgd': 'y'}, 'none')}", "row 'b' (configs/quickstart"),
        ("{'a': Row({'sgd': 'x'})}, smoke={'train.stepz': 1}", "did you mean 'train.steps'"),
        ("{'a': Row({'sgd': 'x'})}, smoke=3", "got smoke=3, expected settings by field"),
    ],
)
def test_tables_that_cannot_be(tmp_path, rows, message):
    path = tmp_path / "own.py"
    path.write_text(
        "from meml_jax.tables import Row, Table\n"
        f"TABLE = Table(title='t', config='configs/quickstart.py', rows={rows})\n"
    )
    code, out, err = call(f"--table={path}", f"--results={tmp_path / 'results'}")
    assert code == 2 and message in err and len(err.splitlines()) == 1, out + err
    assert not (tmp_path / "results").exists()


def test_flags_say_what_a_flag_can_say():
    """None is no value on a command line, so another budget is named, with more overrides."""
    near = ("--config.train.steps=10000", "--config.network.channels=64")
    config = settings("best", "meml", "smoke", overrides=(*near, "--config.network.hidden=256"))
    flags = table_flags.flags_for(table("best"), "meml", ROOT, config)
    assert config.outer.fen_lr is None and "=None" not in flags.text
    assert flags.text.startswith("--budget=smoke ")
    presets = table_flags.flags_for(
        table("omniglot"), "meml", ROOT, config, presets="contrastive, smoke"
    )
    assert "'--presets=contrastive, smoke'" in presets.text


def test_a_row_that_leaves_clusters_open_gets_those_that_were_chosen(tmp_path):
    row = "values={'clustering.num_clusters': %d}"
    path = tmp_path / "own.py"
    path.write_text(
        "from meml_jax.tables import Row, Table\n"
        "TABLE = Table(title='t', config='configs/quickstart.py', rows={"
        f"'open': Row({{'sgd': 'x'}}, {row % 0}), 'set': Row({{'sgd': 'y'}}, {row % 16})}})\n"
    )
    own, clusters = tables.load(str(path), ROOT), "--config.clustering.num_clusters=28"
    for name, fits in (("open", True), ("set", False)):
        config = tables.settings(own, name, ROOT, Choice(overrides=(clusters,)), seed=0)
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="is one of"):
            tables.check_rows(own, {name: config}, ROOT, "paper")


def test_one_dash_is_as_good_as_two():
    argv = ["t", "-config.a.b=1", "-config", "f.py", "--config.c", "-5"]
    split = (("--config.a.b=1", "--config.c=-5"), ["t", "--config", "f.py"])
    assert program().split_overrides(argv) == split


def test_help_shows_how():
    code, text, _ = call("--help")
    assert code == 0 and "--table=omniglot" in text and "--report_only" in text


# Numbers, by hand.


def point(accuracies, n=10, **fields):
    a = np.asarray(accuracies, float)
    half = scipy.stats.t.ppf(0.975, len(a) - 1) * a.std(ddof=1) / len(a) ** 0.5
    return {
        "num_classes": n, "runs": len(a), "accuracy": float(a.mean()), "ci95": float(half),
        "chance": 1 / n, "accuracies": [float(x) for x in a], "seconds": 2.0, "learning_rate": 0.1,
    } | fields  # fmt: skip


def test_one_seed_keeps_its_interval():
    cell = comparison.combine([point([0.5, 0.7])])
    assert cell == (0.6, point([0.5, 0.7])["ci95"], 2, 0.1, (0.6,))


def test_several_seeds_have_the_interval_over_seeds():
    cell = comparison.combine([point([0.4, 0.4]), point([0.5, 0.7]), point([0.8, 0.8])])
    # Variance of 0.4, 0.6, 0.8: 0.04; three seeds; t of 2.
    assert cell.accuracy == pytest.approx(0.6) and cell.runs == 6
    assert cell.ci95 == pytest.approx(4.302653 * (0.04 / 3) ** 0.5, rel=1e-6)
    assert cell.by_seed == pytest.approx((0.4, 0.6, 0.8))


def test_two_seeds_have_the_interval_over_their_runs():
    cell = comparison.combine([point([0.4, 0.6]), point([0.5, 0.7])])
    assert cell.accuracy == pytest.approx(0.55) and cell.runs == 4
    # Variances 0.02; t of two degrees of freedom; what lies between the seeds is not in it.
    assert cell.ci95 == pytest.approx(4.302653 * (0.02 / 2 + 0.02 / 2) ** 0.5 / 2, rel=1e-6)


def test_oracles_are_the_best_only_where_all_rows_are():
    def line(kind, accuracy):
        cell = comparison.Cell(accuracy, 0.01, 50, 0.1, (accuracy,))
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
        cell = comparison.Cell(accuracy, 0.01, 50, 0.1, (accuracy,))
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
    cell = comparison.Cell(0.5, 0.02, 50, 0.1, (0.5,))
    verdicts = {47.9: "above", 48.1: "within", 50.0: "within", 51.9: "within", 52.1: "below"}
    assert {x: comparison.verdict(cell, Published(x)) for x in verdicts} == verdicts


def test_intervals_that_overlap_are_within():
    cell = comparison.Cell(0.20, 0.01, 50, 0.05, (0.2,))
    verdicts = {None: "above", 0.0: "above", 3.0: "above", 3.2: "within", 8.3: "within"}
    assert {x: comparison.verdict(cell, Published(15.9, x)) for x in verdicts} == verdicts
    assert comparison.verdict(cell, Published(24.0, 2.0)) == "below"


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
        cell = comparison.Cell(float(np.mean(accuracies)), half, len(accuracies), 1 / n, ())
        assert comparison.verdict(cell, Published(49.3)) == said
        assert (said in comparison.COMPARED) == (said == "above")


def results(config, *, sgd, prototype=(0.8, 0.9), pixels=(0.5, 0.6), **fields):
    """What a run stores, with the accuracies of its runs at 10 classes; half as much at 50."""

    def curve(head, accuracies, **names):
        half = [a / 2 for a in accuracies]
        return {"head": head, "protocol": "clean"} | names | {
            "points": [point(accuracies), point(half, 50)]
        }  # fmt: skip

    oracle = config.tasks.labels == "true"
    return {
        "dataset": "omniglot", "note": "", "device": "cpu", "commit": "abc",
        "points_version": points_version(config),
        "embedding": None if oracle else {"name": config.embedding.name},
        "clustering": {"labels": config.tasks.labels, "kept": 9, "purity": 0.5, "seconds": 3.0},
        "meta_train": {
            "steps": config.train.steps, "seconds": 100.0, "steps_per_second": 5.0,
            "peak_bytes": 3 * 2**20,
        },
        "meta_test": curve("sgd", sgd) | {"checkpoint_step": config.train.steps},
        "comparisons": [
            curve("prototype", prototype, name="prototype head"),
            curve("pixels", pixels, name="baseline: raw pixels"),
        ],
        "config": dataclasses.asdict(config),
    } | fields  # fmt: skip


@pytest.fixture
def stored(tmp_path):
    """Results of three rows of Table 1, one of them with two seeds."""
    for row, seed, fields in (
        ("oracle_oml", 0, {"sgd": (0.9, 0.92)}),
        ("oml", 0, {"sgd": (0.70, 0.70), "note": "PART of omniglot"}),
        ("meml", 0, {"sgd": (0.85, 0.85)}),
        ("meml", 1, {"sgd": (0.85, 0.85)}),
    ):
        config = settings("omniglot", row, "short", seed)
        folder = tmp_path / "omniglot" / row / f"seed{seed}"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(results(config, **fields)))
        (folder / "embedding.json").write_text('{"name": "x", "seconds": 40.0}')
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the figures, which take longer than all else."""

    def draw(lines, path, *, title):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    monkeypatch.setattr(table_report.table_figures, "draw", draw)


def cells(text, name):
    found = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    return found and found[1].split(" | ")


def test_report(stored):
    code, out, err = call("--table=omniglot", f"--results={stored}", "--report_only")
    assert code == 0, out + err
    text = (stored / "omniglot" / "report.md").read_text()
    assert cells(text, "classes")[3:] == ["10", "50", "75", "100", "150", "200"]
    # Accuracies 70 and 35 with an interval of 0, against 74.6 and 32.5.
    assert cells(text, "OML")[:5] == [
        "10000", "0", "2", "70.0 ± 0.0, no spread (paper 74.6)",
        "35.0 ± 0.0, no spread (paper 32.5)",
    ]  # fmt: skip
    assert cells(text, "MEML")[:5] == [
        "10000", "0, 1", "4", "**85.0 ± 0.0**, no spread (paper 84.6)",
        "**42.5 ± 0.0**, no spread (paper 37.3)",
    ]  # fmt: skip
    assert cells(text, "MEML")[8] == "- (paper 20.7)"
    # t of one degree of freedom: 12.706 times 0.01; the oracle is better, but has labels.
    assert cells(text, "Oracle OML")[3:5] == ["91.0 ± 12.7, within 88.4", "45.5 ± 6.4, below 74.0"]
    assert "± of two seeds is that of their mean, over the runs of each." in text
    assert cells(text, "MEML mean")[:5] == ["-", "-", "-", "- (paper 60.6)", "- (paper 31.2)"]
    assert cells(text, "MEML RS")[3:5] == ["- (paper 81.6)", "- (paper 56.4)"]
    # One with the seeds of each row, as they decide on what is tested.
    for rows, seeds, runs in (("oracle_oml, oml", "0", "2"), ("meml", "0, 1", "4")):
        title = f"baseline: raw pixels (test classes of omniglot, beside {rows})"
        assert cells(text, title)[:3] == ["-", seeds, runs]
    assert cells(text, "chance")[3:5] == ["10.0", "2.0"]
    # The oracle's prototype head is as good as theirs, and not in bold.
    assert cells(text, "Oracle OML, prototype head")[3].startswith("85.0")
    assert cells(text, "MEML, prototype head")[3].startswith("**85.0")
    assert "Data: PART of omniglot." in text
    # Train 100 s, test 3 curves of 2 points of 2 s.
    assert cells(text, "meml") == [
        "0, 1", "acai", "9", "0.500", "40", "3", "100", "12", "cpu", "abc",
    ]  # fmt: skip
    assert cells(text, "oracle_oml")[1:4] == ["true classes", "9", "-"]
    cost = text.split("## Cost")[1]
    assert cells(cost, "meml") == [
        "10000", "100", "5.0", "3", "40000", "0 h 47 min", "0.743 GB",
    ]  # fmt: skip
    assert cells(cost, "oracle_oml")[-1] == "-"
    config = override(settings("omniglot", "meml", "short"), {"train.steps": 1})
    path = stored / "omniglot" / "meml" / "seed0" / "results.json"
    path.write_text(json.dumps(results(config, sgd=(0.5, 0.5))))
    shutil.rmtree(stored / "omniglot" / "meml" / "seed1")
    call("--table=omniglot", f"--results={stored}", "--report_only")
    cost = (stored / "omniglot" / "report.md").read_text().split("## Cost")[1]
    assert cells(cost, "meml")[-3:] == ["-", "-", "-"]
    every = "--rows=meml --seeds=0,1 --data_root=DIR --budget=short"
    assert f"    python experiments/tables.py --table=omniglot {every}\n" in text
    assert (stored / "omniglot" / "figures" / "accuracy.png").stat().st_size > 10_000


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

    title = "baseline: raw pixels"
    both = {f"{title} (all classes of cifar100)": 0.25, f"{title} (test classes of cifar100)": 0.55}
    assert baselines() == both and list(baselines()) == list(both)  # of most rows first
    # Another number of runs is another test.
    other = override(settings("ood", "meml_mini_imagenet", "short"), {"test.runs": 7})
    same_images = {"content_hash": "meml_mini_imagenet", "test_hash": "cifar"}
    found["meml_mini_imagenet"] = {0: results(other, sgd=(0.4, 0.4), **same_images)}
    assert set(baselines()) == {
        f"{title} (test classes of cifar100)",
        f"{title} (all classes of cifar100, beside oracle_meml_mini_imagenet)",
        f"{title} (all classes of cifar100, beside meml_mini_imagenet)",
    }
    del found["oracle_meml_mini_imagenet"], found["meml_mini_imagenet"]
    assert baselines() == {title: 0.55}


@pytest.mark.parametrize("field", ["network.channels", "network.hidden"])
def test_the_cost_of_a_narrower_network_is_not_put_beside_the_papers(field):
    for values, last in (({}, "0.743 GB"), ({field: 64}, "-")):
        config = override(settings("omniglot", "meml", "short"), values)
        found = {"meml": {0: results(config, sgd=(0.5, 0.5))}}
        configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
        lines = comparison.make_lines(table("omniglot"), configs, found)
        [row] = table_sheets.make_sheets(lines)[-1].rows
        assert row[-1] == last, row


def test_the_page_shows_the_attention_of_a_training(stored):
    for row in ("oracle_oml", "oml", "meml"):
        folder = stored / "omniglot" / row / "seed0" / "figures"
        folder.mkdir(exist_ok=True)
        for name in ("clusters", "feature_maps"):
            (folder / f"{name}.png").write_bytes(f"{row} {name}".encode())
    assert call("--table=omniglot", f"--results={stored}", "--report_only")[0] == 0
    page = (stored / "omniglot" / "report.html").read_text()
    for name in ("clusters", "feature_maps"):
        shown = base64.b64encode(f"meml {name}".encode()).decode()
        assert page.count(f"base64,{shown}") == 1
    text = (stored / "omniglot" / "report.md").read_text()
    assert "](meml/seed0/figures/clusters.png)" in text and "](oml/seed0" not in text
    for name, caption in (
        ("clusters", "MEML, seed 0: attention in some clusters"),
        ("feature_maps", "MEML, seed 0: images of some clusters, and what the convolutions"),
    ):
        assert f"meml/seed0/figures/{name}.png)\n\n{caption}" in text
        assert f"<figcaption>{caption}" in page
    assert page.count("<figure>") == page.count("</figcaption></figure>") == text.count("![")


def test_the_figures_of_an_oracle_are_of_true_classes(tmp_path):
    folder = tmp_path / "oracle_meml" / "seed3" / "figures"
    folder.mkdir(parents=True)
    for name in ("clusters", "feature_maps"):
        (folder / f"{name}.png").touch()
    found = {"oracle_meml": {3: results(settings("omniglot", "oracle_meml"), sgd=(0.9, 0.9))}}
    configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
    lines = comparison.make_lines(table("omniglot"), configs, found)
    assert list(table_report._of_a_training(tmp_path, lines).values()) == [
        "Oracle MEML, seed 3: attention in some true classes",
        "Oracle MEML, seed 3: images of some true classes, and what the convolutions make of them",
    ]


def test_a_document_has_figures_or_not(stored, undrawn):
    folder = stored / "omniglot" / "meml" / "seed0" / "figures"
    folder.mkdir()
    for name in ("clusters", "feature_maps"):
        (folder / f"{name}.png").write_bytes(name.encode())
    path, kept = stored / "doc.md", stored / "doc" / "omniglot"
    flags = ("--table=omniglot", "--report_only", f"--write_docs={path}")
    assert call(*flags, f"--results={stored}", "--nofigures")[0] == 0
    assert "![" not in path.read_text() and not any(kept.rglob("*.png"))
    assert call(*flags, f"--results={stored}")[0] == 0
    first = path.read_text()
    assert "](doc/omniglot/meml/seed0/figures/clusters.png)" in first
    assert (kept / "meml" / "seed0" / "figures" / "clusters.png").read_bytes() == b"clusters"
    assert call(*flags, f"--results={stored / 'doc'}")[0] == 0 and path.read_text() == first


def test_csv_and_page(stored):
    assert call("--table=omniglot", f"--results={stored}", "--report_only")[0] == 0
    with (stored / "omniglot" / "report.csv").open() as file:
        rows = {(row["line"], row["at"]): row for row in csv.DictReader(file)}
    meml = rows["MEML", "50"]
    assert (meml["paper"], meml["ours"], meml["ci95"]) == ("37.3", "42.50", "0.00")
    assert (meml["verdict"], meml["seeds"], meml["by_seed"]) == ("no spread", "0 1", "42.50 42.50")
    assert (rows["Oracle OML", "10"]["verdict"], rows["Oracle OML", "10"]["paper"]) == (
        "within", "88.4",
    )  # fmt: skip
    assert rows["MEML RS", "200"]["paper"] == "27.4" and not rows["MEML RS", "200"]["ours"]
    page = (stored / "omniglot" / "report.html").read_text()
    assert "<b>85.0 ± 0.0</b>, no spread (paper 84.6)" in page and "**" not in page

    class Tags(html.parser.HTMLParser):
        sources, depth = [], 0

        def handle_starttag(self, tag, attributes):
            self.depth += tag == "table"
            self.sources += [v for k, v in attributes if k in ("src", "href")]

        def handle_endtag(self, tag):
            self.depth -= tag == "table"

    tags = Tags()
    tags.feed(page)
    assert tags.depth == 0 and len(tags.sources) == 2  # curves, and accuracy against cost
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in tags.sources)


def test_rows_are_put_against_each_other(stored, undrawn):
    folder = stored / "omniglot"
    for row in ("oml", "meml"):
        path = folder / row / "seed0" / "results.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"note": ""}))
    assert call("--table=omniglot", f"--results={stored}", "--report_only")[0] == 0
    text = (folder / "report.md").read_text()
    assert "## Differences" in text
    assert cells(text, "OML - MEML") == ["0", "-15.0 ± 0.0", "-7.5 ± 0.0"]
    # The oracle's runs are 20 and 22 points above; t of one degree of freedom.
    assert cells(text, "Oracle OML - OML") == ["0", "+21.0 ± 12.7", "+10.5 ± 6.4"]


def test_parts_of_which_nothing_is_measured_are_left_out(tmp_path, undrawn):
    folder = tmp_path / "best" / "meml_official" / "seed0"
    for there in (False, True):
        if there:
            folder.mkdir(parents=True)
            content = results(settings("best", "meml_official"), sgd=(0.9, 0.9))
            (folder / "results.json").write_text(json.dumps(content))
        call("--table=best", f"--results={tmp_path}", "--report_only")
        text = (tmp_path / "best" / "report.md").read_text()
        assert ("## Random split" in text) == ("](figures/part1.png)" in text) == (not there)
        assert "## Official split" in text and ("](figures/part2.png)" in text) == there


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


def test_what_cannot_be_read_is_left_out_and_said(stored, undrawn):
    path = stored / "omniglot" / "meml" / "seed0" / "results.json"
    path.write_text(path.read_text()[:100])
    foreign = stored / "omniglot" / "oml" / "seed0" / "results.json"
    foreign.write_text(foreign.read_text().replace('"learner"', '"learned"'))
    code, out, _ = call("--table=omniglot", f"--results={stored}", "--report_only")
    assert code == 0 and f"left out: {path} (" in out
    assert f"left out: {foreign} (unknown config field 'learned'" in out
    text = (stored / "omniglot" / "report.md").read_text()
    assert cells(text, "MEML")[1] == "1" and cells(text, "OML")[0] == "-"


def test_the_report_of_nothing_has_the_numbers_of_the_paper(tmp_path):
    assert call("--table=ood", f"--results={tmp_path}", "--report_only")[0] == 0
    text = (tmp_path / "ood" / "report.md").read_text()
    assert text.count("- (paper ") == 30 and "## CIFAR-100" in text and "## CUB" in text
    assert len(list((tmp_path / "ood" / "figures").glob("*.png"))) == 2


def test_the_numbers_of_the_paper_lie_inside_a_figure_without_ours(monkeypatch):
    kept = []
    monkeypatch.setattr(table_figures.figures, "save", lambda figure, path: kept.append(figure))
    for name in ("omniglot", "few_shot"):
        configs = {row: settings(name, row) for row in table(name).rows}
        lines = [x for x in comparison.make_lines(table(name), configs, {}) if x.paper]
        table_figures.draw(lines, "none.png", title="")
        points = 0
        for ax in kept[-1].axes:
            low, high = ax.get_xlim()
            drawn = np.concatenate([line.get_xdata() for line in ax.lines] or [np.zeros(0)])
            assert np.all((low < drawn) & (drawn < high))
            points += len(drawn)
        assert points == sum(len(line.paper) for line in lines)


def test_a_head_that_was_not_run_is_said_and_one_of_nobody_left_out(monkeypatch):
    kept = []
    monkeypatch.setattr(table_figures.figures, "save", lambda figure, path: kept.append(figure))
    configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
    found = {"meml": {0: results(settings("omniglot", "meml", "short"), sgd=(0.5, 0.5))}}
    lines = comparison.make_lines(table("omniglot"), configs, found)
    assert any(line.head == "sgd_reservoir" and line.paper for line in lines)
    bare = [
        dataclasses.replace(line, paper={}) if line.head == "sgd_reservoir" else line
        for line in lines
    ]
    for some, heads in (
        (lines, ("sgd", "sgd_reservoir", "prototype")),
        (bare, ("sgd", "prototype")),
    ):
        table_figures.draw(some, "none.png", title="")
        ours = {ax.get_title(loc="left"): ax for ax in kept[-1].axes[::2]}
        assert sorted(ours) == sorted(table_figures._head_name(lines, head) for head in heads)
        for name, ax in ours.items():
            assert bool(ax.lines) == ("reservoir" not in name)
            assert [text.get_text() for text in ax.texts] == ["not run"] * (not ax.lines)


def test_a_row_looks_the_same_in_all_figures_of_its_part(monkeypatch):
    kept = []
    monkeypatch.setattr(table_figures.figures, "save", lambda figure, path: kept.append(figure))
    configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
    found = {
        row: {0: results(settings("omniglot", row, "short"), sgd=(0.5, 0.6))}
        for row in ("meml", "oml", "oracle_meml")
    }
    reservoir = found["meml"][0]["comparisons"][0] | {"head": "sgd_reservoir"}
    found["meml"][0]["comparisons"].append(reservoir)
    lines = comparison.make_lines(table("omniglot"), configs, found)
    table_figures.draw(lines, "none.png", title="")
    assert table_figures.draw_cost(lines, "none.png", title="")

    def looks(ax):
        """Of what is drawn with intervals, in the order of the lines."""
        drawn = [bars.lines[0] for bars in ax.containers]
        return [(one.get_color(), one.get_marker(), one.get_fillstyle()) for one in drawn]

    curves, [cost] = kept[0].axes[::2], kept[1].axes
    sgd, _, reservoir = map(looks, curves)
    names = [bars.get_label() for bars in cost.containers]
    assert names == ["Oracle MEML", "OML", "MEML", "MEML RS"]
    oracle, oml, meml, with_reservoir = looks(cost)
    assert [oracle, oml, meml] == sgd and [meml] == reservoir
    assert with_reservoir[:2] == meml[:2] and with_reservoir != meml


def test_a_figure_has_its_part_below_its_title_and_a_caption_in_one_line(tmp_path, monkeypatch):
    titles = []
    for name in ("draw", "draw_cost"):
        monkeypatch.setattr(table_figures, name, lambda *_, title: titles.append(title))
    config = settings("best", "meml_official")
    configs = {row: settings("best", row) for row in table("best").rows}
    found = {"meml_official": {0: results(config, sgd=(0.9, 0.9))}}
    lines = comparison.make_lines(table("best"), configs, found)
    captions = table_report.draw(tmp_path, table("best"), lines)
    head, part = "Beyond the paper: Omniglot, preset best", "Official split: 864, 100, 659 classes"
    assert titles == [f"{head}\n{part}"] * 2 and list(captions.values()) == [f"{head}, {part}"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r["meta_test"].update(points=None),
        lambda r: r["meta_test"].update(points=[]),
        lambda r: r["meta_test"]["points"][0].update(accuracy=float("nan")),
        lambda r: r["comparisons"][0]["points"][0].pop("runs"),
        lambda r: r.update(comparisons=None),
        lambda r: r.pop("clustering"),
        lambda r: r["meta_test"]["points"][0].pop("learning_rate"),
        lambda r: r["meta_test"]["points"][0].update(train_accuracy="x"),
        lambda r: r["meta_test"]["points"][0].update(num_classes=2.0),
        lambda r: r["clustering"].update(seconds="x"),
        lambda r: r["embedding"].update(name=3),
        lambda r: r["meta_train"].update(device=3),
        lambda r: r["meta_train"].update(steps=float("inf")),
        lambda r: r["meta_train"].update(seconds=float("nan")),
    ],
)
def test_damaged_results_are_left_out_and_said(stored, spoil):
    path = stored / "omniglot" / "meml" / "seed0" / "results.json"
    content = json.loads(path.read_text())
    (path.parent / "report.md").touch()
    config = from_dict(content["config"])
    assert stored_results.finished(config, path.parent)
    spoil(content)
    path.write_text(json.dumps(content))
    assert not stored_results.finished(config, path.parent)  # so that it is done again
    (stored / "omniglot" / "meml" / "seed1" / "embedding.json").write_text("[1]")
    lines = []
    found = stored_results.read(stored / "omniglot", say=lines.append)
    assert list(found["meml"]) == [1]
    assert len(lines) == 1 and lines[0].startswith(f"left out: {path} (damaged")


def test_images_without_labels_have_no_purity_and_are_no_damage(stored, undrawn):
    path = stored / "omniglot" / "meml" / "seed0" / "results.json"
    content = json.loads(path.read_text())
    shutil.rmtree(stored / "omniglot" / "meml" / "seed1")
    for purity, shown in ((0.5, "0.500"), (None, "-")):
        content["clustering"]["purity"] = purity
        path.write_text(json.dumps(content))
        code, out, _ = call("--table=omniglot", f"--results={stored}", "--report_only")
        assert code == 0 and "left out" not in out
        text = (stored / "omniglot" / "report.md").read_text()
        assert cells(text, "meml")[:4] == ["0", "acai", "9", shown]
        assert "85.0 ± 0.0" in cells(text, "MEML")[3]


def test_how_an_embedding_was_made_is_kept(stored, undrawn):
    def of(found):
        names = stored_results.EMBEDDED
        return [{n: one[n] for n in names if n in one} for one in found["meml"].values()]

    kept, made = stored / "kept", {"seconds": 5169.5, "commit": "8c6e", "device": "a GPU"}
    second = stored / "omniglot" / "meml" / "seed1" / "embedding.json"
    second.write_text(json.dumps(made | {"name": "acai", "loss": 0.1}))
    expected = [{"embedding_seconds": 40.0}, {f"embedding_{k}": v for k, v in made.items()}]
    found = stored_results.read(stored / "omniglot", say=print)
    assert of(found) == of(stored_results.keep(found, kept)) == expected
    assert of(stored_results.read_kept(kept)) == expected
    assert call("--table=omniglot", f"--results={stored}", "--report_only")[0] == 0
    row = cells((stored / "omniglot" / "report.md").read_text(), "meml")
    assert {"a GPU", "cpu"} == set(row[-2].split("; ")) and "8c6e" in row[-1]
    # Neither is told by what an earlier version has kept, or of what was made outside git.
    second.write_text(json.dumps(made | {"commit": None, "seconds": "?"}))
    found = stored_results.read(stored / "omniglot", say=print)
    assert of(found)[1] == {"embedding_device": "a GPU"}
    path = kept / "meml" / "seed1" / "results.json"
    older = {k: v for k, v in json.loads(path.read_text()).items() if "embedding_" not in k}
    path.write_text(json.dumps(older))
    assert of(stored_results.read_kept(kept)) == [expected[0], {}]


def test_points_of_an_earlier_version_are_left_out_and_said(stored, undrawn):
    path = stored / "omniglot" / "meml" / "seed0" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"points_version": 1}))
    code, out, _ = call("--table=omniglot", f"--results={stored}", "--report_only")
    assert code == 0 and f"left out: {path} (judged as an earlier version did" in out


def test_a_block_of_a_document(stored, undrawn):
    path = stored / "doc.md"
    path.write_text("# Results\n\nTyped.\n")
    flags = ("--table=omniglot", f"--results={stored}", "--report_only", f"--write_docs={path}")
    assert call(*flags)[0] == 0
    first = path.read_text()
    assert first.startswith(
        "# Results\n\nTyped.\n\n<!-- begin omniglot (generated) -->\n\n## Table 1"
    )
    assert cells(first, "OML")[3] == "70.0 ± 0.0, no spread (paper 74.6)"
    assert "![Table 1: Omniglot](doc/omniglot/figures/accuracy.png)" in first
    assert not (stored / "doc" / "omniglot" / "report.md").exists()
    assert (stored / "doc" / "omniglot" / "figures" / "accuracy.png").exists()
    assert call(*flags)[0] == 0 and path.read_text() == first
    assert call(*flags, "--label=other")[0] == 0
    both = path.read_text()
    assert both.startswith(first) and both.count("<!-- begin") == both.count("<!-- end") == 2
    changed = first.replace("70.0", "99.9") + "After.\n"
    path.write_text(changed)
    assert call(*flags)[0] == 0 and path.read_text() == first + "After.\n"
    path.write_text(first.replace("<!-- end omniglot -->", ""))
    code, _, err = call(*flags)
    assert code == 2 and "and after it one `<!-- end omniglot -->`" in err


def test_a_block_is_not_replaced_by_nothing(stored, undrawn, mini, done):
    path, kept = stored / "doc.md", stored / "doc" / "wide"
    flags = ("--table=omniglot", "--report_only", f"--write_docs={path}", "--label=wide")
    assert call(*flags, f"--results={stored}")[0] == 0
    for file in kept.rglob("results.json"):
        file.unlink()
    before = programs.snapshot(stored)
    for results_folder in (kept, stored / "none"):
        code, out, err = call(*flags, f"--results={results_folder}")
        assert code == 2 and out == ""
        said = f"nothing of use is stored in {results_folder / 'omniglot'}, so the block "
        assert err.startswith(f"error: {said}'omniglot, wide' is left as it is; name the --results")
        assert programs.snapshot(stored) == before
    code, _, err = call(*flags[:3], f"--results={stored / 'none'}", "--label=new")
    assert code == 2 and "nothing of use is stored in" in err
    assert not (stored / "doc" / "new").exists()
    paths = sorted((stored / "omniglot").glob("*/seed*/results.json"))
    for old in paths:
        old.write_text(json.dumps(json.loads(old.read_text()) | {"points_version": 1}))
    code, _, err = call(*flags[:3], f"--results={stored}", "--label=new")
    why = f"(left out: {paths[0]} (judged as an earlier version did; the same command judges anew)"
    assert code == 2 and f"{why}; {len(paths)} in all)" in err
    # Where all rows fail there is nothing either.
    more = (f"--table={mini}", "--budget=smoke", "--rows=oml", f"--results={stored / 'new'}")
    code, out, _ = call(*more, f"--write_docs={path}", "--label=new")
    assert code == 1 and "the block 'mini, new' is left as it is" in out
    assert "mini" not in path.read_text()


def test_a_block_is_made_of_what_is_kept_beside_the_document(stored, undrawn, monkeypatch):
    path, reads, read_kept = stored / "doc.md", [], stored_results.read_kept

    def counted(folder, *, say):
        reads.append(folder)
        return read_kept(folder, say=say)

    monkeypatch.setattr(stored_results, "read_kept", counted)
    flags = ("--table=omniglot", "--report_only", f"--write_docs={path}", "--label=Narrow, 1,000")
    config = override(settings("omniglot", "meml", "short", 0), {"data.dir": "/home/me/data"})
    meml = stored / "omniglot" / "meml"
    (meml / "seed0" / "results.json").write_text(json.dumps(results(config, sgd=(0.85, 0.85))))
    assert call(*flags, f"--results={stored}")[0] == 0
    first, kept = path.read_text(), stored / "doc" / "Narrow, 1,000"
    assert len(reads) == 2  # before the work, and after it
    assert cells(first, "MEML")[1] == "0, 1" and cells(first, "meml")[4] == "40"
    assert not any("/home/me" in file.read_text() for file in kept.rglob("*.json"))
    # From these alone; and with what another results folder has, of which the first is gone.
    assert call(*flags, f"--results={kept}")[0] == 0 and path.read_text() == first
    shutil.rmtree(meml / "seed1")
    other = override(config, {"seed": 2})
    (meml / "seed0" / "results.json").write_text(json.dumps(results(other, sgd=(0.85, 0.85))))
    (meml / "seed0").rename(meml / "seed2")
    assert call(*flags, f"--results={stored}")[0] == 0
    assert cells(path.read_text(), "MEML")[1] == "0, 1, 2"
    assert cells((stored / "omniglot" / "report.md").read_text(), "MEML")[1] == "2"
    # Nothing that is kept gives way to something else.
    (meml / "seed2").rename(meml / "seed0")
    other = override(config, {"outer.lr": 9.0})
    (meml / "seed0" / "results.json").write_text(json.dumps(results(other, sgd=(0.1, 0.1))))
    before = path.read_text()
    code, _, err = call(*flags, f"--results={stored}")
    assert code == 2 and "meml/seed0 keeps results of another outer.lr: 0.0001, now 9.0" in err
    moved = results(config, sgd=(0.85, 0.85), content_hash="other images")
    (meml / "seed0" / "results.json").write_text(json.dumps(moved))
    code, _, err = call(*flags, f"--results={stored}")
    assert code == 2 and "keeps results on other images" in err and path.read_text() == before
    both = moved, results(other, sgd=(0.1, 0.1))
    for content, seed in zip(both, ("seed0", "seed7"), strict=True):  # all or nothing is kept
        (meml / seed).mkdir(exist_ok=True)
        (meml / seed / "results.json").write_text(json.dumps(content | {"seed": 7}))
    assert call(*flags, f"--results={stored}")[0] == 2
    assert not (kept / "omniglot" / "meml" / "seed7").exists()
    shutil.rmtree(meml / "seed7")
    (meml / "seed0" / "results.json").unlink()
    code, _, err = call("--table=omniglot", f"--write_docs={path}", "--label=Narrow, 1,000")
    assert code == 2 and "oracle_oml/seed0 keeps results of another train.steps: 10000" in err
    for label, message in (
        ("a/b", "the name of a folder"), ("..", "the name of a folder"), ("-->", "no `--`"),
        ("a\nb", "no line break"), ("\udcff", "no line break"),
    ):  # fmt: skip
        code, _, err = call(*flags[:3], f"--results={stored}", f"--label={label}")
        assert code == 2 and message in err, label
    report = stored / "omniglot" / "report.md"
    code, _, err = call(*flags[:2], f"--results={stored}", f"--write_docs={report}")
    assert code == 2 and "is the table's report" in err
    code, _, err = call(
        "--table=omniglot", f"--results={stored}", f"--write_docs={stored.with_suffix('.md')}"
    )
    assert code == 2 and "would hold runs and what is kept of them" in err
    # What is kept is whole, or nothing is made of it; a block that nothing is kept of stays.
    file = kept / "omniglot" / "meml" / "seed1" / "results.json"
    content = file.read_text()
    file.write_text(content[:100])
    code, _, err = call(*flags, f"--results={stored}")
    assert code == 2 and f"{file} (damaged" in err and path.read_text() == before
    shutil.rmtree(kept)
    code, _, err = call(*flags, f"--results={stored}")
    assert code == 2 and "holds no results; delete the block" in err and path.read_text() == before


def test_what_an_earlier_version_has_kept_gives_way(stored, undrawn):
    path, folder, kept = stored / "doc.md", stored / "omniglot", stored / "doc" / "omniglot"
    flags = ("--table=omniglot", f"--write_docs={path}", "--report_only", f"--results={stored}")
    assert call(*flags)[0] == 0
    first = path.read_text()
    for file in kept.rglob("results.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"points_version": 1}))
    meml = kept / "meml" / "seed1" / "results.json"
    old, new = meml.read_text(), (folder / "meml" / "seed1" / "results.json").read_text()
    (folder / "meml" / "seed1" / "results.json").write_text(old)  # not done again yet
    line = f"left out: {meml} (judged as an earlier version did; the row is back in the block once"
    code, out, err = call(*flags)
    assert code == 0 and line in out, err
    assert cells(path.read_text(), "MEML")[1] == "0" and meml.read_text() == old
    assert cells(path.read_text(), "OML")[1] == "0"
    (folder / "meml" / "seed1" / "results.json").write_text(new)
    kept_now = stored_results.keep(stored_results.read(folder, say=print), kept)
    assert set(kept_now["meml"]) == {0, 1}
    assert call(*flags)[0] == 0 and path.read_text() == first
    # What is damaged is no earlier version's.
    meml.write_text(old[:100])
    with pytest.raises(UserError, match="damaged.*mend that file or delete its folder"):
        stored_results.keep({}, kept)


def test_rows_of_an_earlier_version_do_not_keep_others_from_being_done(
    tmp_path, mini, done, stored
):
    path, kept = tmp_path / "doc.md", tmp_path / "doc" / "mini" / "meml" / "seed0"
    config = tables.settings(tables.load(str(mini), ROOT), "meml", ROOT, Choice("smoke"), seed=0)
    kept.mkdir(parents=True)
    old = results(config, sgd=(0.1, 0.1), points_version=1)
    (kept / "results.json").write_text(json.dumps(old))
    flags = (f"--table={mini}", "--budget=smoke", f"--results={tmp_path}", f"--write_docs={path}")
    for rows, left in (("oracle", True), ("meml", False)):
        code, out, err = call(*flags, f"--rows={rows}")
        assert code == 0, out + err
        assert out.count(f"left out: {kept / 'results.json'} (judged") == 1  # before the work
        assert cells(path.read_text(), "MEML")[1] == ("-" if left else "0")
    assert done == [("oracle", 0), ("meml", 0)]


OLDER = {  # than the keeping of results
    "omniglot, 64 channels, 20,000 steps", "omniglot, full width, 8,400 steps",
    "few_shot, 3,000 episodes", "best, 64 channels, 10,000 steps", "embeddings of omniglot",
}  # fmt: skip


@pytest.mark.parametrize("name", ["results", "smoke"])
def test_a_document_is_what_its_kept_results_give(undrawn, tmp_path, name):
    docs, path = ROOT / "docs", tmp_path / f"{name}.md"
    text, tables_ = (docs / f"{name}.md").read_text(), set()
    shutil.copytree(docs / name, tmp_path / name)
    path.write_text(text)
    for block in re.findall(r"<!-- begin .*?<!-- end", text, re.DOTALL):
        title = re.match("<!-- begin (.*) \\(generated\\) -->", block)[1]
        table_, _, label = title.partition(", ")
        if title in OLDER:
            continue
        if dataset := re.fullmatch("embeddings of (.*)", title):
            rows = [
                row.parents[1].name
                for row in docs.glob(f"{name}/embeddings/{dataset[1]}/*/*/row.json")
            ]
            assert rows and all(f"| {row} |" in block for row in rows), dataset
            continue
        tables_.add(tmp_path / name / label / table_)
        presets = re.search(r"--presets=\S+", block)
        flags = [f"--table={table_}", "--report_only", f"--label={label}"]
        flags += [f"--results={tmp_path / name / label}", f"--write_docs={path}"]
        flags += [presets[0]] if presets else []
        flags += [] if "![" in block else ["--nofigures"]
        code, out, _ = call(*flags)
        assert code == 0 and "left out" not in out and path.read_text() == text, title
    assert tables_ == {file.parents[2] for file in (tmp_path / name).rglob("results.json")} != set()


# Which runs are done, and by whom.


@pytest.fixture
def done(monkeypatch, undrawn):
    """The runs that were done, in place of doing them."""
    runs = []

    def do(config, workdir, results_folder):
        runs.append((workdir.parent.name, config.seed))
        if config.learner == "oml":
            raise UserError("cannot be") if config.seed else OSError("no such\ndevice")
        workdir.mkdir(parents=True, exist_ok=True)
        stored = results(config, sgd=(0.5, 0.5), points_version=points_version(config))
        (workdir / "results.json").write_text(json.dumps(stored))
        (workdir / "report.md").touch()

    monkeypatch.setattr(program(), "do", do)
    return runs


def test_what_is_finished_is_skipped_and_what_fails_does_not_stop_others(tmp_path, mini, done):
    flags = (f"--table={mini}", f"--results={tmp_path}", "--budget=smoke", "--seeds=0,2")
    code, out, err = call(*flags)
    order = [(row, seed) for row in ("oracle", "oml", "meml") for seed in (0, 2)]
    assert code == 1 and done == order
    assert "failed: oml, seed 0: OSError: no such\nfailed: oml, seed 2: cannot be\n" == err
    assert cells((tmp_path / "mini" / "report.md").read_text(), "MEML")[1] == "0, 2"
    done.clear()
    assert call(*flags)[0] == 1 and done == [("oml", 0), ("oml", 2)]
    done.clear()
    assert call(*flags, "--rows=oracle,meml")[0] == 0 and done == []
    # Other settings, or points of another kind, are not what was asked for.
    assert call(*flags, "--rows=meml", "--seeds=0", "--config.train.steps=80")[0] != 2
    assert done == [("meml", 0)]
    done.clear()
    path = tmp_path / "mini" / "oracle" / "seed0" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"points_version": -1}))
    assert not program().finished(from_dict(json.loads(path.read_text())["config"]), path.parent)


def test_a_row_whose_folder_cannot_be_used_stops_no_other(tmp_path, mini, done):
    (tmp_path / "mini").mkdir()
    (tmp_path / "mini" / "oracle").touch()
    flags = (f"--table={mini}", f"--results={tmp_path}", "--budget=smoke", "--rows=oracle,meml")
    code, _, err = call(*flags)
    assert code == 1 and done == [("meml", 0)] and err.startswith("failed: oracle, seed 0: ")


@pytest.mark.parametrize("kind", [UserError, OSError])
def test_a_report_that_cannot_be_written_does_not_stop_the_rows(
    tmp_path, mini, done, monkeypatch, kind
):
    def write_report(table):
        raise kind("the marks are gone")

    monkeypatch.setattr(program(), "write_report", write_report)
    flags = (f"--table={mini}", f"--results={tmp_path}", "--budget=smoke", "--rows=oracle,meml")
    code, _, err = call(*flags)
    assert code == 1 and done == [("oracle", 0), ("meml", 0)]
    assert err == "failed: the report: the marks are gone\n"


def test_results_of_another_version_of_the_embedding_are_not_finished(tmp_path, undrawn):
    config = settings("omniglot", "meml", "short")
    folder = tmp_path / "omniglot" / "meml" / "seed0"
    folder.mkdir(parents=True)
    (folder / "report.md").touch()

    def is_finished(**fields):
        stored = results(config, sgd=(0.5, 0.5), **fields)
        (folder / "results.json").write_text(json.dumps(stored))
        return program().finished(config, folder)

    assert product_versions(config) == {"embedding": 2}  # of ACAI
    assert is_finished() and is_finished(product_versions={"embedding": 2})
    assert not is_finished(product_versions={"embedding": 1})
    code, out, _ = call("--table=omniglot", f"--results={tmp_path}", "--report_only")
    assert code == 0 and "results.json (of an embedding of an earlier version" in out
    oracle = override(config, {"tasks.labels": "true"})
    assert product_versions(oracle) == {}
    start = {"train.init": "embedding", "embedding.name": "contrastive"}
    assert product_versions(override(oracle, start)) == {"embedding": 1, "init": INIT_VERSION}


def test_rows_of_another_process_are_left_to_it(tmp_path, mini, done):
    flags = (f"--table={mini}", f"--results={tmp_path}", "--budget=smoke", "--rows=oracle,meml")
    with files.lock(tmp_path / "mini" / "oracle" / ".seed0.lock") as ours:
        assert ours
        code, out, _ = call(*flags)
    assert code == 0 and done == [("meml", 0)]
    assert "== oracle, seed 0: another process is at it" in out
    assert out.index("oracle, seed 0: still with another process") > out.index("== meml")


def test_a_row_waits_for_what_another_process_makes(tmp_path, mini, done):
    one = tables.load(str(mini), ROOT)
    config = tables.settings(one, "meml", ROOT, Choice("smoke"), seed=0)
    path = sharing._lock_path(tmp_path, "embed", sharing.key("embed", config), "images")
    flags = (f"--table={mini}", f"--results={tmp_path}", "--budget=smoke", "--rows=meml,oracle")
    with files.lock(path):
        assert sharing.busy(config, tmp_path / "mini" / "meml" / "seed0", tmp_path)
        code, out, _ = call(*flags)
    # The oracle needs no embedding, so it comes first; then the row is begun, to wait there.
    assert code == 0 and done == [("oracle", 0), ("meml", 0)]
    assert "== meml, seed 0: later, another process makes what it needs" in out
    assert not sharing.busy(config, tmp_path / "mini" / "meml" / "seed0", tmp_path)


# Products in common.


def test_what_is_shared():
    base = override(Config(), {"learner": "oml"})

    def same(stage, **fields):
        other = override(base, {name.replace("__", "."): v for name, v in fields.items()})
        return sharing.key(stage, other) == sharing.key(stage, base)

    assert same("embed", learner="meml", clustering__num_clusters=5, tasks__balance="truncate")
    assert not same("embed", seed=1) and not same("embed", embedding__dim=3)
    # Images are compared by their digest, wherever they lie; so is a size that is left open.
    for stage in ("embed", "cluster", "train"):
        assert same(stage, data__dir="elsewhere", data__cache_dir="x", data__download_timeout=1.0)
        assert same(stage, data__image_size=0, data__channels=0)
        assert not same(stage, data__max_per_class=3)
    assert same("cluster", learner="meml", tasks__balance="loss", network__channels=3)
    assert not same("cluster", clustering__num_clusters=5)
    assert not same("cluster", tasks__balance="truncate")
    assert same("train", test__runs=3, test_data__name="cub", test__num_classes=(2,))
    assert not same("train", learner="meml") and not same("train", train__steps=3)
    oracle = override(base, {"tasks.labels": "true"})
    assert sharing.key("embed", oracle) is None and sharing.key("train", oracle)
    # True classes are what they are, whatever an embedding and its clusters would be.
    other = {"embedding.name": "acai", "embedding.dim": 3, "clustering.num_clusters": 5}
    unused = override(oracle, other)
    assert sharing.key("train", unused) == sharing.key("train", oracle)
    start = {"train.init": "embedding"}
    assert sharing.key("train", override(unused, start)) != sharing.key(
        "train", override(oracle, start)
    )
    assert sharing.key("test", base) is None
    rounds = override(base, {"clustering.rounds": 2})
    assert sharing.key("embed", rounds) and not sharing.key("train", rounds)


@pytest.fixture
def sibling(tmp_path):
    """A finished run in a results folder."""
    target = tmp_path / "results" / "one" / "row" / "seed0"
    return shutil.copytree(programs.finished("smoke"), target)


@pytest.mark.slow
def test_a_finished_sibling_gives_all_that_is_the_same(tmp_path, sibling, capsys):
    config = programs.stored_config(sibling)
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    # What a stopped run, or a copy that was cut short, may have left.
    with open_workdir(workdir, config):
        (workdir / ".checkpoints.copying").mkdir()
    before = programs.snapshot(sibling)
    program().do(config, workdir, tmp_path / "results")
    lines = capsys.readouterr().out.splitlines()
    for stage in ("embed", "cluster", "train"):
        assert f"{stage}: copies from {sibling}" in lines, lines
        assert any(line.startswith(f"{stage}: reuses ") for line in lines)
    assert any(line.startswith("test: reuses 8 finished points") for line in lines)
    assert programs.results(workdir) == programs.results(sibling)
    assert programs.snapshot(sibling) == before
    assert not list(workdir.rglob("*.copying"))
    # With more steps only embedding and clusters are the same.
    longer = override(config, {"train.steps": 60})
    images = programs.results(sibling)["content_hash"]
    find = functools.partial(sharing.find, workdir=workdir, results=tmp_path / "results")
    assert find("train", images, longer) is None
    assert find("cluster", images, longer) == find("train", images, config) == sibling
    # A training on other images, or other clusters, would be refused; a second sibling may fit.
    assert find("train", "other", config) is None
    second = shutil.copytree(sibling, sibling.with_name("seed1"))
    np.savez(sibling / "tasks.npz", fingerprint="foreign")
    assert find("train", images, config) == second
    (workdir / "tasks.npz").unlink()
    assert find("train", images, config) is None


def test_an_embedding_of_other_images_is_not_copied(tmp_path, sibling):
    config = programs.stored_config(sibling)
    images = programs.results(sibling)["content_hash"]
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    find = functools.partial(sharing.find, "embed", workdir=workdir, results=tmp_path / "results")
    assert find(images, config) == sibling
    assert find("other images", config) is None
    path = sibling / "embedding.json"
    made = json.loads(path.read_text())
    del made["content_hash"]  # as an earlier version has left it
    path.write_text(json.dumps(made))
    assert find(images, config) is None
    # In its own workdir it is reused.
    said = []
    data = datasets.load(config.data, report=lambda line: None)
    pseudo_labels.embed(config, data, sibling, said.append)
    assert said == [f"embed: reuses {sibling / 'embeddings.npz'}"]


def test_settings_that_are_left_open_are_shared(tmp_path, sibling, capsys):
    """Image size, channels and number of clusters are chosen, in the sibling and here."""
    config, results_ = programs.stored_config(sibling), tmp_path / "results"
    images = programs.results(sibling)["content_hash"]
    left_open = {"data.image_size": 0, "data.channels": 0, "clustering.num_clusters": 0}
    elsewhere = {"data.dir": "elsewhere", "data.cache_dir": str(tmp_path)}
    bare = override(config, left_open | elsewhere)
    workdir = results_ / "two" / "row" / "seed0"

    def enter(stage, chosen, images=images):
        with (
            open_workdir(workdir, bare),
            sharing.around(
                stage, images, config=bare, workdir=workdir, results=results_, say=print
            ),
        ):
            held = sharing._lock_path(results_, stage, sharing.key(stage, chosen), images)
            with files.lock(held) as ours:
                assert not ours
        return f"{stage}: copies from {sibling}" in capsys.readouterr().out

    assert not enter("embed", bare, "other images") and enter("embed", bare)
    assert not (workdir / "tasks.npz").exists()
    with files.lock(sharing._lock_path(results_, "embed", sharing.key("embed", bare), images)):
        other = results_ / "three" / "row" / "seed0"
        assert sharing.busy(override(bare, {"data.dir": "there"}), other, results_)
    # The number of clusters is known once the images are, and is then that of the workdir.
    for number, same in ((5, False), (config.clustering.num_clusters, True)):
        chosen = override(bare, {"clustering.num_clusters": number})
        record_config(workdir, chosen)
        assert enter("cluster", chosen) == same
    assert enter("train", chosen)


def test_clusters_of_other_images_are_not_copied(tmp_path, sibling):
    config = programs.stored_config(sibling)
    images = programs.results(sibling)["content_hash"]
    second = shutil.copytree(sibling, sibling.with_name("seed1"))
    path = sibling / "embedding.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"content_hash": "other"}))
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    for digest, source in ((images, second), ("other", sibling), ("third", None)):
        assert sharing.find("cluster", digest, config, workdir, tmp_path / "results") == source


def test_a_stopped_training_holds_the_lock_when_it_goes_on(tmp_path, sibling):
    results_ = tmp_path / "results"
    config = programs.stored_config(sibling)
    digest = programs.results(sibling)["content_hash"]
    path = sharing._lock_path(results_, "train", sharing.key("train", config), digest)
    longer = override(config, {"train.steps": 60})
    assert {p.name for p in (sibling / "checkpoints").iterdir() if p.name.isdigit()} >= {"40"}
    for settings_, held in ((config, False), (longer, True)):
        with sharing.around(
            "train", digest, config=settings_, workdir=sibling, results=results_, say=print
        ):
            key = sharing.key("train", settings_)
            lock_path = sharing._lock_path(results_, "train", key, digest)
            with files.lock(lock_path) as ours:
                assert ours != held
    with files.lock(path):
        assert not sharing.busy(config, sibling, results_)
        (sibling / "checkpoints" / "40").rename(sibling / "checkpoints" / "39")
        assert sharing.busy(config, sibling, results_)


def test_a_workdir_of_true_classes_is_tied_to_no_embedding(tmp_path):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    oracle = override(Config(), {"tasks.labels": "true"})
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(oracle)))
    other = {"embedding.name": "acai", "clustering.num_clusters": 5}
    check_same_training(tmp_path, override(oracle, other))
    for more in ({"tasks.labels": "clusters"}, {"train.init": "embedding"}, {"seed": 1}):
        with pytest.raises(UserError, match=f"{next(iter(more))} is "):
            check_same_training(tmp_path, override(oracle, other | more))


def test_what_does_not_fit_is_made_anew(tmp_path, sibling, capsys):
    """The settings agree, but not what is in the file: the stage's own fingerprint decides."""
    config = programs.stored_config(sibling)
    with np.load(sibling / "embeddings.npz") as stored:
        arrays = dict(stored) | {"fingerprint": "foreign"}
    np.savez(sibling / "embeddings.npz", **arrays)
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    around = functools.partial(
        sharing.around, config=config, workdir=workdir, results=tmp_path / "results", say=print
    )
    programs.program().run(config, workdir, "cluster", around)
    lines = capsys.readouterr().out.splitlines()
    assert f"embed: copies from {sibling}" in lines
    assert any(line.startswith("embed: pca, 400 x 64") for line in lines)
    with np.load(workdir / "embeddings.npz") as made, np.load(sibling / "embeddings.npz") as old:
        np.testing.assert_array_equal(made["embeddings"], old["embeddings"])
        assert str(made["fingerprint"]) != "foreign"


@pytest.mark.slow
def test_two_processes_share_a_small_table(tmp_path, mini):
    """Real runs: every run is done once, the embedding and the clusters are made once."""
    command = [
        sys.executable, str(ROOT / "experiments" / "tables.py"), f"--table={mini}",
        f"--results={tmp_path / 'results'}", "--budget=smoke", "--config.test.heads=sgd,prototype",
    ]  # fmt: skip
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=1200) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    out = "".join(out for out, _ in outputs)
    for text, times in (("train: 40 steps in ", 3), ("embed: pca", 1), ("cluster: k-means", 1)):
        assert sum(line.startswith(text) for line in out.splitlines()) == times, out
    folder = tmp_path / "results" / "mini"
    text = (folder / "report.md").read_text()
    for title in ("Oracle MEML", "OML", "MEML"):
        assert re.fullmatch(r"(\*\*)?\d+\.\d ± \d+\.\d(\*\*)?", cells(text, title)[3]), text
    for path in folder.glob("*/seed0/results.json"):
        assert flatten(from_dict(json.loads(path.read_text())["config"]))["test.runs"] == 2
    again = subprocess.run(command, stdout=pipe, stderr=pipe, text=True, timeout=600)
    assert again.returncode == 0 and again.stdout.count(": finished, in ") == 3
