"""Numbers as reports and the console write them."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import Any


def percent(share: float | None) -> str:
    """Give a share in % with one decimal, rounded as by hand: 0.9625 is 96.3."""
    if share is None:
        return "-"
    percent = Decimal(repr(float(share))).scaleb(2)
    return str(percent.quantize(Decimal("0.1"), ROUND_HALF_UP))


def plain(value: Any) -> str:
    """Give a number in four digits, whole numbers and what is before the point in full: 11541."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def short(value: float) -> str:
    """Write a number in three digits, without an exponent where it is large: 1530."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:g}"
