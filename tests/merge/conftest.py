"""Fixtures of this folder."""

from tests.merge.runs import cache, run

__all__ = ["cache", "run"]
