"""Logs, metrics and HTTP."""
