"""The page of neighbours, the map, and the figures of an autoencoder."""

import dataclasses
import functools
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import programs
import pytest
from PIL import Image

from meml_jax import embedding_figures, embedding_report, presets, pseudo_labels
from meml_jax.config import Config
from meml_jax.embeddings import acai
from meml_jax.files import lock
from meml_jax.settings import override
from meml_jax.types import Clusters, Dataset, Split, TaskTable

PAGES = ["embedding_neighbours", "embedding_map", "embedding_clusters"]


def pixels(path):
    return np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))


def has_color(path, hexadecimal):
    wanted = [int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((np.abs(pixels(path).astype(int) - wanted).max(axis=-1) <= 2).any())


def split(count=30, classes=5, size=8, channels=1, labelled=True):
    rng = np.random.default_rng(0)
    labels = np.arange(count, dtype=np.int32) % classes if labelled else np.full(count, -1)
    images = rng.integers(0, 256, size=(count, size, size, channels)).astype(np.uint8)
    names = tuple(f"class-{i}" for i in range(classes)) if labelled else ()
    return Split(images, labels.astype(np.int32), np.array([f"i{i}" for i in range(count)]), names)


def dataset(**kwargs):
    part = split(**kwargs)
    return Dataset("drawings", part, part, part, "hash")


def clusters(labels):
    empty = TaskTable(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))
    return Clusters(labels.astype(np.int32), empty, np.unique(labels), {}, "")


def test_nearest_by_hand():
    z = np.array([[0, 0], [3, 0], [1, 0], [0, 2], [10, 10], [0, 1.5]], np.float32)
    found = embedding_report.nearest(z, np.array([0, 1]), 3)
    np.testing.assert_array_equal(found, [[2, 5, 3], [2, 0, 5]])
    np.testing.assert_array_equal(embedding_report.nearest(z, np.array([4]), 5)[0, -1], 0)


def test_an_image_is_not_its_own_neighbour_among_copies():
    found = embedding_report.nearest(np.ones((9, 4), np.float32), np.arange(9), 3)
    assert found.shape == (9, 3)
    assert not (found == np.arange(9)[:, None]).any()
    assert all(len(set(row)) == 3 for row in found.tolist())


def test_neighbours_of_the_same_class_by_hand():
    # Classes on a line: 0 at 0 and 1, 1 at 2, 3.1 and 9, 2 alone at 5.
    z = np.array([[0], [1], [2.2], [3.1], [9], [5]], np.float32)
    labels = np.array([0, 0, 1, 1, 1, 2])
    rows = np.arange(6)
    found = embedding_report.nearest(z, rows, 2)
    np.testing.assert_array_equal(found, [[1, 2], [0, 2], [3, 1], [2, 5], [5, 3], [3, 2]])
    share, most = embedding_report.same_class(labels, rows, found)
    assert share == pytest.approx((1 + 1 + 1 + 1 + 1 + 0) / 12)
    assert most == pytest.approx((1 + 1 + 2 + 2 + 2 + 0) / 12)
    share, most = embedding_report.same_class(labels, rows[4:], found[4:])
    assert (share, most) == (pytest.approx(1 / 4), pytest.approx(2 / 4))


def test_neighbours_are_counted_on_as_many_images_as_time_allows(monkeypatch):
    labels, titles = np.arange(30) % 5, []
    z = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    monkeypatch.setattr(
        embedding_figures, "neighbours", lambda *_, title, **__: titles.append(title)
    )
    for limit in (1e9, 15 * 30 * 4, 1):
        monkeypatch.setattr(embedding_report, "MULTIPLICATIONS", limit)
        rng = np.random.default_rng(0)
        embedding_report._neighbours(split().images, labels, z, rng, Path("n.png"), "drawings")
    for counted, title in zip(("all 30", "15 of the 30", "10 of the 30"), titles, strict=True):
        assert f"(mean over {counted} images)" in title and "at most 5.00 can be" in title
    found = embedding_report.nearest(z, np.arange(30), 10)
    share, _ = embedding_report.same_class(labels, np.arange(30), found)
    assert f"of the 10 nearest images {10 * share:.2f} are" in titles[0]


def test_clusters_at_quantiles_of_size():
    # Cluster 10 + i has i images; 3 of 1..9, the largest first, are those of 9, 5 and 1.
    labels = np.repeat(10 + np.arange(1, 10), np.arange(1, 10))
    np.testing.assert_array_equal(embedding_report.by_size(labels, 3), [19, 15, 11])
    np.testing.assert_array_equal(embedding_report.by_size(labels, 1), [19])
    np.testing.assert_array_equal(embedding_report.by_size(labels, 99), np.arange(19, 10, -1))
    same = np.array([4, 2, 2, 7, 7, 4])
    np.testing.assert_array_equal(embedding_report.by_size(same, 8), [2, 4, 7])


def test_images_of_a_cluster_from_its_mean():
    z = np.array([[-9.0], [1], [3], [0], [5]], np.float32)  # the mean is 0
    np.testing.assert_array_equal(embedding_report.from_mean(z, 9), [3, 1, 2, 4, 0])
    np.testing.assert_array_equal(embedding_report.from_mean(z, 3), [3, 2, 0])
    np.testing.assert_array_equal(embedding_report.from_mean(z[:1], 3), [0])


def test_titles_tell_embeddings_apart():
    def names(row, **more):
        config = override(Config(), {**presets.EMBEDDINGS[row], **more})
        data = dataset()
        name = embedding_report.clusters_name(config, data)
        if config.tasks.labels == "clusters":
            assert name.startswith(embedding_report.embedding_name(config, data))
        return name

    assert len({names(row) for row in presets.EMBEDDINGS}) == len(presets.EMBEDDINGS)
    assert names("contrastive_ward") == (
        "drawings, embedding contrastive, whiten=0.5, length 1, k-means from ward"
    )
    assert names("pixels") == "drawings, embedding pixels, k-means from k-means++"
    again = names("pixels", **{"clustering.rounds": 2})
    assert again == "drawings, meta-trained FEN, k-means from k-means++"
    assert names("pixels", **{"tasks.labels": "true"}) == "drawings, true classes"


def test_rows_of_the_map():
    group = np.array([4] * 40 + [7, 9, 9])
    rows, own = embedding_report.map_rows(group, np.random.default_rng(0))
    assert set(group[rows]) == {4, 9} and set(own) == {0, 1}  # 7 has one image only
    assert np.sum(own == 0) == embedding_report.PER_GROUP and len(set(rows)) == len(rows)
    many, own = embedding_report.map_rows(np.arange(100) // 2, np.random.default_rng(0))
    assert own.max() + 1 == embedding_report.GROUPS and len(many) == 2 * embedding_report.GROUPS
    alone, own = embedding_report.map_rows(np.arange(3), np.random.default_rng(0))
    assert len(alone) == 3


@pytest.mark.parametrize(("count", "dim"), [(1, 3), (3, 3), (4, 3), (12, 1), (100, 3)])
def test_the_perplexity_adapts_to_the_number(count, dim, monkeypatch):
    seen, tsne = [], embedding_report.TSNE
    monkeypatch.setattr(
        embedding_report, "TSNE", lambda **kw: seen.append(kw["perplexity"]) or tsne(**kw)
    )
    z = np.random.default_rng(0).normal(size=(count, dim)).astype(np.float32)
    points = embedding_report.project(z, seed=0)
    assert points.shape == (count, 2) and np.isfinite(points).all()
    np.testing.assert_array_equal(points, embedding_report.project(z, seed=0))
    assert seen == ([] if count < 4 else [pytest.approx(min(30, (count - 1) / 3))] * 2)


def test_the_map_keeps_groups_together():
    rng = np.random.default_rng(0)
    z = np.repeat(10 * np.eye(3, 6), 20, axis=0) + rng.normal(size=(60, 6))
    points = embedding_report.project(z.astype(np.float32), seed=0)
    centre = points.reshape(3, 20, 2).mean(axis=1)
    own = np.linalg.norm(points[:, None] - centre[None], axis=2).argmin(axis=1)
    np.testing.assert_array_equal(own, np.arange(60) // 20)


@pytest.mark.parametrize(("channels", "labelled"), [(1, False), (3, True)])
def test_the_figures_of_an_embedding(tmp_path, channels, labelled):
    data = dataset(channels=channels, labelled=labelled)
    z = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)
    names = embedding_report.write(Config(), data, z, clusters(np.arange(30) % 3), tmp_path)
    assert names == PAGES
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {f"{n}.png" for n in names}
    for name in ("embedding_neighbours", "embedding_clusters"):
        page = tmp_path / "figures" / f"{name}.png"
        assert has_color(page, embedding_figures._SAME) == labelled
        assert has_color(page, embedding_figures._OTHER) == labelled
    assert min(pixels(tmp_path / "figures" / "embedding_map.png").shape[:2]) > 500
    before = {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()}
    embedding_report.write(Config(), data, z, clusters(np.arange(30) % 3), tmp_path)
    assert {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()} == before


def test_two_images_are_enough(tmp_path):
    data = dataset(count=2, classes=1)
    z = np.array([[0.0], [1.0]], np.float32)
    assert embedding_report.write(Config(), data, z, clusters(np.zeros(2)), tmp_path) == PAGES


@pytest.mark.slow
def test_the_figures_of_an_autoencoder(tmp_path):
    part = split(size=7)
    values = {
        "embedding.name": "acai", "embedding.dim": 16, "embedding.depth": 1, "embedding.width": 2,
        "embedding.steps": 1, "embedding.batch_size": 4,
    }  # fmt: skip
    config = override(Config(), values)
    encode, _ = acai.fit(
        part.images, jax.random.key(0), config.embedding,
        checkpoint_dir=tmp_path / "embedding", report=lambda line: None,
    )  # fmt: skip
    data = dataclasses.replace(dataset(), train=part)
    z = encode(part.images)
    names = embedding_report.write(config, data, z, clusters(np.arange(30) % 3), tmp_path)
    assert names[3:] == ["embedding_reconstructions", "embedding_interpolations"]
    for name in names:
        assert pixels(tmp_path / "figures" / f"{name}.png").std() > 5


def table(tmp_path, *flags, **values):
    """Run the program on generated characters: (exit code, lines said, what went wrong)."""
    values = {"data.num_classes": 20, "clustering.num_clusters": 10} | values
    command = [
        sys.executable, "experiments/embeddings.py", "--config=configs/quickstart.py:smoke",
        f"--workdir={tmp_path}", *flags,
        *(f"--config.{k}={v}" for k, v in values.items() if v is not None),
    ]  # fmt: skip
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "values", "message"),
    [
        (["--rows=pixels,acay"], {}, "or one of them as pca_64; did you mean 'acai'?"),
        (["--stage=train"], {}, "--stage=train: a row is embedded and clustered"),
        (["--rows=pca"], {"seeds": 2}, "seeds=2, expected 1"),
        (["--rows="], {}, "--rows is empty, expected one or more of pixels"),
        (["--rows=pca", "--write_docs=d.json"], {}, "d.json, expected a Markdown file"),
        (["--rows=acai"], {"embedding.critic_mix": 2.0}, "critic_mix=2.0, expected 0 to 1"),
        (["--rows=contrastive"], {"embedding.temperature": 1e-9}, "expected at least 0.001"),
        (["--rows=pca"], {"clustering.minibatch_above": -1}, "above=-1, expected at least 0"),
        (["--rows=acai,sela"], {"embedding.steps": 9}, "(4000 in acai, 10000 in sela)"),
        (["--rows=pca,pca_5"], {}, "num_clusters=10 in row pca_5, which is named after 5"),
        (
            ["--rows=pixels_999"],
            {"clustering.num_clusters": None},
            "row pixels_999: clustering.num_clusters=999, expected 2 to",
        ),
        (["--rows=pixels,acai"], {"embedding.batch_size": 9999}, "row acai: embedding.batch_size"),
    ],
)
def test_a_table_that_cannot_be(tmp_path, flags, values, message):
    code, _, err = table(tmp_path, *flags, **values)
    assert code == 2 and message in err and "Traceback" not in err
    assert not any(tmp_path.iterdir())


@functools.cache
def program():
    """The module `experiments/embeddings.py`, on the same `run` as other tests."""
    sys.modules["run"] = programs.program()
    path = programs.ROOT / "experiments" / "embeddings.py"
    spec = importlib.util.spec_from_file_location("embeddings_program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_training_is_copied_from_a_row_on_the_same_images(tmp_path):
    config = override(Config(), {"embedding.name": "contrastive"})
    row = tmp_path / "contrastive" / "seed0"
    (row / "embedding").mkdir(parents=True)
    (row / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    whitened = override(config, {"embedding.whiten": 0.5})
    for made, source in (
        ({"fingerprint": pseudo_labels.made_from(config, "hash")[0]}, row),
        ({"fingerprint": pseudo_labels.made_from(config, "x")[0]}, None),
        ({}, None),
    ):
        np.savez(row / "embeddings.npz", **made)
        folder = tmp_path / "contrastive_half_whitened" / "seed0"
        assert program().twin(whitened, dataset(), folder) == source


@pytest.mark.slow
def test_a_table_of_embeddings_trains_one_for_rows_that_share_it(tmp_path):
    values = {"embedding.channels": 4, "embedding.steps": 10, "embedding.batch_size": 8}
    document = tmp_path / "results.md"
    code, first, err = table(tmp_path / "rows", "--rows=contrastive,pixels", **values)
    assert code == 0, err
    code, lines, err = table(
        tmp_path / "rows", "--rows=contrastive,contrastive_ward", f"--write_docs={document}",
        **values,
    )  # fmt: skip
    assert code == 0, err
    tmp_path = tmp_path / "rows"
    assert lines[lines.index("== contrastive") + 1].startswith("finished, in")
    with lock(tmp_path / "pca" / ".seed0.lock"):  # another process's row is passed over
        code, others, _ = table(tmp_path, "--rows=pca,contrastive", **values)
    assert code == 0 and others[others.index("== pca") + 1].startswith("another process is at it")
    assert "== contrastive" in others and not (tmp_path / "pca" / "seed0").exists()
    with lock(tmp_path.with_name("none") / "pca" / ".seed0.lock"):
        flags = ("--rows=pca", f"--write_docs={tmp_path / 'none.md'}")
        code, others, _ = table(tmp_path.with_name("none"), *flags, **values)
    assert code == 0 and not (tmp_path / "none.md").exists()
    assert others[-1].startswith("no row is finished; the block 'embeddings of glyphs' is left")
    ward = lines[lines.index("== contrastive_ward") :]
    assert any(line.startswith("embed: reuses 10 steps of") for line in ward)
    # Trained anew with other settings, it is no twin any more.
    shutil.rmtree(tmp_path / "contrastive" / "seed0" / "embedding")
    code, _, err = table(tmp_path, "--rows=contrastive", **values | {"embedding.steps": 20})
    assert code == 0, err
    shutil.rmtree(tmp_path / "contrastive_ward")
    code, lines, err = table(tmp_path, "--rows=contrastive_ward", **values)
    assert code == 0 and not any("copies" in line for line in lines), err
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| pixels", "| contrastive", "| contrastive_ward"
    ]  # fmt: skip
    assert "--rows=pixels,contrastive,contrastive_ward" in document.read_text()
    assert "\n| contrastive_ward | " in document.read_text()
    assert (tmp_path / "pixels" / "seed0" / "figures" / "cluster_sizes.png").exists()
    row = json.loads((tmp_path / "contrastive_ward" / "seed0" / "row.json").read_text())
    assert 0 < row["validation purity"] <= 1 and row["commit"] and row["steps"] == 10
    paths = (
        tmp_path / name / "seed0" / "embeddings.npz" for name in ("contrastive", "contrastive_ward")
    )
    plain, whitened = (np.load(path)["embeddings"] for path in paths)
    assert len(plain) == len(whitened) and not np.array_equal(plain, whitened)


def test_a_map_shows_every_point(tmp_path, monkeypatch):
    shown = []

    def save(figure, path):
        ax = figure.axes[0]
        shown.append((np.sort(ax.get_xlim()), np.sort(ax.get_ylim())))

    monkeypatch.setattr(embedding_figures, "save", save)
    rng = np.random.default_rng(0)
    for scale in ([1, 1], [1, 3], [5, 1], [1, 0]):
        points = rng.uniform(-1, 1, (40, 2)) * scale
        images = np.zeros((40, 6, 6, 1), np.uint8)
        embedding_figures.embedding_map(points, np.arange(40) % 3, images, tmp_path, title="t")
        for axis, (low, high) in enumerate(shown[-1]):
            assert low < points[:, axis].min() and points[:, axis].max() < high


@pytest.mark.slow
def test_rows_of_other_numbers_of_clusters(tmp_path):
    values = {"embedding.channels": 4, "embedding.steps": 10, "embedding.batch_size": 8}
    document = tmp_path / "doc.md"
    code, lines, err = table(
        tmp_path / "rows", "--rows=contrastive_12,contrastive_5,pixels", f"--write_docs={document}",
        **values, **{"clustering.num_clusters": None},
    )  # fmt: skip
    assert code == 0, err
    assert sum("copies the training" in line for line in lines) == 1
    rows = [row.split(" | ") for row in (tmp_path / "rows" / "table.md").read_text().splitlines()]
    assert [(row[0], row[7]) for row in rows[3:]] == [
        ("| contrastive_5", "5"), ("| contrastive_12", "12")
    ]  # fmt: skip
    # The document is made of what is kept beside it, rows of another workdir among it.
    first = document.read_text()
    code, _, err = table(
        tmp_path / "others", "--rows=pca_5", f"--write_docs={document}",
        **values, **{"clustering.num_clusters": None},
    )  # fmt: skip
    assert code == 0, err
    assert "| pca_5 |" in document.read_text() and "| pca_5 |" not in first
    kept = [line for line in first.splitlines() if line.startswith(("| pixels", "| contrastive"))]
    assert len(kept) == 3 and set(kept) <= set(document.read_text().splitlines())
    # Nothing gives way to other settings or images.
    before = document.read_text()
    for changed, message in (
        ({"embedding.dim": 4}, "pca_5/seed0 keeps a row of other settings"),
        ({"data.num_classes": 21}, "keeps a row on other images"),
    ):
        code, _, err = table(
            tmp_path / "more", "--rows=pca_5", f"--write_docs={document}",
            **values, **{"clustering.num_clusters": None}, **changed,
        )  # fmt: skip
        assert code == 2 and message in err and document.read_text() == before


@pytest.mark.slow
def test_given_embeddings_are_a_row(tmp_path):
    values = {"embedding.normalize": False}
    code, _, err = table(tmp_path / "rows", "--rows=pixels", **values)
    assert code == 0, err
    file = tmp_path / "rows" / "pixels" / "seed0" / "embeddings.npz"
    given = values | {"embedding.file": file}
    code, lines, err = table(tmp_path / "others", "--rows=npz", **given)
    assert code == 0, err
    ours, theirs = (
        json.loads((path / "seed0" / "row.json").read_text())
        for path in (tmp_path / "rows" / "pixels", tmp_path / "others" / "npz")
    )
    assert ours["purity"] == theirs["purity"] and "FILE" in theirs["flags"]
    assert str(file) not in theirs["flags"] and any("figures in" in line for line in lines)
    arrays = dict(np.load(file))
    np.savez(tmp_path / "few.npz", ids=arrays["ids"][1:], embeddings=arrays["embeddings"][1:])
    given = values | {"embedding.file": tmp_path / "few.npz"}
    code, _, err = table(tmp_path / "others", "--rows=npz", **given)
    assert code == 2 and "no embedding of 1 of 260 training images" in err
