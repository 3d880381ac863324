import copy
import struct

import numpy as np
import pytest
from PIL import Image
from test_report import RESULTS

from meml_jax import cluster_figures, figures
from meml_jax.attention import AttendedCluster
from meml_jax.paper import paper_rows

RNG = np.random.default_rng(0)


def check(path, folder):
    """It is a PNG with a white opaque ground and something drawn, and nothing else is left."""
    data = path.read_bytes()
    assert data[:4] == b"\x89PNG" and len(data) > 5000
    width, height = struct.unpack(">II", data[16:24])
    assert width > 600 and height > 250
    pixels = np.asarray(Image.open(path).convert("RGBA"))
    assert (pixels[..., 3] == 255).all() and (pixels[0, 0, :3] == 255).all()
    assert len(np.unique(np.ascontiguousarray(pixels).view(np.uint32))) > 20
    assert [p.name for p in folder.iterdir()] == [path.name]
    return pixels


def test_no_display_is_needed(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    figures.accuracy_curve(RESULTS, tmp_path / "a.png")
    check(tmp_path / "a.png", tmp_path)


def test_accuracy_curve(tmp_path):
    plain = tmp_path / "a.png"
    figures.accuracy_curve(RESULTS, plain)
    before = check(plain, tmp_path)
    figures.accuracy_curve(RESULTS, plain, paper=paper_rows("omniglot"))
    assert not np.array_equal(before, check(plain, tmp_path))


def test_the_paper_stands_beside_the_same_head(drawn):
    """In its look, up to as many classes as were tested; what was not tested has nothing beside."""
    figures.accuracy_curve(RESULTS, "a.png", paper=paper_rows("omniglot"))
    ax = drawn[-1].axes[0]
    most = max(point["num_classes"] for point in RESULTS["meta_test"]["points"])
    lines = {line.get_label(): line for line in ax.lines}
    assert RESULTS["meta_test"]["head"] == "sgd" and "MEML RS (paper)" not in lines
    ours = ax.containers[0].lines[0]
    assert lines["MEML (paper)"].get_color() == ours.get_color()
    assert max(lines["MEML (paper)"].get_xdata()) <= most


def test_accuracy_curve_of_one_point_without_spread_or_comparisons(tmp_path):
    results = copy.deepcopy(RESULTS)
    del results["comparisons"]
    results["meta_test"]["points"] = [
        {**results["meta_test"]["points"][0], "ci95": 0.0, "learning_rate": None}
    ]
    figures.accuracy_curve(results, tmp_path / "a.png")
    pixels = check(tmp_path / "a.png", tmp_path)
    blue = np.array([0x00, 0x72, 0xB2])
    # more than the marker in the legend: the point itself is drawn
    assert (np.abs(pixels[:, : pixels.shape[1] // 2, :3].astype(int) - blue).sum(-1) < 9).any()


@pytest.fixture
def drawn(monkeypatch):
    """The figures, in place of their files."""
    kept = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure))
    return kept


def test_chance_is_seen_at_one_number_of_classes(drawn):
    one = copy.deepcopy(RESULTS)
    for series in (one["meta_test"], *one["comparisons"]):
        series["points"] = series["points"][:1]
    for results, marker in ((RESULTS, "."), (one, "_")):
        figures.accuracy_curve(results, "a.png")
        [chance] = [line for line in drawn[-1].axes[0].lines if line.get_label() == "chance"]
        assert chance.get_marker() == marker


@pytest.mark.parametrize(
    ("alpha", "extend"),
    [
        ([0.25] * 4, "neither"),
        ([0.7, 0.28, 0.02], "min"),
        ([0.76] + [0.02] * 12, "max"),
        ([0.9] + [0.009] * 11 + [0.001], "both"),
    ],
)
def test_weights_beyond_the_colours_are_pointed_at(drawn, alpha, extend):
    images = np.zeros((len(alpha), 8, 8, 1), np.uint8)
    cluster = AttendedCluster(images, np.float32(alpha), len(alpha))
    cluster_figures.cluster_grid([cluster], "c.png", title="a cluster")
    [bar] = [ax for ax in drawn[-1].axes if ax.get_label() == "<colorbar>"]
    assert bar._colorbar.extend == extend


@pytest.mark.parametrize(
    "clusters",
    [
        [(RNG.integers(0, 255, (n, 28, 28, 1)), RNG.dirichlet(np.ones(n))) for n in (3, 40, 14)],
        [(RNG.integers(0, 255, (9, 84, 84, 3)), RNG.dirichlet(np.ones(9)))],
        [(np.zeros((1, 28, 28, 1)), np.ones(1))],
        [(RNG.integers(0, 255, (5, 8, 8, 1)), np.array([1.0, 0, 0, 0, 0]))],
    ],
    ids=["gray", "colour", "one image", "all on one"],
)
def test_cluster_grid(tmp_path, clusters):
    def draw(more):
        rows = [
            AttendedCluster(images.astype(np.uint8), alpha.astype(np.float32), len(alpha) + more)
            for images, alpha in clusters
        ]
        cluster_figures.cluster_grid(rows, tmp_path / "c.png", title="some clusters")
        return check(tmp_path / "c.png", tmp_path)

    # That a cluster has more images than were looked at is said.
    assert not np.array_equal(draw(0), draw(1000))


@pytest.mark.parametrize("sizes", [[20], [2, 2, 3], RNG.geometric(0.05, 1000), [1, 10_000]])
def test_cluster_sizes(tmp_path, sizes):
    def draw(**info):
        figures.cluster_sizes(sizes, tmp_path / "s.png", name="drawings, pca", info=info)
        return check(tmp_path / "s.png", tmp_path)

    # What is known of the true classes is said.
    assert not np.array_equal(draw(dropped=4, purity=None), draw(dropped=4, purity=0.5, nmi=0.75))


def test_training_curves(tmp_path):
    records = [
        {"step": s, "time": 0.0, "train/loss": 5 / (s + 1), "train/accuracy": s / 100}
        for s in range(100)
    ]
    records += [{"step": 50, "time": 0.0, "validation/accuracy": 0.5, "train/loss": None}]
    for some in (records, records[:1], records[-1:], []):
        figures.training_curves(some, tmp_path / "t.png", validation_classes=100)
        check(tmp_path / "t.png", tmp_path)


def test_the_axis_of_a_training_begins_at_its_start(drawn):
    records = [{"step": s, "train/loss": 1.0, "validation/accuracy": 0.5} for s in (105, 150)]
    for some in (records[:1], records):
        figures.training_curves(some, "t.png", validation_classes=7)
        _, lower = drawn[-1].axes
        low, high = lower.get_xlim()
        assert low == 0 and some[-1]["step"] < high < 1.1 * some[-1]["step"]
        assert [text.get_text() for text in lower.get_legend().get_texts()] == [
            "prototypes of 7 validation classes"
        ]
