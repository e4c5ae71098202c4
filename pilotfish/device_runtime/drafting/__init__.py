"""Drafters: they use a small model, repetitions of the text, or both."""

from pilotfish.device_runtime.drafting.drafter import Drafter, Level
from pilotfish.device_runtime.drafting.model_drafter import ModelDrafter
from pilotfish.device_runtime.drafting.text_drafter import TextDrafter

__all__ = ["Drafter", "Level", "ModelDrafter", "TextDrafter"]
