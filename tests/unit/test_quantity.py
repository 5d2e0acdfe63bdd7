"""Quantities mean what they mean to Kubernetes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.quantity import whole_units


@pytest.mark.parametrize(
    ("quantity", "amount"),
    [
        (7, 7),
        ("7", 7),
        ("1Ki", 1024),
        ("1k", 1000),
        ("1.5Gi", 3 << 29),
        (".5M", 500_000),
        ("5.", 5),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E+3", 1000),
        ("25e-1", 3),
        ("1Ei", 1 << 60),
        ("1001m", 2),
        ("-1001m", -1),
        ("1n", 1),
        ("3u", 1),
        ("0", 0),
        ("1e400", (1 << 63) - 1),
        ("-10E", -(1 << 63) + 1),
        (1 << 70, (1 << 63) - 1),
    ],
)
def test_meaning(quantity: str | int, amount: int) -> None:
    """Fractions are rounded up."""
    assert whole_units(quantity) == amount


@pytest.mark.parametrize(
    "text", ["", "Gi", "1GB", "1 Gi", "1gi", "1e", "1e3Gi", "--1", "1.2.3", "NaN", "1e9999", "٣"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    """With the forms that are."""
    with pytest.raises(ValueError, match="is no quantity: write 20Gi, 500M or a plain number"):
        whole_units(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_whole_number_is_itself(amount: int) -> None:
    """As text, in thousandths and with a binary suffix."""
    assert whole_units(str(amount)) == whole_units(f"{amount}000m") == amount
    assert whole_units(f"{amount}Ki") == amount * 1024
