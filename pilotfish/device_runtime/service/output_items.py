"""The items of an answer's output: texts, thoughts and calls, one after the other.

In:  the parts of a turn, as they come. Out: bodies and events; each API has its own kind of item.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pilotfish.device_runtime.service.refusal import Body
from pilotfish.engines.chat_formats.reader import TurnPart


class OutputItem(ABC):
    """An item of an answer's output, to which text is added.

    kind: a text ("content"), a thought ("reasoning") or a call. index: its place in the output.
    name, call_id: of a call. status: "in_progress", "completed" or "incomplete".
    """

    def __init__(self, first: TurnPart, index: int) -> None:
        self.kind = _item_kind(first)
        self.index = index
        self.name, self.call_id = (first.text, first.id) if self.kind == "call" else ("", "")
        self.status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments as JSON."""
        return "".join(self._texts)

    @abstractmethod
    def body(self) -> Body:
        """Return the item as JSON types."""

    @abstractmethod
    def begin(self) -> Iterator[Body]:
        """Return the item's first events."""

    @abstractmethod
    def delta(self, text: str) -> Iterator[Body]:
        """Return the events of a text that was added."""

    @abstractmethod
    def end(self) -> Iterator[Body]:
        """Return the item's last events."""

    def grow(self, text: str) -> Iterator[Body]:
        """Add a text to the item; return the events."""
        self._texts.append(text)
        return self.delta(text)


def _item_kind(part: TurnPart) -> Literal["content", "reasoning", "call"]:
    return "call" if part.kind == "arguments" else part.kind


class Output:
    """The items of an answer; text may be added to the last one.

    new_item: makes an item from its first part and its index.
    """

    def __init__(self, new_item: Callable[[TurnPart, int], OutputItem]) -> None:
        self._new_item = new_item
        self._ended: list[Body] = []
        self._last: OutputItem | None = None

    def push(self, parts: Sequence[TurnPart]) -> Iterator[Body]:
        """Add parts to the items; return the events."""
        for part in parts:
            item = self._last
            if item is None or item.kind != _item_kind(part) or part.kind == "call":
                yield from self.end("completed")
                item = self._last = self._new_item(part, len(self._ended))
                yield from item.begin()
            if part.kind != "call":
                yield from item.grow(part.text)

    def end(self, status: str) -> Iterator[Body]:
        """Return the events that end the last item."""
        if self._last is not None:
            self._last.status = status
            yield from self._last.end()
            self._ended.append(self._last.body())
            self._last = None

    def items(self) -> list[Body]:
        """Return the bodies of the items that have ended."""
        return [*self._ended]
