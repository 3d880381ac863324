"""The methods as data: which roles are fast, how support becomes inner steps, what is reset.

A method is a row of `LEARNERS`. Adding one means adding a row; no trainer is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import optax

from meml_jax.fingerprints import said
from meml_jax.settings import did_you_mean
from meml_jax.types import Array, Params, UserError

Rows = Literal["each", "first", "all"]
Pooling = Literal["attention", "mean", "none"]


def sgd(lr: float | Array, params: Params) -> optax.GradientTransformation:
    """Build the plain inner optimizer, one rate for all fast roles."""
    return optax.sgd(lr)


def no_roles(params: Params) -> Params:
    """Add no roles to those of the network."""
    return {}


@dataclasses.dataclass(frozen=True)
class Phase:
    """How support rows become inner steps.

    Attributes:
      rows: `each` gives one step a row, in order; `first` one step on the first row; `all` one step
        on all rows together.
      pool: how the rows of a step become what is classified: `attention` (eqs 1-2), `mean`, or
        `none`, where each row is classified by itself.
    """

    rows: Rows
    pool: Pooling = "none"

    def __post_init__(self) -> None:
        """Raise UserError for an unknown `rows` or `pool`."""
        for name, known in (("rows", get_args(Rows)), ("pool", get_args(Pooling))):
            if getattr(self, name) not in known:
                raise UserError(f"Phase {name}={getattr(self, name)!r}, expected one of {known}")


@dataclasses.dataclass(frozen=True)
class Learner:
    """A method.

    Attributes:
      fast: roles that the inner loop updates (psi); all roles are meta-learned (phi), but
        `context`, which starts at 0 in every task.
      phases: inner steps, in order; `inner.steps` repeats each.
      resets_class_row: draw the CLN rows of the task's classes anew before each task.
      first_order: treat inner gradients as constants in the outer gradient, as `inner.first_order`
        does for every learner. The meta-gradient of the attention is then exactly 0: rho acts on
        the query loss through the inner gradient only.
      extra_roles: (parameters of the network) -> further roles, for methods that learn more.
      optimizer: (inner.lr, phi) -> inner optimizer. The meta-gradient goes through it, and some of
        the gradients it gets are exactly 0 (dead ReLUs, steps whose rows are all padding). Where
        all so far were, the derivative of Adam's square root is infinite: use `optax.adam(lr,
        eps_root=1e-8)`, else the meta-gradient is NaN.
    """

    fast: tuple[str, ...]
    phases: tuple[Phase, ...]
    resets_class_row: bool = True
    first_order: bool = False
    extra_roles: Callable[[Params], Params] = dataclasses.field(default=no_roles, repr=False)
    optimizer: Callable[[float, Params], optax.GradientTransformation] = dataclasses.field(
        default=sgd, repr=False
    )

    def __post_init__(self) -> None:
        """Raise UserError for a row without fast roles or phases."""
        tuples = isinstance(self.fast, tuple) and isinstance(self.phases, tuple)
        if not tuples or not all(isinstance(phase, Phase) for phase in self.phases):
            raise UserError(
                f"Learner fast={self.fast!r}, phases={self.phases!r}, expected tuples such as "
                "('cln',) and (Phase('each'),)"
            )
        if not (self.fast and self.phases) or len(set(self.fast)) < len(self.fast):
            raise UserError(
                f"Learner fast={self.fast!r}, phases={self.phases!r}, expected roles, each once, "
                "and phases: it adapts nothing without"
            )
        for function in (self.extra_roles, self.optimizer):
            said(function)  # remembered now, while the file says what is run

    @property
    def uses_attention(self) -> bool:
        """Whether a phase pools by attention."""
        return any(phase.pool == "attention" for phase in self.phases)

    @property
    def encoder_is_fast(self) -> bool:
        """Whether all features must be computed anew in every inner step."""
        return "fen" in self.fast

    @property
    def uses_film(self) -> bool:
        """Whether FiLM layers modulate the last two convolutions: one of their roles is fast.

        As in CAVIA, the context may be it, with a generator that is meta-learned only.
        """
        return not {"film", "context"}.isdisjoint(self.fast)


LEARNERS: dict[str, Learner] = {
    "oml": Learner(("cln",), (Phase("each"),)),
    "oml_single": Learner(("cln",), (Phase("first"),)),
    "meml": Learner(("cln", "attention"), (Phase("all", "attention"),)),
    "meml_released": Learner(("cln", "attention"), (Phase("first"), Phase("all", "attention"))),
    "meml_mean": Learner(("cln",), (Phase("all", "mean"),)),
    # With all rows drawn anew in every episode MEML does not learn (docs/deviations.md).
    "meml_few_shot": Learner(
        ("cln", "attention"), (Phase("all", "attention"),), resets_class_row=False
    ),
    "maml": Learner(("fen", "cln"), (Phase("all"),), resets_class_row=False),
    "fomaml": Learner(("fen", "cln"), (Phase("all"),), resets_class_row=False, first_order=True),
    "anil": Learner(("cln",), (Phase("all"),), resets_class_row=False),
    "oml_film": Learner(("cln", "film", "context"), (Phase("each"),)),
}


_OURS = dict(LEARNERS)


def identity(name: str) -> str:
    """Name a learner in fingerprints: ours by name, any other row by what it says too.

    What it says includes what its functions say. A row of ours is the one in this file, so an edit
    of it here is not noticed: a row that is to say something else gets a name of its own.
    """
    row = get_learner(name)
    if _OURS.get(name) == row:
        return name
    return " ".join([name, repr(row), said(row.extra_roles), said(row.optimizer)])


def get_learner(name: str) -> Learner:
    """Look a learner up; raises UserError with the nearest name for an unknown one."""
    if name not in LEARNERS:
        raise UserError(
            f"unknown learner {name!r}, expected one of {sorted(LEARNERS)}"
            f"{did_you_mean(name, LEARNERS)}"
        )
    if not isinstance(LEARNERS[name], Learner):
        raise UserError(f"LEARNERS[{name!r}] is {LEARNERS[name]!r}, expected a Learner")
    return LEARNERS[name]
