"""Translate between a drafter's vocabulary and its target's."""

from pilotfish.bridge.bridge import Bridge, TrivialBridge
from pilotfish.bridge.pair import Pair
from pilotfish.bridge.prompt import (
    Prompt,
    PromptInput,
    Talk,
    are_messages,
    read_talk,
)

__all__ = [
    "Bridge",
    "Pair",
    "Prompt",
    "PromptInput",
    "Talk",
    "TrivialBridge",
    "are_messages",
    "read_talk",
]
