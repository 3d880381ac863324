"""Which checkpoint is the best: by validation metric, among those judged by the same settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meml_jax.files import read_json

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

META = "metadata"  # file of a checkpoint's meta, in a folder of its own


def judged(manager: ocp.CheckpointManager) -> dict[int, tuple[float, Any]]:
    """Map the steps that were saved with a validation metric to (metric, `judged_by`).

    `judged_by` is that of the meta, None where there is none.
    """
    metrics = {step: _value(manager.metrics(step)) for step in manager.all_steps()}
    return {
        step: (value, _judged_by(manager.directory, step))
        for step, value in metrics.items()
        if value is not None
    }


def best_step(
    manager: ocp.CheckpointManager, judged_by: Mapping[str, Any] | None = None
) -> int | None:
    """Return the step with the highest validation metric, None if none was saved with one.

    Of the steps whose metrics were judged by the settings `judged_by`, or by none that are known;
    where there are none of these, or it is None, of all steps.
    """
    found = judged(manager)
    ours = {step: of for step, of in found.items() if of[1] in (None, judged_by)}
    compared = found if judged_by is None else ours or found
    return max(compared, key=lambda step: (compared[step][0], step), default=None)


class BestOfEach:
    """Preservation policy: the best checkpoint of each `judged_by`, as metrics of two are no match.

    So that of other settings stays, and is the best again once they are back.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Tell which checkpoints stay; they come with the oldest first."""
        best: dict[str, tuple[float, int]] = {}
        for info in checkpoints:
            if (value := _value(info.metrics)) is not None:
                key = json.dumps(_judged_by(self._directory, info.step), sort_keys=True)
                best[key] = max(best.get(key, (value, info.step)), (value, info.step))
        kept = {step for _, step in best.values()}
        return [info.step in kept for info in checkpoints]


def _value(metrics: Any) -> float | None:
    """Return the validation metric, None where a step was saved without one."""
    value = metrics.get("validation") if isinstance(metrics, Mapping) else None
    return value if isinstance(value, int | float) else None


def _judged_by(directory: os.PathLike[str], step: int) -> Any:
    meta = read_json(Path(directory, str(step), "meta", META))
    found = meta.get("judged_by") if isinstance(meta, dict) else None
    return found if isinstance(found, dict) else None
