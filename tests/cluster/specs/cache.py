"""Specs about the cache: sizes in every form, and eviction."""

from __future__ import annotations

from tests.cluster.specs.row import Judge, Row, at_least, at_most

_FORM = "must be a quantity of bytes: write 20Gi, 500M or a plain number"
_LEAST = "must be 1073742 bytes (0.001 GiB) or more: raise it to 2Mi or more"

SIZES = (
    *(
        Row(f"size of {size!r}", {"cache": {"size": size}})
        for size in (
            "1Gi",
            "0.5Gi",
            "1.5Gi",
            "60G",
            "60Gi",
            "1.2Gi",
            "1288490188800m",
            "4e9",
            "4E9",
            "2Mi",
            "0.001Gi",
            "4294967296",
            4294967296,
            "1Pi",
            "+1Gi",
            "1073742",
            "2000000k",
        )
    ),
    *(
        Row(
            f"size of {size!r}",
            {"cache": {"size": size}},
            f'size is "{size}", but {_FORM}',
            Judge.AGENT,
        )
        for size in (
            "4GB",
            "4 Gi",
            "lots",
            "",
            "1.2.3Gi",
            "0x10",
            "1Gi ",
            "4gi",
            "1e3Gi",
            "NaN",
            "inf",
        )
    ),
    *(
        Row(
            f"size of {size!r}",
            {"cache": {"size": size}},
            f"size is {size}, but {_LEAST}",
            Judge.AGENT,
        )
        for size in (60, "60", "1e3", "0", 0, "-1Gi", -1, "1.5", "1Mi", "1073741", "999m", "1n")
    ),
    *(
        Row(
            f"size of {size!r}",
            {"cache": {"size": size}},
            f"size is {size}, but must be 1048576Gi or less: lower it",
            Judge.AGENT,
        )
        for size in ("2Pi", "1E", "1e40", "1e400")
    ),
    Row(
        "size of 1.5 as a number",
        {"cache": {"size": 1.5}},
        'must be of type integer,string: "number"',
        Judge.READER,
    ),
    Row("size as a map", {"cache": {"size": {}}}, "must be of type integer,string", Judge.READER),
    Row(
        "eviction at 100%",
        {"cache": {"size": "1Gi", "eviction": {"triggerPercent": 100, "evictPercent": 100}}},
    ),
    Row("no eviction", {"cache": {"size": "1Gi", "eviction": {"policy": "None"}}}),
    Row(
        "eviction at 0%",
        {"cache": {"size": "1Gi", "eviction": {"triggerPercent": 0}}},
        at_least("cache.eviction.triggerPercent", 1),
        Judge.AGENT,
    ),
    Row(
        "eviction of 101%",
        {"cache": {"size": "1Gi", "eviction": {"evictPercent": 101}}},
        at_most("cache.eviction.evictPercent", 100),
        Judge.AGENT,
    ),
    Row(
        "eviction by another policy",
        {"cache": {"size": "1Gi", "eviction": {"policy": "ARC"}}},
        'supported values: "LRU", "None"',
        Judge.READER,
    ),
)
