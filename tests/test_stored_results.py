"""Results of tables: what is read, what is kept beside a document, what its blocks are made of."""

import json
import re
import shutil

import programs
import pytest
from own_tables import ROOT, call, cells, program, results, settings

from meml_jax import (
    stored_results,
    tables,
)
from meml_jax.model import INIT_VERSION
from meml_jax.results import product_versions
from meml_jax.settings import from_dict, override
from meml_jax.tables import Choice
from meml_jax.types import UserError


def test_what_cannot_be_read_is_left_out_and_said(stored, undrawn):
    path = stored / "omniglot" / "meml" / "seed0" / "results.json"
    path.write_text(path.read_text()[:100])
    foreign = stored / "omniglot" / "oml" / "seed0" / "results.json"
    foreign.write_text(foreign.read_text().replace('"learner"', '"learned"'))
    code, out, _ = call("--table=omniglot", f"--results={stored}", "--report_only")
    assert code == 0 and f"left out: {path} (" in out
    assert f"left out: {foreign} (unknown config field 'learned'" in out
    text = (stored / "omniglot" / "report.md").read_text()
    assert cells(text, "MEML")[1] == "1" and cells(text, "OML") is None


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
    assert "![accuracy](doc/omniglot/figures/accuracy.png)\n\nTable 1: Omniglot\n" in first
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


def test_results_of_no_row_are_left_out_and_said(stored, undrawn):
    (stored / "omniglot" / "meml").rename(stored / "omniglot" / "former")
    code, out, _ = call("--table=omniglot", "--report_only", f"--results={stored}")
    assert code == 0 and "left out: the results of 'former', which is no row of this table" in out
    assert "former" not in (stored / "omniglot" / "report.md").read_text()
    path, flags = stored / "doc.md", ("--report_only", f"--results={stored}")
    assert call("--table=omniglot", *flags, f"--write_docs={path}")[0] == 0
    before = path.read_text()
    for row in ("oml", "oracle_oml"):
        (stored / "omniglot" / row).rename(stored / "omniglot" / f"former_{row}")
    shutil.rmtree(stored / "doc")
    code, _, err = call("--table=omniglot", *flags, f"--write_docs={path}")
    assert code == 2 and "nothing of use is stored" in err and path.read_text() == before


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
    link = stored / "link.md"
    link.symlink_to(link)
    code, _, err = call(*flags[:2], f"--results={stored}", f"--write_docs={link}")
    assert code == 2 and f"--write_docs={link} is a link that leads nowhere" in err
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
        assert (cells(path.read_text(), "MEML") is None) == left
    assert done == [("oracle", 0), ("meml", 0)]


OLDER = {  # than the keeping of results
    "omniglot, 64 channels, 20,000 steps", "few_shot, 3,000 episodes",
    "embeddings of omniglot",
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
    assert code == 0 and "results.json (of an embedding or learner of another version" in out
    oracle = override(config, {"tasks.labels": "true"})
    assert product_versions(oracle) == {}
    start = {"train.init": "embedding", "embedding.name": "contrastive"}
    assert product_versions(override(oracle, start)) == {"embedding": 1, "init": INIT_VERSION}


def test_a_block_of_other_settings_has_no_results_that_are_to_be_done_again(tmp_path, mini, done):
    path = tmp_path / "doc.md"
    flags = (f"--table={mini}", f"--results={tmp_path}", f"--write_docs={path}")
    assert call(*flags, "--rows=oracle,meml", "--label=short")[0] == 0
    longer = (*flags, "--label=long", "--config.train.steps=80")
    # Of two rows the second holds its old results when the first is done.
    assert call(*longer, "--rows=oracle,meml")[0] == 0
    for row in ("oracle", "meml"):
        kept = tmp_path / "doc" / "long" / "mini" / row / "seed0" / "results.json"
        assert json.loads(kept.read_text())["config"]["train"]["steps"] == 80
    assert call(*longer, "--rows=oracle,meml")[0] == 0
    # Nor what is not asked for: rows may be done in pieces, or by several processes.
    pieces = (*flags, "--label=pieces", "--config.train.steps=120")
    assert call(*pieces, "--rows=oracle")[0] == 0
    assert not (tmp_path / "doc" / "pieces" / "mini" / "meml").exists()
    assert call(*pieces, "--rows=meml")[0] == 0
    for row in ("oracle", "meml"):
        kept = tmp_path / "doc" / "pieces" / "mini" / row / "seed0" / "results.json"
        assert json.loads(kept.read_text())["config"]["train"]["steps"] == 120
