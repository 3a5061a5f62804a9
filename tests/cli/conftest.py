"""Fixtures of this folder."""

from tests.cli.outcome import anechain, bundle, here, model

__all__ = ["anechain", "bundle", "here", "model"]
