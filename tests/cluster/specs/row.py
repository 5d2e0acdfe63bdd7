"""One row of the table of specs, and short ways to write one.

A row that is refused names who else refuses it. `AGENT`: it sets flags, and the agent's own rules
say the same. `READER`: its shape is wrong, and the operator cannot read it either. `SERVER`: it is
about Kubernetes, and only the API server knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Judge(Enum):
    """Who refuses a row beside the API server."""

    AGENT = "agent"
    READER = "reader"
    SERVER = "server"


@dataclass(frozen=True)
class Row:
    """One spec. `sentence` is part of the API server's answer; empty if it is accepted."""

    label: str
    spec: dict[str, Any]
    sentence: str = ""
    judge: Judge = Judge.SERVER
    name: str = "kv"

    @property
    def accepted(self) -> bool:
        """Whether it is stored."""
        return not self.sentence

    @property
    def document(self) -> dict[str, Any]:
        """The object as a person would apply it."""
        return {
            "apiVersion": "lmcache-kube.dev/v1alpha1",
            "kind": "LMCacheServer",
            "metadata": {"name": self.name},
            "spec": self.spec,
        }


def spec_of(**parts: object) -> dict[str, Any]:
    """Make a spec with a size and these parts."""
    return {"cache": {"size": "1Gi"}, **parts}


def yes(label: str, **parts: object) -> Row:
    """Make a row that is accepted."""
    return Row(label, spec_of(**parts))


def agent(label: str, sentence: str, **parts: object) -> Row:
    """Make a row that the agent refuses too."""
    return Row(label, spec_of(**parts), sentence, Judge.AGENT)


def reader(label: str, sentence: str, **parts: object) -> Row:
    """Make a row that the operator cannot read either."""
    return Row(label, spec_of(**parts), sentence, Judge.READER)


def server(label: str, sentence: str, **parts: object) -> Row:
    """Make a row that only the API server refuses."""
    return Row(label, spec_of(**parts), sentence, Judge.SERVER)


def at_least(field: str, least: int) -> str:
    """Word the API server's answer to a number below its bounds."""
    return f"spec.{field} in body should be greater than or equal to {least}"


def at_most(field: str, most: int) -> str:
    """Word the API server's answer to a number above its bounds."""
    return f"spec.{field} in body should be less than or equal to {most}"
