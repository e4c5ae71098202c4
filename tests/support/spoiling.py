"""Ways to spoil a message: its bytes, its frames, its fields."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import numpy as np

from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from tests.conftest import CONTEXT, PADDED_VOCAB, VOCAB
from tests.support.hostile import RawSession, drafted, ids_bytes, packed

Frames = list[bytes]
_PLACED = ("window", "states", "pull", "hint")  # messages with a position as fourth field

# Values of mutated fields: limits, their neighbours, and other types.
ODD_VALUES = (
    0, 1, -1, 2, 63, 64, 65, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63,
    2**64 - 1, 0.0, -0.0, 0.5, 1e-46, 1e300, float("nan"), float("inf"), True, None, "", "stream",
    "x" * 5000, b"", b"x" * 16, b"\x00" * 8, [], [[]], {}, {"type": "ping"},
)  # fmt: skip


def spoil(frames: Frames, rng: random.Random) -> Frames:
    """Mutate a message's bytes, frames or fields, one to three times."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        frames = rng.choice(MUTATIONS)(list(frames), rng)
    return frames


def _flip(frames: Frames, rng: random.Random) -> Frames:
    at = rng.randrange(len(frames))
    if frames[at]:
        changed = bytearray(frames[at])
        for _ in range(rng.choice([1, 1, 4])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        frames[at] = bytes(changed)
    return frames


def _cut(frames: Frames, rng: random.Random) -> Frames:
    at = rng.randrange(len(frames))
    frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
    return frames


def _grow(frames: Frames, rng: random.Random) -> Frames:
    at = rng.randrange(len(frames))
    frames[at] += rng.randbytes(rng.choice([1, 4, 256, 20_000]))
    return frames


def _drop(frames: Frames, rng: random.Random) -> Frames:
    if len(frames) > 1:
        del frames[rng.randrange(len(frames))]
    return frames


def _repeat(frames: Frames, rng: random.Random) -> Frames:
    return frames + [rng.choice(frames)] * rng.choice([1, 2, 20])


def _shuffle(frames: Frames, rng: random.Random) -> Frames:
    rng.shuffle(frames)
    return frames


def _header(frames: Frames) -> list[object]:
    """Decode the header's fields; none if it cannot be decoded."""
    try:
        header = msgspec.msgpack.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return header if isinstance(header, list) else []


def _odd_field(frames: Frames, rng: random.Random) -> Frames:
    header = _header(frames)
    if header:
        header[rng.randrange(len(header))] = rng.choice(ODD_VALUES)
        frames[0] = packed(header)
    return frames


def _other_type(frames: Frames, rng: random.Random) -> Frames:
    header = _header(frames)
    if header:
        header[0] = rng.choice(
            ["hello", "begin", "window", "states", "pull", "hint", "close", "fetch", "part", "wind"]
        )
        frames[0] = packed(header)
    return frames


def _odd_ids(frames: Frames, rng: random.Random) -> Frames:
    wild = [VOCAB - 1, VOCAB, PADDED_VOCAB, 2**16 - 1]
    count = rng.choice([0, 3, 65])
    ids = [rng.choice([rng.randrange(VOCAB), rng.choice(wild)]) for _ in range(count)]
    return [frames[0], ids_bytes(ids), *frames[2:]]


def _odd_floats(frames: Frames, rng: random.Random) -> Frames:
    if len(frames) > 2 and len(frames[2]) >= 4:
        values = np.frombuffer(frames[2][: len(frames[2]) // 4 * 4], dtype="<f4").copy()
        odd = [np.nan, np.inf, -np.inf, -1.0, 1e38, 1e-45, 0.0]
        values[rng.randrange(len(values))] = rng.choice(odd)
        frames[2] = values.tobytes()
    return frames


def _odd_expansion(frames: Frames, rng: random.Random) -> Frames:
    """Replace a tree's expansion."""
    count = rng.choice([0, 1, 2, 3, 64, 128, 129, 5000])
    odd = bytes(rng.choices([0, 1, 1, 2, 2, 3, 64, 128, 255], k=count))
    return [*frames[:2], odd, *frames[3:]]


def _foreign(frames: Frames, rng: random.Random) -> Frames:
    """Replace a frame, or all, by those of another window."""
    protocol = rng.choice([name for name, item in PROTOCOL_REGISTRY.items() if not item.streams])
    others = RawSession().propose(protocol, drafted(protocol, (1, 1), rng.randrange(8)))
    at = rng.randrange(1, len(others))
    if rng.random() < 0.3:
        return [frames[0], *others[1:]]
    return [*frames[:at], others[at], *frames[at + 1 :]]


def _odd_steps(frames: Frames, rng: random.Random) -> Frames:
    """Replace a number or a block's step in hidden states by an invalid one."""
    at = rng.randrange(1, len(frames)) if len(frames) > 1 else 0
    if at and len(frames[at]) >= 2:
        odd = np.array([np.nan, np.inf, -np.inf, -1.0, 3e38, 0.0], np.float32)
        step = rng.choice(odd).tobytes()[2:] if rng.random() < 0.7 else b"\x00\x7c"  # fp16's ∞
        place = 2 * rng.randrange(min(64, len(frames[at]) // 2))
        frames[at] = frames[at][:place] + step + frames[at][place + 2 :]
    return frames


def _near_start(frames: Frames, rng: random.Random) -> Frames:
    """Shift the position of a window, states, a pull or a hint a little."""
    header = _header(frames)
    start = header[3] if len(header) > 3 and header[0] in _PLACED else None
    if isinstance(start, int) and 0 <= start < CONTEXT:
        header[3] = max(0, start + rng.choice([-2, -1, 1, 2]))
        frames[0] = packed(header)
    return frames


def _garbage(frames: Frames, rng: random.Random) -> Frames:
    return [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(1, 5))]


def _near_context(frames: Frames, rng: random.Random) -> Frames:
    return [frames[0], ids_bytes([1] * (CONTEXT + rng.choice([-1, 0, 1, 5000]))), *frames[2:]]


MUTATIONS: list[Callable[[Frames, random.Random], Frames]] = [
    _flip, _flip, _cut, _grow, _drop, _repeat, _shuffle, _odd_field, _odd_field, _other_type,
    _odd_ids, _odd_floats, _odd_steps, _odd_expansion, _foreign, _near_start, _garbage,
    _near_context,
]  # fmt: skip
