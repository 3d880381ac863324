"""What the accuracies of a head follow from."""

from __future__ import annotations

import dataclasses
from typing import Any

from meml_jax.config import Config, TestConfig
from meml_jax.curves import depends_on
from meml_jax.model import judged_by
from meml_jax.settings import flatten
from meml_jax.workdir import training_fields


def settings_of(config: Config, head: str) -> dict[str, Any]:
    """List the settings that the accuracies of a head follow from, but for steps, runs and columns.

    Args:
      config: of a run.
      head: a head of it, or a baseline, which no training decides on.
    """
    test = config.test
    if config.episodes.ways:
        own = TestConfig(queries=test.queries, inner_steps=test.inner_steps)
    else:
        own = depends_on(head, test)
    own = dataclasses.replace(own, num_classes=(), runs=0, iid=False)
    named = {"test_data.name", "test_data.max_per_class", "test"}
    if head == "untrained":
        named.add("network")
    elif head != "pixels":
        own = dataclasses.replace(own, checkpoint=test.checkpoint)
        named |= {*training_fields(config)}
        if test.checkpoint == "best":
            named |= {*judged_by(config)}
    every = flatten(dataclasses.replace(config, test=own))
    return {k: v for k, v in every.items() if {k, k.split(".")[0]} & named}
