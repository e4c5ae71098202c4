"""Pilotfish: a drafter on the device, a target on the edge, a thin encrypted link between.

with Device(draft=DIR, edge="tcp://host:port", keys=DIR) as device:
    answer = device.generate("Why is the sky blue?", protocol="greedy", window=4)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device_runtime.device import Device
    from device_runtime.plan import Auto
    from device_runtime.record import Generation, Piece, Recovery, Round, Timings
    from edge_runtime.process import EdgeServer
    from engines.errors import EngineError
    from wire.errors import PilotfishError

# Imported when asked for: an edge needs nothing of what a device needs.
_HOME = {
    "Auto": "device_runtime.plan",
    "Device": "device_runtime.device",
    "EdgeServer": "edge_runtime.process",
    "EngineError": "engines.errors",
    "Generation": "device_runtime.record",
    "Piece": "device_runtime.record",
    "PilotfishError": "wire.errors",
    "Recovery": "device_runtime.record",
    "Round": "device_runtime.record",
    "Timings": "device_runtime.record",
}

__all__ = [
    "Auto",
    "Device",
    "EdgeServer",
    "EngineError",
    "Generation",
    "Piece",
    "PilotfishError",
    "Recovery",
    "Round",
    "Timings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
