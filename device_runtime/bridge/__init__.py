"""Between a drafter's vocabulary and its target's."""

from device_runtime.bridge.bridge import Bridge, TrivialBridge
from device_runtime.bridge.pair import Pair
from device_runtime.bridge.prompt import Asked, Prompt

__all__ = ["Asked", "Bridge", "Pair", "Prompt", "TrivialBridge"]
