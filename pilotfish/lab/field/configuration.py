"""What a run compares: configurations of the protocols, and the cells of its matrix."""

from typing import Any, Literal, NamedTuple, TypeAlias

from pilotfish.lab.field.axes import Point, format_point
from pilotfish.wire.protocols import LOCAL, streams
from pilotfish.wire.request import AUTO

WindowSetting: TypeAlias = int | Literal["auto"]


class Configuration(NamedTuple):
    """A protocol, its window, and its values of the options that the run varies (`field.axes`).

    window: draft tokens, or None under protocols without windows (`has_windows`), and with an
    expansion.
    """

    protocol: str
    window: WindowSetting | None
    point: Point = ()

    @classmethod
    def of(cls, protocol: str, window: WindowSetting | None, point: Point = ()) -> "Configuration":
        """Return the configuration; leave out a window that has no effect under the protocol.

        Older runs asked for `ahead` once a window, and a choice of ``auto`` has the window 0.
        """
        return cls(protocol, (window or None) if has_windows(protocol) else None, point)

    def __str__(self) -> str:
        name = self.protocol if self.window is None else f"{self.protocol} γ={self.window}"
        return f"{name} {format_point(self.point)}" if self.point else name

    def to_json(self) -> dict[str, Any]:
        """Return protocol, window and varied options, by name."""
        return {"protocol": self.protocol, "window": self.window, **dict(self.point)}


def has_windows(protocol: str) -> bool:
    """Return whether a window has an effect: not under `local`, `auto`, `stream` and `ahead`."""
    return protocol not in (LOCAL, AUTO) and not streams(protocol)


class Cell(NamedTuple):
    """A cell of a run's matrix. prompt: index of the prompt. repeat: number, counted from 0."""

    configuration: Configuration
    prompt: int
    repeat: int
