"""Intervals of accuracies over runs, and over several seeds of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

SEEDS_FOR_INTERVAL = 3  # of two, the interval is 12.7 standard errors: it says nothing


def summarise(accuracies: np.ndarray, *, num_classes: int) -> dict:
    """Mean, standard deviation and half-width of the 95 % interval (Student's t) over runs.

    Of one run, as at validation, both are 0.
    """
    runs = len(accuracies)
    std = float(np.std(accuracies, ddof=1)) if runs > 1 else 0.0
    quantile = float(scipy.stats.t.ppf(0.975, runs - 1)) if runs > 1 else 0.0
    return {
        "num_classes": num_classes,
        "runs": runs,
        "accuracy": float(np.mean(accuracies)),
        "std": std,
        "ci95": quantile * std / runs**0.5,
        "chance": 1.0 / num_classes,
        "accuracies": [float(a) for a in accuracies],
    }


def within_seeds(runs: Sequence[np.ndarray]) -> dict[str, float]:
    """Compute the spread of runs [R_s] about their seed's own mean, as `combine_points` says.

    Of two runs or more each.
    """
    freedom = sum(len(a) - 1 for a in runs)
    variances = [float(np.var(a, ddof=1)) for a in runs]
    of_mean = sum(v / len(a) for v, a in zip(variances, runs, strict=True)) / len(runs) ** 2
    quantile = float(scipy.stats.t.ppf(0.975, freedom))
    return {"std": float(np.mean(variances)) ** 0.5, "ci95": quantile * of_mean**0.5}


def combine_points(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put one point of a curve of each seed together.

    With a_{s,r} the accuracy of run r of seed s, a point has

      `accuracy` = mean_s m_s, m_s = mean_r a_{s,r};
      `std` = standard deviation of the m_s, `ci95` = t_{0.975, N-1} std / sqrt(N), over N seeds.

    The interval is that of a new seed's expected accuracy: m_s varies with embedding, clusters,
    initialisation, tasks and test streams alike, and the runs of one seed are not independent of
    each other. `within_seeds` is narrower, and right for the mean of these seeds only: with v_s the
    variance of the R_s runs of seed s,

      `std` = sqrt(mean_s v_s), `ci95` = t_{0.975, sum_s (R_s - 1)} sqrt(sum_s v_s / R_s) / N.

    The split of the classes is the same in all seeds.
    """
    first, num_classes = points[0], points[0]["num_classes"]
    means = [float(np.mean(point["accuracies"])) for point in points]
    runs = [np.array(point["accuracies"]) for point in points]
    over_seeds = summarise(np.array(means), num_classes=num_classes)

    def mean(name: str) -> float | None:
        values = [point[name] for point in points if point.get(name) is not None]
        return float(np.mean(values)) if values else None

    rates = [point["learning_rate"] for point in points]
    return (
        {name: first[name] for name in ("shots",) if name in first}
        | over_seeds
        | {
            "runs": sum(map(len, runs)),
            "accuracies": [float(a) for a in np.concatenate(runs)],
            "seed_accuracies": means,
            "within_seeds": within_seeds(runs),
            "learning_rate": rates[0] if len(set(rates)) == 1 else None,
            "learning_rates": rates,
            "train_accuracy": mean("train_accuracy"),
            "iid_accuracy": mean("iid_accuracy"),
        }
    )


def half_width(point: Mapping[str, Any]) -> float:
    """Half of the 95 % interval that is shown of a point of one seed or of several.

    That of a new seed; of fewer than `SEEDS_FOR_INTERVAL` seeds, that over the runs of each, of the
    mean of these very seeds.
    """
    few = 1 < len(point.get("seed_accuracies", ())) < SEEDS_FOR_INTERVAL
    return float((point["within_seeds"] if few else point)["ci95"])
