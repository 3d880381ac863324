"""The methods as data: which roles are fast, how support becomes inner steps, what is reset.

A method is a row of `LEARNERS`. Adding one means adding a row; no trainer is copied.
"""

from __future__ import annotations

import dataclasses
import difflib

from meml_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Phase:
    """How support rows become inner steps.

    Attributes:
      rows: `each` gives one step a row, in order; `first` one step on the first row; `all` one step
        on all rows together.
      pool: how the rows of a step become what is classified: `attention` (eqs 1-2), `mean`, or
        `none`, where each row is classified by itself.
    """

    rows: str
    pool: str = "none"


@dataclasses.dataclass(frozen=True)
class Learner:
    """A method.

    Attributes:
      fast: roles that the inner loop updates (psi); all roles are meta-learned (phi).
      phases: inner steps, in order.
      resets_class_row: draw the CLN row of the current class anew before each task.
    """

    fast: tuple[str, ...]
    phases: tuple[Phase, ...]
    resets_class_row: bool = True

    @property
    def uses_attention(self) -> bool:
        """Whether a phase pools by attention."""
        return any(phase.pool == "attention" for phase in self.phases)

    @property
    def encoder_is_fast(self) -> bool:
        """Whether features must be computed anew in every inner step."""
        return "fen" in self.fast


LEARNERS: dict[str, Learner] = {
    "oml": Learner(("cln",), (Phase("each"),)),
    "oml_single": Learner(("cln",), (Phase("first"),)),
    "meml": Learner(("cln", "attention"), (Phase("all", "attention"),)),
    "meml_released": Learner(("cln", "attention"), (Phase("first"), Phase("all", "attention"))),
    "meml_mean": Learner(("cln",), (Phase("all", "mean"),)),
}


def get_learner(name: str) -> Learner:
    """Look a learner up; raises UserError with the nearest name for an unknown one."""
    if name not in LEARNERS:
        nearest = difflib.get_close_matches(name, LEARNERS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise UserError(f"unknown learner {name!r}, expected one of {sorted(LEARNERS)}{hint}")
    return LEARNERS[name]
