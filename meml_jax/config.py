"""The settings of a run as frozen dataclasses: the schema and its defaults."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which images, in which size, split how."""

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
    file: str | None = None  # npz: embeddings by image id; None: Z of a data set that is an npz
    dim: int = 64  # pca, deepcluster, sela, acai: of the vectors; contrastive has the FEN's
    whiten: float = 0.0  # decorrelate; 1: unit variance, 0.5: half way; for any embedding
    normalize: bool = False  # l2-normalise each vector, after whitening
    channels: int = 256  # contrastive: width of the FEN; deepcluster, sela: of AlexNet
    views: str = "drawing"  # contrastive, deepcluster, sela: drawing, photo
    temperature: float = 0.1  # contrastive
    width: int = 16  # acai: channels of the first block, doubled by each
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
    init: str = "k-means++"  # where k-means starts: k-means++, or the means of Ward's clusters
    num_init: int = 1
    max_iter: int = 100
    minibatch_above: int = 100_000  # rows; larger sets use MiniBatchKMeans
    rounds: int = 1  # more: embed with the meta-trained FEN, cluster and train again


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    """How clusters become tasks, Sec. 2."""

    labels: str = "clusters"  # clusters, or true: the oracle
    min_size: int = 2  # smaller clusters are dropped (released code: 10)
    rotations: bool = False  # a cluster turned by 90, 180 or 270 degrees is one more cluster
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
    """N-way K-shot episodes, the standard few-shot setting (Table 3).

    Of `tasks` they obey labels, min_size, rotations and balance=truncate; the rest is for one
    cluster a task.
    """

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
    compute_dtype: str = "float32"  # of the FEN's arithmetic, or bfloat16; parameters are float32


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
    fen_lr: float | None = None  # that of theta, where it is to be another
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
    """Meta-test (docs/method.md, Meta-test)."""

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
    """A whole run, which is a function of this and of the images (to the bit on one machine)."""

    preset: str = "paper"
    seed: int = 0
    seeds: int = 1  # runs with seed, seed + 1, ..., each in WORKDIR/seed<k>; 1: one, in WORKDIR
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
