"""Pilotfish: a drafter on the device, a target on the edge, a thin encrypted link between.

with Device(draft=DIR, edge="tcp://host:port", keys=DIR) as device:
    answer = device.generate("Why is the sky blue?", protocol="greedy", window=4)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pilotfish.device_runtime.bridge import Talk
    from pilotfish.device_runtime.device import Device
    from pilotfish.device_runtime.plan import Auto
    from pilotfish.device_runtime.record import Generation, Piece, Recovery, Round, Timings
    from pilotfish.edge_runtime.process import EdgeServer
    from pilotfish.engines.errors import EngineError
    from pilotfish.engines.families.reader import ToolCall, Turn
    from pilotfish.speculation.shaping import Grammar
    from pilotfish.wire.errors import PilotfishError

# Imported when asked for: an edge needs nothing of what a device needs.
_HOME = {
    "Auto": "pilotfish.device_runtime.plan",
    "Device": "pilotfish.device_runtime.device",
    "EdgeServer": "pilotfish.edge_runtime.process",
    "EngineError": "pilotfish.engines.errors",
    "Generation": "pilotfish.device_runtime.record",
    "Grammar": "pilotfish.speculation.shaping",
    "Piece": "pilotfish.device_runtime.record",
    "PilotfishError": "pilotfish.wire.errors",
    "Recovery": "pilotfish.device_runtime.record",
    "Round": "pilotfish.device_runtime.record",
    "Talk": "pilotfish.device_runtime.bridge",
    "Timings": "pilotfish.device_runtime.record",
    "ToolCall": "pilotfish.engines.families.reader",
    "Turn": "pilotfish.engines.families.reader",
}

__all__ = [
    "Auto",
    "Device",
    "EdgeServer",
    "EngineError",
    "Generation",
    "Grammar",
    "Piece",
    "PilotfishError",
    "Recovery",
    "Round",
    "Talk",
    "Timings",
    "ToolCall",
    "Turn",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
