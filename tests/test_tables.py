"""Tables of the paper: their rows, and the command that does them."""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import re
import shlex
import subprocess
import sys

import pytest
from own_tables import NAMES, ROOT, call, cells, program, results, settings, table

from meml_jax import (
    checks,
    files,
    sharing,
    table_checks,
    table_flags,
    tables,
)
from meml_jax.settings import flatten, from_dict, override
from meml_jax.tables import Choice, Row, Table
from meml_jax.types import UserError


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
        (["--table=omniglot", "--config.precision=lowest"], "precision='lowest', expected one of"),
        (["--table=omniglot", "--config.test.heads=('knn',)"], "test.heads=('knn',), expected one"),
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
    flags = ("--table=best", "--rows=meml", "--config.train.steps=5")
    flags += ("--config.test.heads=(prototype,)", f"--results={ROOT / 'nowhere'}")
    with contextlib.redirect_stdout(io.StringIO()):
        runs = program().parse(["tables.py", *flags]).runs
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
        ("{'': Row({'sgd': 'x'})}", "got a row '', expected the name of a folder"),
        ("{1: Row({'sgd': 'x'})}", "got a row 1, expected the name of a folder"),
        ("{'a': Row('MEML')}", "expected a tables.Row with lines by head"),
        ("{'a': Row({})}", "expected a tables.Row with lines by head"),
        ("{'a': Row({'sgd': 3})}", "expected text of one line without <!--, values"),
        (r"{'a': Row({'sgd': 'x\ny'})}", "expected text of one line without <!--, values"),
        ("{'a': Row({'foo': 'x'})}", "got row 'a' with the head 'foo', expected some of sgd, "),
        ("{'a': Row({'sgd': 'x'}, config='configs')}", "expected a Python file such as those in"),
        ("{'a': Row({'sgd': 'x'}, values={'seeds': 2})}", "sets its seed; leave it to --seeds=0,1"),
        ("{'a': Row({'sgd': 'x'}, published={'sgd': 'y'})}", "published='y', expected a line of"),
        ("{'a': Row({'sgd': 'x'}, beside='b')}", "beside='b', expected another row of its part"),
        ("{'a': Row({'sgd': 'x'}), 'b': Row({'sgd': 'y'}, 'none')}", "row 'b' (configs/quickstart"),
        ("{'a': Row({'sgd': 'x'})}, smoke={'train.stepz': 1}", "did you mean 'train.steps'"),
        ("{'a': Row({'sgd': 'x'})}, smoke=3", "got smoke=3, expected settings by field"),
        ("{'a': Row({'sgd': 'x'})}, smoke={3: 3}", "got the field 3, expected a name such as"),
        ("{'a': Row({'sgd': 'x'}, values={3: 3})}", "got the field 3, expected a name such as"),
        (r"{'a\0': Row({'sgd': 'x'})}", r"got a row 'a\x00', expected the name of a folder"),
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
            table_checks.check_rows(own, {name: config}, ROOT, "paper")


def split_overrides(argv):
    program()  # with which the folder of the programs is one of modules
    return importlib.import_module("console").split_overrides(argv)


def test_one_dash_is_as_good_as_two():
    argv = ["t", "-config.a.b=1", "-config", "f.py", "--config.c", "-5"]
    split = (("--config.a.b=1", "--config.c=-5"), ["t", "--config", "f.py"])
    assert split_overrides(argv) == split


def test_a_bool_needs_no_value():
    argv = ["t", "--config.test.iid", "-rows=c", "--noconfig.test.iid", "--config.data.skip_bad"]
    overrides = ("--config.test.iid=true", "--config.test.iid=false", "--config.data.skip_bad=true")
    assert split_overrides(argv) == (overrides, ["t", "--rows=c"])
    for wrong in (["--config.data.cache_dir"], ["--config.data.dir", "--rows=c"]):
        with pytest.raises(UserError, match="has no value; write --config.data.*=VALUE"):
            split_overrides(["t", *wrong])
    flags = ("--table=best", "--rows=meml", "--config.data.skip_bad", "--noconfig.test.iid")
    config = program().parse(["tables.py", *flags]).runs["meml", 0]
    assert config.data.skip_bad and not config.test.iid


def test_help_shows_how():
    code, text, _ = call("--help")
    assert code == 0 and "--table=omniglot" in text and "--report_only" in text


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
    def write_report(asked):
        raise kind("the marks are gone")

    monkeypatch.setattr(program(), "write_report", write_report)
    flags = (f"--table={mini}", f"--results={tmp_path}", "--budget=smoke", "--rows=oracle,meml")
    code, _, err = call(*flags)
    assert code == 1 and done == [("oracle", 0), ("meml", 0)]
    assert err == "failed: the report: the marks are gone\n"


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


def test_a_config_file_of_no_settings_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("")
    one = Table("T", "empty.py", {"a": Row({"sgd": "A"})})
    with pytest.raises(UserError, match=r"empty\.py: expected a function get_config in it"):
        tables.settings(one, "a", tmp_path, Choice(), seed=0)


def test_a_file_with_the_name_of_a_table_is_refused(tmp_path):
    """They would share a folder of results, and a block of the document."""
    ours = ROOT / "configs" / "tables" / "best.py"
    path = tmp_path / ours.name
    path.write_text(ours.read_text())
    with pytest.raises(UserError, match=r"best\.py has the name of the table 'best'; rename"):
        tables.load(str(path), ROOT)
    assert tables.load(str(ours), ROOT) == tables.load(str(path.rename(tmp_path / "o.py")), ROOT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"smoke": {"seeds": 2}}, "smoke sets its seed; leave it to --seeds"),
        ({"title": "a --> b"}, "without <!-- and -->"),
        ({"rows": {"report.md": Row({"sgd": "A"})}}, "other than figures, report.md"),
        ({"rows": {"a": Row({"sgd": "A <!-- end mine -->"})}}, "one line without <!--"),
    ],
)
def test_a_table_that_would_fail_after_the_work_is_refused_before(tmp_path, change, message):
    fields = {"title": "T", "config": "configs/quickstart.py", "rows": {"a": Row({"sgd": "A"})}}
    with pytest.raises(UserError, match=message):
        tables._check_types(Table(**fields | change))
    tables._check_types(Table(**fields))


def test_seeds_in_a_config_file_are_refused(tmp_path):
    (tmp_path / "two.py").write_text(
        "from meml_jax.settings import preset_config\n"
        "def get_config(presets='paper'):\n    return preset_config(presets, {}, {'seeds': 2})\n"
    )
    one = Table("T", "two.py", {"a": Row({"sgd": "A"})})
    with pytest.raises(UserError, match=r"two\.py has seeds=2; leave it out, and use --seeds"):
        tables.settings(one, "a", tmp_path, Choice(), seed=0)


def test_a_value_that_does_not_fit_names_its_row():
    one = Table("T", "configs/quickstart.py", {"a": Row({"sgd": "A"}, values={"train.steps": "x"})})
    with pytest.raises(UserError, match="row 'a': .*train.steps"):
        tables.settings(one, "a", ROOT, Choice(), seed=0)


def test_results_that_are_no_folder_are_refused_before_the_first_row(tmp_path, mini, done):
    (tmp_path / "file").touch()
    code, _, err = call(f"--table={mini}", f"--results={tmp_path / 'file'}", "--budget=smoke")
    assert code == 2 and done == [] and err.count("\n") == 1
    assert f"{tmp_path / 'file'} is no folder; name another folder" in err


def test_results_of_other_settings_than_the_row_has_are_left_out():
    """As after a change of the table: under the row's title they would say something untrue."""
    rows = {"low": Row({"sgd": "A"}, values={"inner.lr": 0.01})}
    rows["high"] = Row({"sgd": "B"}, values={"inner.lr": 0.1})
    own = Table("T", "configs/quickstart.py", rows)

    def kept(**fields):
        config = tables.settings(own, "low", ROOT, Choice("smoke"), seed=0)
        stored = {"low": {0: results(override(config, fields), sgd=(0.5, 0.6))}}
        said = []
        return table_checks.as_defined(stored, own, ROOT, say=said.append), said

    assert kept() == ({"low": kept()[0]["low"]}, [])
    assert kept(**{"outer.lr": 0.5, "train.steps": 7})[0]  # the same in both rows: the user's
    every, [line] = kept(**{"inner.lr": 0.1})
    assert every == {} and "left out: the results of 'low', seed 0 (row 'low' is one of " in line
