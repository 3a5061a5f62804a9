"""Fixtures of this folder."""

from tests.bake.place.stand_ins import bake, memory, model, stand_ins, wanted

__all__ = ["bake", "memory", "model", "stand_ins", "wanted"]
