"""Reports of tables: sheets, pages, figures."""

import base64
import csv
import html.parser
import json
import shutil

import numpy as np
import pytest
from own_tables import call, cells, results, settings, table

from meml_jax import (
    comparison,
    curves,
    table_figures,
    table_report,
    table_sheets,
)
from meml_jax.settings import override

PIXELS = curves.NAMES["pixels"]


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
    assert cells(text, "MEML mean") is cells(text, "MEML RS") is None
    assert "No spread: all runs are equal. Not run: Oracle MEML; OML balanced 500; " in text
    assert "; OML RS; OML single; MEML mean; MEML RS." in text and "holds the accuracy" not in text
    # One with the seeds of each row, as they decide on what is tested.
    for rows, seeds, runs in (("Oracle OML; OML", "0", "2"), ("MEML", "0, 1", "4")):
        tested = f"(beside {rows})"
        assert cells(text, f"{PIXELS} {tested}")[:3] == ["-", seeds, runs]
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("network.channels", 64), ("network.hidden", 64), ("tasks.balance", "truncate"),
        ("tasks.query_from", "coreset"), ("tasks.rotations", True), ("tasks.max_size", 3),
        ("outer.meta_batch", 8), ("inner.steps", 5), ("tasks.labels", "true"),
    ],
)  # fmt: skip
def test_the_cost_of_another_step_is_not_put_beside_the_papers(field, value):
    for values, last in (({}, "0.743 GB"), ({field: value}, "-")):
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
    assert list(table_report.of_a_training(tmp_path, lines).values()) == [
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


def test_only_what_is_measured_is_drawn_unless_nothing_is(monkeypatch):
    kept = []
    monkeypatch.setattr(table_figures.figures, "save", lambda figure, path: kept.append(figure))
    configs = {row: settings("omniglot", row) for row in table("omniglot").rows}
    rows = ("oracle_meml", "oml", "meml", "meml_mean")
    found = {row: {0: results(settings("omniglot", row), sgd=(0.5, 0.5))} for row in rows}
    few = {"meml": found["meml"]}
    # Of few rows the paper's curves lie in our panels, of more in their own.
    for some, heads, panels, dashed, said in (
        (few, ("sgd", "prototype"), 1, [1, 0], []),
        (found, ("sgd", "prototype"), 2, [0, 4, 0, 0], ["not in the paper"]),
        ({}, ("sgd", "sgd_reservoir"), 2, [0, 9, 0, 2], ["not run", "not run"]),
    ):
        lines = comparison.make_lines(table("omniglot"), configs, some)
        table_figures.draw(lines, "none.png", title="")
        axes = kept[-1].axes
        assert [ax.get_title("left") for ax in axes[::panels]] == [curves.NAMES[h] for h in heads]
        theirs = [[line for line in ax.lines if line.get_linestyle() == "--"] for ax in axes]
        assert list(map(len, theirs)) == dashed
        assert [text.get_text() for ax in axes for text in ax.texts] == said


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

    heads, [cost] = kept[0].axes, kept[1].axes
    sgd, _, reservoir = map(looks, heads)
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
    table_report.draw_costs(tmp_path, table("best"), lines)
    head, part = "Beyond the paper: Omniglot, preset best", "Official split: 864, 100, 659 classes"
    assert titles == [f"{head}\n{part}"] * 2 and list(captions.values()) == [f"{head}, {part}"]
