"""The settings of a run as frozen dataclasses: one schema, its defaults, and their conversion."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from typing import Any

from meml_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which images, in which size, split how (DESIGN 5)."""

    name: str = "glyphs"
    dir: str | None = None  # folder of the files; None: the user cache, downloaded where possible
    image_size: int = 28  # pixels a side; 0: chosen from the data and printed
    channels: int = 1  # 1 grey, 3 colour; 0: chosen from the data and printed
    split: str = "random"  # omniglot: random (1100/100/423) or official (964/659)
    split_seed: int = 0
    num_classes: int = 1623  # glyphs only
    per_class: int = 20  # glyphs only
    max_per_class: int | None = None  # read only the first images of each class; None: all
    validation_fraction: float = 0.1  # folder, npz, cifar100, cub: share of the classes
    test_fraction: float = 0.3  # likewise; slimagenet64 has its own, see data/photographs.py
    skip_bad: bool = False  # True: leave unreadable files out and report how many
    cache_dir: str | None = None  # decoded arrays; None: the user cache
    download_timeout: float = 20.0  # seconds without an answer


@dataclasses.dataclass(frozen=True)
class TestDataConfig:
    """Another data set whose classes, all of them, take the place of the test part (OoD tasks).

    Its images get the size and the channels of the training set. The rest of the run, the choice of
    the meta-test learning rate too, sees the training set only.
    """

    name: str | None = None  # as data.name; None: the data set's own test part
    dir: str | None = None  # folder of the files
    max_per_class: int | None = None  # read only the first images of each class; None: all
    skip_bad: bool = False  # leave unreadable files out and report how many


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """How unlabelled images become vectors."""

    name: str = "pca"  # a row of embeddings.EMBEDDINGS, or npz
    dim: int = 64  # pca, deepcluster, sela: number of components
    whiten: bool = False  # decorrelate, unit variance; for any embedding
    normalize: bool = False  # l2-normalise each vector, after whitening
    channels: int = 256  # contrastive: width of the FEN; deepcluster, sela: of AlexNet
    views: str = "drawing"  # contrastive, deepcluster, sela: drawing, photo
    temperature: float = 0.1  # contrastive
    width: int = 16  # acai: channels of the first block, doubled by each (its authors: 64)
    depth: int = 3  # acai: blocks, each halves the image
    critic_mix: float = 0.2  # acai: gamma, share of the image in what the critic calls real
    critic_weight: float = 0.5  # acai: lambda, of the critic in the autoencoder's loss
    num_pseudo_labels: int = 256  # deepcluster, sela: labels that the network learns to predict
    round_steps: int = 100  # deepcluster, sela: steps until labels are made anew; tens
    sharpness: float = 25.0  # sela: lambda, of scores against entropy in the assignment
    steps: int = 2_000  # of a trained embedding
    batch_size: int = 256  # images a step (contrastive: pairs of views)
    learning_rate: float = 1e-3  # Adam, cosine decay to 0
    checkpoint_every: int = 100  # steps


@dataclasses.dataclass(frozen=True)
class ClusteringConfig:
    """The offline k-means stage."""

    num_clusters: int = 1100  # 0: chosen from the number of images and printed
    num_init: int = 1
    max_iter: int = 100
    minibatch_above: int = 100_000  # rows; larger sets use MiniBatchKMeans
    rounds: int = 1  # more: embed with the meta-trained FEN, cluster and train again


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    """How clusters become tasks, Sec. 2."""

    labels: str = "clusters"  # clusters, or true: the oracle
    min_size: int = 2  # smaller clusters are dropped (released code: 10)
    max_size: int | None = None  # most images of one cluster used in one task
    min_used: int | None = None  # least: from there to max_size in proportion to the cluster's size
    usable_fraction: float = 1.0  # leading share of a cluster that tasks use (released code: 3/4)
    support_fraction: float = 2 / 3  # of the images used
    # Random query images come from other clusters, or all (released code); coreset: all of S_query
    # comes from a reservoir of what was seen.
    query_from: str = "other"
    num_random_query: int = 10
    coreset_size: int = 500  # images kept
    coreset_batch: int = 15  # of them in each S_query
    # truncate: drop clusters under balance_size and draw so many of others; augment: refill them to
    # balance_size with random views; loss: Gamma of eqs 5-7.
    balance: str = "none"
    balance_size: int = 20
    num_buckets: int = 8  # padded sizes; each is compiled once


@dataclasses.dataclass(frozen=True)
class EpisodesConfig:
    """N-way K-shot episodes, the standard few-shot setting (Table 3)."""

    ways: int = 0  # classes of an episode, outputs of the CLN; 0: one cluster a task, as in Sec. 2
    shots: int = 1  # support images a class
    queries: int = 5  # query images a class
    balanced: bool = True  # False: support images in proportion to the cluster, `shots` on average


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """FEN, attention and CLN (supplement, Implementation Details)."""

    channels: int = 256
    hidden: int = 1024  # width of the CLN
    cln_relu: bool = True  # released code: False, the classifier is linear in the features
    attention_feature: str = "relu"  # what attention pools: relu, or preactivation (released code)


@dataclasses.dataclass(frozen=True)
class InnerConfig:
    """The inner update, eq. 3."""

    lr: float = 0.01
    steps: int = 1  # how often each phase of the learner is done (maml, fomaml, anil: its steps)
    first_order: bool = False  # inner gradients are constants to the outer one (fomaml: always)
    remat: bool = False  # recompute inner steps in the outer gradient: less memory, more time
    reset_bias: bool = True  # redraw the class's bias with its row (released code: False)
    # Refinements of the pooling that the paper names as future work (pooling.py); off by default.
    keep_nearest: float = 1.0  # share of a cluster that is pooled, nearest to its mean feature
    max_distance: float | None = None  # farther ones are not pooled; in rms distances, 1 or more
    sub_group_size: int | None = None  # images pooled into one of several, which are then pooled


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """The outer update, eq. 4."""

    lr: float = 1e-4  # Adam
    clip: float = 5.0  # element-wise
    meta_batch: int = 1  # tasks a step
    weight_on: str = "meta"  # Gamma multiplies the meta loss, or the inner losses (released code)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Meta-training."""

    steps: int = 40_000
    init: str = "random"  # FEN at step 0: random, or embedding (the contrastive one's FEN)
    steps_per_call: int = 50  # meta-steps in one compiled call
    images_on: str = "auto"  # device, host (same result, gathered for each call), auto: by memory
    log_every: int = 500  # steps
    checkpoint_every: int = 1_000  # steps
    validate_every: int = 2_000  # steps; prototype accuracy on validation classes, for `best`


@dataclasses.dataclass(frozen=True)
class TestConfig:
    """Meta-test (DESIGN 6)."""

    protocol: str = "clean"  # clean, released
    heads: tuple[str, ...] = ("sgd", "prototype")  # first one is the result, others are compared
    num_classes: tuple[int, ...] = (10, 50, 75, 100, 150, 200)  # empty: chosen and printed
    num_outputs: int | None = None  # of the sgd head; None: max(num_classes), released: all classes
    runs: int = 50
    shots: int = 15  # images a class in the stream
    queries: int = 5  # images a class that are tested
    learning_rates: tuple[float, ...] = (
        0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7, 1e-7,
    )  # fmt: skip
    trajectories: int = 5  # streams a learning rate is judged on
    ways_shots: tuple[tuple[int, ...], ...] = ((5, 1), (5, 5), (20, 1), (20, 5))  # of episodes
    episodes: int = 600  # at each of them, with `queries` images a class
    inner_steps: int | None = None  # of an episode; None: as in meta-training
    reservoir_size: int = 500  # images kept by the sgd_reservoir head
    reservoir_batch: int = 10  # of them replayed with each new image
    iid: bool = True  # also report the sgd head on a shuffled stream
    checkpoint: str = "last"  # last, best (on validation classes)


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run: a run is a function of this and nothing else."""

    preset: str = "paper"
    seed: int = 0
    precision: str = "highest"  # jax_default_matmul_precision
    learner: str = "meml"
    data: DataConfig = DataConfig()
    test_data: TestDataConfig = TestDataConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    clustering: ClusteringConfig = ClusteringConfig()
    tasks: TasksConfig = TasksConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    network: NetworkConfig = NetworkConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    train: TrainConfig = TrainConfig()
    test: TestConfig = TestConfig()


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "released": {
        "preset": "released",
        "learner": "meml_released",
        "tasks.min_size": 10,
        "tasks.usable_fraction": 0.75,
        "tasks.query_from": "all",
        "network.cln_relu": False,
        "network.attention_feature": "preactivation",
        "inner.reset_bias": False,
        "outer.weight_on": "inner",
        "test.protocol": "released",
    },
}
"""What the paper says, which is the default of each field, and what its released code does instead
(docs/deviations.md)."""


def override(config: Config, values: dict[str, Any]) -> Config:
    """Replace dotted fields, e.g. `{"train.steps": 100}`.

    Raises:
      UserError: a field that does not exist, with the nearest name, or a value of a wrong type.
    """
    tree = dataclasses.asdict(config)
    for path, value in values.items():
        check_field(path)
        *groups, name = path.split(".")
        functools.reduce(dict.__getitem__, groups, tree)[name] = value
    return from_dict(tree)


def check_field(path: str) -> None:
    """Raise UserError, with the nearest name, where a dotted name is no field."""
    if path not in flatten(Config()):
        raise UserError(f"unknown config field {path!r}{_hint(path)}")


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a Config from nested dicts, e.g. of an ml_collections.ConfigDict or of config.json.

    A field that is not there takes its default, so settings stored by an older version can be read.

    Raises:
      UserError: an unknown field, with the nearest name, or a value of a wrong type.
    """
    return _build(Config, tree, "")


def flatten(config: Config) -> dict[str, Any]:
    """List all fields by dotted name."""

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix[:-1]: node}
        parts = [walk(value, f"{prefix}{name}.") for name, value in node.items()]
        return {name: value for part in parts for name, value in part.items()}

    return walk(dataclasses.asdict(config), "")


def config_dict(config: Config) -> Any:
    """Make the locked ml_collections.ConfigDict that `--config.a.b=value` overrides."""
    from ml_collections import config_dict as lib  # only programs with a command line need it

    def convert(node: Any) -> Any:
        result = lib.ConfigDict()
        for name, hint in typing.get_type_hints(type(node)).items():
            value = getattr(node, name)
            if dataclasses.is_dataclass(value):
                value = convert(value)
            elif type(None) in typing.get_args(hint):
                # A placeholder lets None be overridden, by a value of the right type only.
                reference = lib.placeholder(next(t for t in typing.get_args(hint) if t))
                reference.set(value)
                value = reference
            result[name] = value
        return result

    return convert(config).lock()


def preset_config(arg: str, presets: dict[str, dict[str, Any]], values: dict[str, Any]) -> Any:
    """Make the ConfigDict of a file in configs/: defaults, `values`, then the presets asked for.

    Args:
      arg: what stands behind the colon of `--config=FILE:arg`: names separated by commas, e.g.
        `released,smoke`; later ones win. At most one of them may be a method, which a run is named
        after (it sets `preset`): `paper`, `released`, or one of the file's.
      presets: the file's own presets; `paper` and `released` always exist.
      values: the file's overrides of the defaults.

    Raises:
      UserError: an unknown preset, or two methods.
    """
    known = PRESETS | presets
    names = [name.strip() for name in arg.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"unknown preset {name!r}, expected some of {sorted(known)}")
    methods = [name for name in names if "preset" in known[name]]
    if len(methods) > 1:
        raise UserError(f"presets {arg!r}: got {' and '.join(methods)}, expected one of them")
    config = override(Config(), values)
    for name in names:
        config = override(config, known[name])
    return config_dict(config)


def departures(config: Config) -> dict[str, Any]:
    """Fields, and their values, in which a run is not what its `preset` stands for.

    Of `paper` and `released`, and of the points in which these two differ; the learner, which a
    result names, is not among them.
    """
    if config.preset not in PRESETS:
        return {}
    expected = flatten(Config()) | PRESETS[config.preset]
    values = flatten(config)
    points = sorted(PRESETS["released"].keys() - {"preset", "learner"})
    return {name: values[name] for name in points if values[name] != expected[name]}


def _hint(path: str) -> str:
    """Name the field that is nearest to a wrong one, by its whole path or by its last part."""
    fields = list(flatten(Config()))
    nearest = difflib.get_close_matches(path, fields, n=1, cutoff=0.7)
    leaf = path.rsplit(".", 1)[-1]
    nearest += [
        f for f in fields if difflib.SequenceMatcher(None, f.split(".")[-1], leaf).ratio() > 0.75
    ]
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; fields are {', '.join(fields)}"


def _build(cls: type, tree: Any, prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    if not isinstance(tree, dict):
        raise UserError(f"config.{prefix[:-1]} is {tree!r}, expected a group of fields")
    for name in tree:
        if name not in hints:
            raise UserError(f"unknown config field {prefix + name!r}{_hint(prefix + name)}")
    values = {}
    for name, hint in hints.items():
        if name not in tree:
            continue
        group = dataclasses.is_dataclass(hint)
        values[name] = (
            _build(hint, tree[name], f"{prefix}{name}.")  # type: ignore[arg-type]
            if group
            else _checked(tree[name], hint, prefix + name)
        )
    return cls(**values)


def _words(items: typing.Iterable[Any]) -> list[Any]:
    """Split words at commas: `a,b` and `(a,b)` without quotes come as one from the command line."""
    words: list[Any] = []
    for item in items:
        parts = item.strip("()[] ").split(",") if isinstance(item, str) else [item]
        words += [part.strip(" '\"") if isinstance(part, str) else part for part in parts]
    return [word for word in words if word != ""]


def _checked(value: Any, hint: Any, path: str) -> Any:
    """Return value as the annotated type: whole numbers may stand for floats, lists for tuples."""
    kinds = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
            item = typing.get_args(kind)[0]
            value = _words(value) if item is str else value
            return tuple(_checked(v, item, f"{path}[{i}]") for i, v in enumerate(value))
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (int, str, bool) and type(value) is kind:
            return value
    expected = " or ".join(getattr(k, "__name__", str(k)) for k in kinds if k is not type(None))
    raise UserError(f"config field {path!r} is {value!r}, expected {expected}")
