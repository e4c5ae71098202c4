"""Pilotfish: a drafter on the device, a target on the edge, a thin encrypted link between.

with Device(draft=DIR, edge="tcp://host:port", keys=DIR) as device:
    answer = device.generate("Why is the sky blue?", protocol="greedy", window=4)
"""

from device_runtime.device import Device
from device_runtime.plan import Auto
from device_runtime.record import Generation, Piece, Round, Timings
from edge_runtime.process import EdgeServer
from engines.errors import EngineError
from wire.errors import PilotfishError

__all__ = [
    "Auto",
    "Device",
    "EdgeServer",
    "EngineError",
    "Generation",
    "Piece",
    "PilotfishError",
    "Round",
    "Timings",
]
