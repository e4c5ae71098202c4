"""Check that lossless protocols give the same tokens as `stream`, over loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pilotfish.device_runtime.device import Device
from pilotfish.edge_runtime.process import EdgeServer
from pilotfish.wire.protocols import STREAM

PROMPTS = ("The pilot fish", "swims ahead of the shark")
MAX_TOKENS = 48
CONTEXT = 256
# Lossless protocols, each with the temperatures at which it must give the same tokens as `stream`.
LOSSLESS = {"greedy": (0.0,), "coupled": (0.0, 1.0), "ahead": (0.0, 1.0)}


class Divergence(NamedTuple):
    """The first token at which a protocol's answer differs from the answer of `stream`."""

    temperature: float
    prompt: str
    token: int
    got: int | None
    wanted: int | None

    def __str__(self) -> str:
        """Format the divergence as one line."""
        return (
            f"temperature {self.temperature:g}, prompt {self.prompt!r}: token {self.token} is "
            f"{self.got} instead of {self.wanted}, the token of stream"
        )


@contextmanager
def both_ends(target: str, drafter: str, provider: str) -> Iterator[Device]:
    """Start an edge in a separate process; yield a device in this process, connected to it."""
    edge = EdgeServer(target, provider=provider, context=CONTEXT, sessions=2, threads=1)
    with (
        edge,
        Device(drafter, edge.endpoint, provider=provider, context=CONTEXT, threads=1) as device,
    ):
        yield device


def first_difference(device: Device, protocol: str) -> Divergence | None:
    """Compare a protocol's answers with the answers of `stream`; return None if they are equal."""
    for temperature in LOSSLESS[protocol]:
        for prompt in PROMPTS:
            got, wanted = (
                device.generate(
                    prompt,
                    protocol=name,
                    temperature=temperature,
                    seed=7,
                    max_tokens=MAX_TOKENS,
                ).tokens
                for name in (protocol, STREAM)
            )
            if got != wanted:
                return _first_divergence(temperature, prompt, got, wanted)
    return None


def _first_divergence(
    temperature: float, prompt: str, got: list[int], wanted: list[int]
) -> Divergence:
    """Find the first token that differs; in the result, None means that the answer has ended."""
    longest = max(len(got), len(wanted))
    pairs = [
        tuple(answer[index] if index < len(answer) else None for answer in (got, wanted))
        for index in range(longest)
    ]
    first = next(
        index for index, (got_token, wanted_token) in enumerate(pairs) if got_token != wanted_token
    )
    return Divergence(temperature, prompt, first, *pairs[first])
