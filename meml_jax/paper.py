"""The numbers that the paper reports, to stand beside ours."""

from __future__ import annotations

from meml_jax.config import Config


class Published(float):
    """An accuracy as the paper reports it, in %: a number, as it is drawn and compared.

    Attributes:
      half: what stands after its ±, in %; None: nothing does.
      decimals: those of its table.
    """

    half: float | None
    decimals: int

    def __new__(cls, value: float, half: float | None = None, *, decimals: int = 1) -> Published:
        """Make one, without ± unless there is one."""
        made = super().__new__(cls, value)
        made.half, made.decimals = half, decimals
        return made


_OMNIGLOT = (10, 50, 75, 100, 150, 200)
_FEW = (2, 4, 6, 8, 10)
_SLIMAGENET = (5, 10, 20, 30, 40, 50)
_CUB = (2, 10, 20, 30, 40)

STEPS = {"omniglot": 40_000, "mini_imagenet": 200_000, "slimagenet64": 200_000}
"""Meta-steps of the continual trainings, by dataset (supplement, Implementation Details)."""

PAPER: dict[str, tuple[tuple[int, ...], dict[str, tuple[float, ...]]]] = {
    "omniglot": (
        _OMNIGLOT,
        {
            "Oracle OML": (88.4, 74.0, 69.8, 57.4, 51.6, 47.9),
            "Oracle MEML": (92.3, 78.2, 72.7, 60.9, 51.8, 51.4),
            "OML": (74.6, 32.5, 30.6, 25.8, 19.9, 16.1),
            "OML single": (67.5, 32.0, 30.2, 24.3, 18.4, 15.3),
            "MEML mean": (60.6, 31.2, 25.8, 21.3, 17.0, 13.7),
            "MEML": (84.6, 37.3, 37.5, 30.9, 25.4, 20.7),
            "MEML RS": (81.6, 56.4, 54.0, 44.6, 34.1, 27.4),
            "OML balanced 500": (67.8, 27.6, 29.4, 24.5, 18.7, 15.8),
            "OML balancing param": (59.4, 27.2, 24.3, 18.4, 15.5, 11.8),
            "OML augmentation": (72.2, 35.1, 32.5, 27.5, 21.8, 17.3),
            "OML RS": (67.9, 55.1, 46.2, 37.0, 29.6, 25.6),
            "OML RS both": (75.9, 56.8, 51.2, 39.7, 30.5, 25.0),
            "MEML RS both": (74.7, 47.0, 48.4, 38.3, 28.9, 24.2),
            "Oracle OML FiLM": (91.1, 79.5, 80.6, 68.6, 64.0, 52.7),
        },
    ),
    "mini_imagenet": (
        _FEW,
        {
            "Oracle OML": (50.0, 31.9, 27.0, 16.7, 13.9),
            "Oracle MEML": (66.0, 33.0, 28.0, 29.1, 21.1),
            "OML": (49.3, 41.0, 19.2, 18.2, 12.0),
            "MEML 64": (58.0, 41.2, 40.0, 27.3, 18.8),
            "MEML 128": (56.0, 41.7, 21.6, 16.2, 11.4),
            "MEML 256": (70.0, 48.4, 36.0, 34.0, 21.6),
            "MEML 512": (54.7, 36.4, 26.2, 14.1, 21.4),
            "MEML 64 RS": (54.0, 39.0, 31.2, 27.3, 16.4),
            "SeLa: OML": (50.0, 25.0, 18.0, 31.3, 15.0),
            "SeLa: MEML 64": (50.0, 35.0, 17.3, 31.3, 17.0),
            "SeLa: MEML 256": (64.0, 31.0, 17.3, 32.5, 18.3),
        },
    ),
    "slimagenet64": (
        _SLIMAGENET,
        {
            "Oracle OML": (24.0, 14.3, 15.9, 5.0, 9.4, 2.0),
            "Oracle MEML": (31.2, 23.8, 25.3, 5.5, 7.2, 5.7),
            "OML": (22.4, 16.1, 23.3, 3.8, 8.9, 2.1),
            "MEML 800": (22.4, 13.9, 25.8, 4.7, 9.0, 2.2),
            "MEML 1600": (27.2, 16.1, 26.4, 4.2, 8.1, 2.3),
        },
    ),
    "cifar100": (_FEW, {"Oracle OML": (66.0, 45.0, 34.0, 30.0, 29.5)}),
    "omniglot_cifar100": (
        _FEW,
        {
            "Oracle OML Omniglot": (50.0, 25.0, 15.3, 22.8, 9.4),
            "Oracle OML FiLM Omniglot": (50.0, 25.0, 16.7, 31.3, 13.9),
        },
    ),
    "mini_imagenet_cifar100": (
        _FEW,
        {
            "Oracle MEML": (58.0, 33.0, 35.3, 25.7, 24.9),
            "MEML": (66.0, 35.0, 28.7, 34.3, 22.2),
        },
    ),
    "cub": (_CUB, {"Oracle OML": (50.0, 13.9, 25.8, 4.5, 8.9)}),
    "omniglot_cub": (
        _CUB,
        {
            "Oracle MEML": (44.0, 49.1, 32.7, 27.0, 25.1),
            "MEML": (66.0, 53.3, 28.3, 26.2, 25.6),
        },
    ),
}
"""By data set (training and test set where they differ): numbers of classes, and rows in %."""

HALVES: dict[str, dict[str, tuple[float, ...]]] = {
    "slimagenet64": {
        "Oracle OML": (2.5, 3.1, 8.3, 1.1, 1.6, 0.4),
        "Oracle MEML": (1.6, 1.7, 2.9, 1.4, 1.3, 0.3),
        "OML": (1.9, 1.9, 5.0, 0.6, 0.0, 1.2),
        "MEML 800": (3.2, 0.0, 0.0, 0.3, 0.1, 0.4),
        "MEML 1600": (1.6, 1.1, 0.6, 0.6, 1.0, 0.7),
    },
}
"""Of the numbers in `PAPER`, what stands after ±, in %; of what, the paper does not say."""

FEW_SHOT: dict[str, tuple[tuple[tuple[int, int], ...], dict[str, tuple[float, ...]]]] = {
    "omniglot": (
        ((5, 1), (5, 5), (20, 1), (20, 5)),
        {
            "CACTUs-MAML balanced 20,5": (60.50, 84.00, 40.50, 67.62),
            "CACTUs-MAML unbalanced 20,5": (62.50, 85.50, 42.62, 71.87),
            "CACTUs-MAML balanced 20,15": (67.00, 86.00, 32.50, 64.62),
            "CACTUs-MAML unbalanced 20,15": (72.00, 89.00, 40.00, 66.25),
            "MAML 20,1": (78.00, 97.50, 77.62, 92.87),
            "MEML 20,1": (97.50, 99.97, 88.13, 99.37),
            "MAML 20,5": (88.00, 99.50, 74.62, 92.75),
            "MEML 20,5": (95.00, 99.95, 85.63, 96.25),
        },
    ),
}
"""By data set: (ways, shots) of the test, and rows in %, named by the training's ways and shots.

With two decimals, where `PAPER` has one."""

COST: dict[str, dict[str, tuple[int, float]]] = {
    "omniglot": {"oml": (92, 2.239), "meml": (47, 0.743)},
    "mini_imagenet": {"oml": (464, 3.111), "meml": (238, 1.147)},
}
"""By data set and learner: minutes of training and GB of a GPU, which is not named (supplement)."""


def few_shot_rows(dataset: str) -> dict[str, dict[tuple[int, int], Published]]:
    """Return Table 3 of the paper, row name to {(ways, shots): accuracy}."""
    at, rows = FEW_SHOT.get(dataset, ((), {}))
    return {
        name: {n: Published(value, decimals=2) for n, value in zip(at, row, strict=True)}
        for name, row in rows.items()
    }


def paper_rows(dataset: str) -> dict[str, dict[int, Published]]:
    """Return what the paper reports on a dataset, row name to {number of classes: accuracy}.

    Args:
      dataset: name of the dataset (`Dataset.name`); one that the paper has no such table for gives
        no rows.
    """
    counts, rows = PAPER.get(dataset, ((), {}))
    halves, none = HALVES.get(dataset, {}), (None,) * len(counts)
    return {
        name: dict(zip(counts, map(Published, row, halves.get(name, none)), strict=True))
        for name, row in rows.items()
    }


def head_of(row: str) -> str:
    """Name the head that a row of the paper was tested with: RS is rehearsal at meta-test."""
    return "sgd_reservoir" if "RS" in row.split() else "sgd"


def rows_beside(config: Config, dataset: str) -> dict[str, dict[int, Published]]:
    """Return the rows of the paper that stand beside a run's own curve, as `paper_rows` does.

    Args:
      config: its learner, tasks and number of clusters decide which.
      dataset: name of the dataset.
    """
    settings = config.tasks
    coreset = settings.query_from == "coreset"
    if coreset and settings.coreset_size != 500:  # that of the paper's rows
        return {}
    rows = {
        ("meml", "clusters", "none", False): ("MEML", "MEML RS"),
        ("meml_released", "clusters", "none", False): ("MEML", "MEML RS"),
        ("meml_mean", "clusters", "none", False): ("MEML mean",),
        ("oml", "clusters", "none", False): ("OML", "OML RS"),
        ("oml_single", "clusters", "none", False): ("OML single",),
        ("oml", "true", "none", False): ("Oracle OML",),
        ("meml", "true", "none", False): ("Oracle MEML",),
        ("oml_film", "true", "none", False): ("Oracle OML FiLM",),
        ("oml", "clusters", "truncate", False): ("OML balanced",),
        ("oml", "clusters", "loss", False): ("OML balancing param",),
        ("oml", "clusters", "augment", False): ("OML augmentation",),
        ("oml", "clusters", "none", True): ("OML RS both",),
        ("meml", "clusters", "none", True): ("MEML RS both",),
    }.get((config.learner, settings.labels, settings.balance, coreset), ())
    # On some sets the paper's rows carry the number of clusters.
    number = config.clustering.num_clusters
    names = {n for row in rows for n in (row, f"{row} {number}", _with_clusters(row, number))}
    # Trained with labels on the one, tested on the other.
    names |= {f"{row} Omniglot" for row in rows if dataset.startswith("omniglot_")}
    if config.embedding.name == "sela":
        names = {f"SeLa: {name}" for name in names}
    return {name: row for name, row in paper_rows(dataset).items() if name in names}


def _with_clusters(row: str, number: int) -> str:
    """Put the number of clusters where the paper has it: `MEML 64`, `MEML 64 RS`."""
    name, *rest = row.split(" ")
    return " ".join([name, str(number), *rest])


def written(value: Published) -> str:
    """Write a number in % as the paper does: with its decimals, and its ± if it has one."""
    numbers = [value] if value.half is None else [value, value.half]
    return " ± ".join(f"{number:.{value.decimals}f}" for number in numbers)
