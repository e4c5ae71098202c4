"""Pilotfish: the drafter runs on the device, the target on the edge; the link is encrypted.

with Device(draft=DIR, edge="tcp://host:port", keys=DIR) as device:
    answer = device.generate("Why is the sky blue?", temperature=0.5)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pilotfish.base.errors import (
        AccessDeniedError,
        BadGrammarError,
        DeviceClosedError,
        DeviceInUseError,
        EdgeLostError,
        EdgeUnreachableError,
        InterruptedGenerationError,
        PairMismatchError,
        PilotfishError,
        PromptTooLongError,
        UnsupportedError,
    )
    from pilotfish.bridge import Talk
    from pilotfish.device_runtime.async_device import AsyncAnswerStream, AsyncDevice
    from pilotfish.device_runtime.device import Device
    from pilotfish.device_runtime.plan import Auto
    from pilotfish.device_runtime.record import Generation, Piece, Recovery, Round, Timings
    from pilotfish.device_runtime.turn import AnswerStream
    from pilotfish.edge_runtime.process import EdgeServer
    from pilotfish.engines.chat_formats.reader import ToolCall, Turn
    from pilotfish.engines.engine_errors import EngineError
    from pilotfish.export.model_cache import fetch_model
    from pilotfish.speculation.logits_options import Grammar
    from pilotfish.wire.link.state import LinkState

__version__: str

# Each name is imported on its first use, since an edge must not load what only a device needs.
_HOME = {
    "AccessDeniedError": "pilotfish.base.errors",
    "AnswerStream": "pilotfish.device_runtime.turn",
    "AsyncAnswerStream": "pilotfish.device_runtime.async_device",
    "AsyncDevice": "pilotfish.device_runtime.async_device",
    "Auto": "pilotfish.device_runtime.plan",
    "BadGrammarError": "pilotfish.base.errors",
    "Device": "pilotfish.device_runtime.device",
    "DeviceClosedError": "pilotfish.base.errors",
    "DeviceInUseError": "pilotfish.base.errors",
    "EdgeLostError": "pilotfish.base.errors",
    "EdgeServer": "pilotfish.edge_runtime.process",
    "EdgeUnreachableError": "pilotfish.base.errors",
    "EngineError": "pilotfish.engines.engine_errors",
    "Generation": "pilotfish.device_runtime.record",
    "Grammar": "pilotfish.speculation.logits_options",
    "InterruptedGenerationError": "pilotfish.base.errors",
    "LinkState": "pilotfish.wire.link.state",
    "PairMismatchError": "pilotfish.base.errors",
    "Piece": "pilotfish.device_runtime.record",
    "PilotfishError": "pilotfish.base.errors",
    "PromptTooLongError": "pilotfish.base.errors",
    "Recovery": "pilotfish.device_runtime.record",
    "Round": "pilotfish.device_runtime.record",
    "Talk": "pilotfish.bridge",
    "Timings": "pilotfish.device_runtime.record",
    "ToolCall": "pilotfish.engines.chat_formats.reader",
    "Turn": "pilotfish.engines.chat_formats.reader",
    "UnsupportedError": "pilotfish.base.errors",
    "fetch_model": "pilotfish.export.model_cache",
}

__all__ = [
    "AccessDeniedError",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncDevice",
    "Auto",
    "BadGrammarError",
    "Device",
    "DeviceClosedError",
    "DeviceInUseError",
    "EdgeLostError",
    "EdgeServer",
    "EdgeUnreachableError",
    "EngineError",
    "Generation",
    "Grammar",
    "InterruptedGenerationError",
    "LinkState",
    "PairMismatchError",
    "Piece",
    "PilotfishError",
    "PromptTooLongError",
    "Recovery",
    "Round",
    "Talk",
    "Timings",
    "ToolCall",
    "Turn",
    "UnsupportedError",
    "__version__",
    "fetch_model",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("pilotfish.base.version").VERSION
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
