"""Kubernetes quantities: `20Gi`, `500M`, `4e9`, `1288490188800m`."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

# The grammar of k8s.io/apimachinery/pkg/api/resource.Quantity: a suffix is binary, decimal or an
# exponent, never two of them. An exponent has a sign or not; `E` alone is exa.
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]+))?"
)
_LONGEST_EXPONENT = 3  # digits; more than that is no size of anything, and slow to compute
_LARGEST = (1 << 63) - 1
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {name: 10 * power for power, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}


def whole_units(quantity: str | int) -> int:
    """Return a quantity as a whole number, rounded up and capped at 2**63 - 1, as in Kubernetes.

    Raises:
        ValueError: the text is no quantity.
    """
    if isinstance(quantity, int):
        return _capped(quantity)
    found = _QUANTITY.fullmatch(quantity)
    if found is None or len((found["exponent"] or "").lstrip("+-")) > _LONGEST_EXPONENT:
        raise ValueError(f"{quantity!r} is no quantity: write 20Gi, 500M or a plain number")
    number, suffix = Decimal(found["number"]), found["suffix"] or ""
    if suffix in _BINARY:
        amount = number * (1 << _BINARY[suffix])
    else:
        amount = number.scaleb(int(found["exponent"] or _DECIMAL[suffix]))
    return _capped(int(amount.to_integral_value(ROUND_CEILING)))


def _capped(amount: int) -> int:
    return max(-_LARGEST, min(amount, _LARGEST))
