"""Plain copies: every byte, and nothing beside them."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.contexts.plain_copies import copy_bytes, joined


def test_all_bytes_are_copied() -> None:
    """Into a part of something larger as well."""
    whole = bytearray(b"-" * 12)
    copy_bytes(memoryview(whole)[3:9], memoryview(b"abcdef"))
    assert whole == b"---abcdef---"


def test_a_target_of_another_size_is_no_target() -> None:
    """Nothing is cut off or repeated."""
    with pytest.raises(ValueError, match="shape"):
        copy_bytes(memoryview(bytearray(5)), memoryview(b"abcdef"))


def test_parts_follow_each_other() -> None:
    """Whatever they are parts of; what comes out is a copy."""
    second = bytearray(b"second")
    whole = joined([b"first ", memoryview(second), b"", memoryview(b"the third")[3:]])
    second[:] = b"change"
    assert whole.tobytes() == b"first second third"
    assert (whole.ndim, whole.itemsize, whole.c_contiguous) == (1, 1, True)
