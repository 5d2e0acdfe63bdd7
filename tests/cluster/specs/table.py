"""Specs, and what becomes of them: one table for the API server, the operator and the agent."""

from __future__ import annotations

from tests.cluster.specs.agents import PLUGIN, PODS, SERVER, WHOLE
from tests.cluster.specs.cache import SIZES
from tests.cluster.specs.reaping import DURATIONS, WINDOWS
from tests.cluster.specs.row import Row

ROWS: tuple[Row, ...] = (*WHOLE, *WINDOWS, *DURATIONS, *SIZES, *SERVER, *PLUGIN, *PODS)
