"""Encode the events of a stream (server-sent events)."""

import msgspec

from pilotfish.device_runtime.service.refusal import Body

COMMENT = b": nothing new yet\n\n"  # clients ignore it


def named_event(body: Body) -> bytes:
    """Encode an event; its name is the body's type."""
    name: str = body["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
