"""A report in Markdown from the values of `results.json` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from meml_jax import markdown, run_facts
from meml_jax.cells import NO_WIDTH, Cell, combine
from meml_jax.curves import BASELINES, NAMES
from meml_jax.intervals import SEEDS_FOR_INTERVAL, half_width, summarise
from meml_jax.paper import few_shot_rows, paper_rows, written
from meml_jax.rounding import percent, plain

FEWEST_STEPS = 500  # with fewer a report says so
_CAPTIONS = {
    "accuracy": "Accuracy over all classes seen, with 95 % intervals; dashed: the paper's.",
    "clusters": "Images of some clusters, from the smallest to the largest, framed by what each "
    "weighs in the meta-example.",
    "feature_maps": "What the convolutions of the trained network make of some images.",
    "cluster_sizes": "How many images the clusters have that training draws its tasks from.",
    "training": "Meta-loss and accuracies in the course of the training.",
    "embedding_neighbours": "Images at random, and those whose embeddings are nearest to theirs.",
    "embedding_map": "Images of a few classes, or of clusters where no classes are known, by what "
    "is near what in the embedding; distances between far groups mean nothing.",
    "embedding_clusters": "What is in a cluster, from the largest to the smallest: images from the "
    "nearest to its mean to the farthest, framed, where true classes are known, by whether they "
    "are of the class that is most frequent in it.",
}


def series_name(results: Mapping[str, Any], series: Mapping[str, Any]) -> str:
    """Name one curve of `results`: its own name, else the learner and head of the run."""
    return str(series.get("name") or f"{_learner(results)} ({series['head']} head)")


def _learner(results: Mapping[str, Any]) -> str:
    """Name the learner; one whose tasks come from true labels is an oracle."""
    return f"oracle {results['learner']}" if results.get("oracle") else str(results["learner"])


def render(results: Mapping[str, Any], *, figures: Sequence[str] = ()) -> str:
    """Write the report.

    Args:
      results: content of `results.json`; parts that are absent or null are left out. A key `config`
        with the effective configuration, as nested dicts, adds the main settings.
      figures: paths of the figures relative to the report.

    Returns:
      Markdown, ending with a newline.
    """
    parts = [
        [f"# {_learner(results)} on {results['dataset']}", *_warning(results)],
        ["## Run", markdown.bullets(run_facts.facts(results))],
        _few_shot(results) if _is_few_shot(results) else _accuracy(results),
        _clustering(results.get("clustering") or {}),
        _cost(results.get("meta_train") or {}),
        ["## Figures", *(block for path in figures for block in _figure(path))] if figures else [],
    ]
    return "\n\n".join(block for part in parts for block in part) + "\n"


def _warning(results: Mapping[str, Any]) -> list[str]:
    found = [results, *results.get("each", ())]  # of several seeds, each has its own
    steps = min((one["meta_train"]["steps"] for one in found if one.get("meta_train")), default=1)
    if steps == 1 or steps >= FEWEST_STEPS:  # one: to test what it starts from
        return []
    return [f"**Only {steps} meta-steps: the program runs; nothing follows on the method.**"]


def _accuracy(results: Mapping[str, Any]) -> list[str]:
    test = results["meta_test"]
    series = [test, *(results.get("comparisons") or [])]
    points = [
        (series_name(results, one), {point["num_classes"]: point for point in one["points"]})
        for one in series
    ]
    counts = sorted({count for _, row in points for count in row})
    runs = sorted({point["runs"] for point in test["points"]})
    rows = [(name, [_interval(row.get(n)) for n in counts]) for name, row in points]
    for name, row in paper_rows(results["dataset"]).items():
        if set(row) & set(counts):
            published = [written(row[n]) if n in row else "-" for n in counts]
            rows.append((f"{name} (paper)", published))
    chance = {n: point["chance"] for _, row in points for n, point in row.items()}
    rows.append(("chance", [percent(chance[n]) for n in counts]))
    blocks = [
        "## Accuracy",
        "Test accuracy in % over all classes seen, by number of classes, ± half the width of the "
        f"95 % interval (runs: {', '.join(map(str, runs))}; protocol `{test['protocol']}`, "
        f"head `{test['head']}`).",
        _table(counts, rows),
        *_seeds(results, {n: points[0][1][n] for n in counts if n in points[0][1]}),
        *_verdict(test, results.get("comparisons") or []),
    ]
    for text, key, form in (
        (
            "Train accuracy in %, on the stream's own images. Low here: not learned, or forgotten; "
            "high here and low above: not generalised.",
            "train_accuracy",
            percent,
        ),
        (
            "Test accuracy in % when the same stream comes in random order: an oracle that has "
            "nothing to forget.",
            "iid_accuracy",
            percent,
        ),
        ("Chosen learning rate of the meta-test; a tie: all were as good.", "learning_rate", plain),
    ):
        cells = [(name, [_cell(row.get(n, {}), key, form) for n in counts]) for name, row in points]
        table = [(name, row) for name, row in cells if set(row) != {"-"}]
        if table:
            blocks += [text, _table(counts, table)]
    return blocks


def _cell(point: Mapping[str, Any], key: str, form: Callable[[Any], str]) -> str:
    tried = point.get("search_accuracy") or []
    tie = key == "learning_rate" and len(tried) > 1 and len(set(tried)) == 1
    return "tie" if tie else form(point.get(key))


def _seeds(
    results: Mapping[str, Any], points: Mapping[Any, Mapping[str, Any]], *, head: str = "classes"
) -> list[str]:
    """Say what an interval over seeds is, and give the result of each seed, by column."""
    if not (seeds := results.get("seeds")):
        return []
    rows = [
        (f"seed {seed}", [percent(point["seed_accuracies"][i]) for point in points.values()])
        for i, seed in enumerate(seeds)
    ]
    within = [percent(point["within_seeds"]["ci95"]) for point in points.values()]
    few = len(seeds) < SEEDS_FOR_INTERVAL
    interval = (
        "too few for an interval over seeds: ± is that over the runs of each"
        if few
        else "with intervals over seeds (Student's t)"
    )
    return [
        f"These are means over {len(seeds)} seeds of the mean over runs, {interval}. Each seed's "
        "result, and half the width of the interval over the runs of each, which holds for the "
        "mean of these very seeds only:",
        _table(list(points), [*rows, ("± over runs", within)], head=head),
    ]


def _is_few_shot(results: Mapping[str, Any]) -> bool:
    return bool(results["meta_test"]["protocol"] == "few_shot")


def _few_shot(results: Mapping[str, Any]) -> list[str]:
    episodes = results["config"]["episodes"]
    trained = f"{_learner(results)} {episodes['ways']},{episodes['shots']}"
    test, others = results["meta_test"], results.get("comparisons") or []
    points = [
        (name, {(p["num_classes"], p["shots"]): p for p in series["points"]})
        for name, series in [(trained, test), *((one["name"], one) for one in others)]
    ]
    at = list(points[0][1])
    rows = [(name, [_interval(row[n]) for n in at]) for name, row in points]
    for name, row in few_shot_rows(results["dataset"]).items():
        if set(row) & set(at):
            rows.append((f"{name} (paper)", [written(row[n]) if n in row else "-" for n in at]))
    rows.append(("chance", [percent(points[0][1][n]["chance"]) for n in at]))
    runs = sorted({point["runs"] for point in test["points"]})
    return [
        "## Accuracy",
        "Accuracy in % on the queries of episodes of test classes, by ways,shots, ± half the width "
        f"of the 95 % interval (episodes: {', '.join(map(str, runs))}). The rows of the paper are "
        "named by the ways,shots of their training.",
        _table([f"{ways},{shots}" for ways, shots in at], rows, head="ways,shots"),
        *_seeds(
            results,
            {f"{ways},{shots}": points[0][1][ways, shots] for ways, shots in at},
            head="ways,shots",
        ),
    ]


def _verdict(test: Mapping[str, Any], comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where each head lies against raw pixels, which need no training at all.

    All heads of a run are tested on the same draws, so what is judged are the differences of
    `_difference`: level is where their interval holds 0. Points without any are left out.
    """
    pixels = {
        point["num_classes"]: point
        for one in comparisons
        if one["head"] == "pixels"
        for point in one["points"]
    }
    said = []
    for one in (test, *comparisons):
        places: dict[str, list[str]] = {"above": [], "level with": [], "below": []}
        for point in one["points"] if one["head"] not in BASELINES else []:
            other = pixels.get(point["num_classes"])
            if other is None or (gap := _difference(point, other)) is None:
                continue
            level = abs(gap.accuracy) <= gap.ci95 + NO_WIDTH
            place = "level with" if level else "above" if gap.accuracy > 0 else "below"
            places[place].append(str(point["num_classes"]))
        found = [
            f"{place} raw pixels at {', '.join(n)} classes" for place, n in places.items() if n
        ]
        if found:
            said.append(f"{NAMES[one['head']]}: {'; '.join(found)}")
    rule = "Level: the 95 % interval of the differences on the same test runs holds 0."
    return [f"{'. '.join(said)}. {rule}"] if said else []


def _difference(point: Mapping[str, Any], other: Mapping[str, Any]) -> Cell | None:
    """Subtract one point of a result from another, run by run; None where the runs do not pair.

    What runs have in common, easy classes and hard ones, drops out: with a_{s,r} and b_{s,r} the
    accuracies of run r of seed s, it is the cell of a_{s,r} - b_{s,r}, as `differences` has it for
    rows of a table. Of several seeds `accuracies` has the runs of one after those of another, as
    many of each since they share their config, and the interval is that of `cells.combine`.
    """
    ours, theirs = point["accuracies"], other["accuracies"]
    seeds, others = (len(p.get("seed_accuracies") or (None,)) for p in (point, other))
    if (len(ours), seeds) != (len(theirs), others) or len(ours) % seeds:
        return None
    each = np.subtract(ours, theirs).reshape(seeds, -1)
    summaries = (summarise(change, num_classes=point["num_classes"]) for change in each)
    return combine([summary | {"learning_rate": None} for summary in summaries])


def _clustering(values: Mapping[str, Any]) -> list[str]:
    if not values:
        return []
    size = [plain(values.get(f"size_{name}")) for name in ("min", "median", "max")]
    facts = {"from": "true labels (oracle)" if values.get("labels") == "true" else None}
    facts |= {f"clusters {k}": values.get(k) for k in ("requested", "actual", "kept", "dropped")}
    facts["images"] = values.get("images")
    facts["images a cluster (min, median, max)"] = ", ".join(size)
    if values.get("purity") is not None:
        facts["purity"] = f"{values['purity']:.3f}"
    if values.get("nmi") is not None:
        facts["normalised mutual information"] = f"{values['nmi']:.3f}"
    if values.get("adjusted_rand") is not None:
        facts["adjusted Rand index"] = f"{values['adjusted_rand']:.3f}"
    blocks = ["## Clusters", markdown.bullets(facts)]
    if "purity" in facts or "normalised mutual information" in facts:
        blocks.append("Agreement with the true classes, whose labels serve this report only.")
    return blocks


def _cost(values: Mapping[str, Any]) -> list[str]:
    if not values:
        return []
    peak = values.get("peak_bytes")
    facts = {
        "meta-steps": values.get("steps"),
        "seconds": values.get("seconds"),
        "meta-steps/s": values.get("steps_per_second"),
        "seconds to compile": values.get("compile_seconds"),
        "peak memory (MiB)": round(peak / 2**20) if peak is not None else "not measured",
    }
    return ["## Cost of meta-training", markdown.bullets(facts)]


def _table(
    counts: Sequence[int | str], rows: Sequence[tuple[str, Sequence[str]]], *, head: str = "classes"
) -> str:
    return markdown.table([head, *map(str, counts)], [[name, *cells] for name, cells in rows])


def _interval(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    return f"{percent(point['accuracy'])} ± {percent(half_width(point))}"


def _figure(path: str) -> list[str]:
    """Show a figure, with a sentence where there is one."""
    caption = _CAPTIONS.get(PurePath(path).stem)
    return [f"![{_title(path)}]({path})"] + ([caption] if caption else [])


def _title(path: str) -> str:
    return PurePath(path).stem.replace("_", " ")
