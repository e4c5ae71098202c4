"""Print an answer as it is generated; accepted drafts and the target's tokens differ in colour."""

from rich.console import Console
from rich.text import Text

from pilotfish.device_runtime.record import Piece

STYLES = {
    "drafted": "green",
    "forced": "dim green",
    "corrected": "bold yellow",
    "bonus": "cyan",
    "target": "default",
    "local": "magenta",
}
_MEANINGS = {
    "drafted": "accepted draft",
    "forced": "forced by the grammar",
    "corrected": "correction",
    "bonus": "bonus",
    "target": "target alone",
    "local": "drafter alone",
}


class AnswerScreen:
    """A writer of text to stdout and notes to stderr; colours only on a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.notes = Console(stderr=True, highlight=False)
        self._within_line = False  # whether an answer's line has begun and has no end yet

    def show(self, piece: Piece) -> None:
        """Write one piece of an answer."""
        self._out.print(Text(piece.text, style=STYLES[piece.origin]), end="")
        if piece.text:
            self._within_line = not piece.text.endswith("\n")

    def show_text(self, text: Text) -> None:
        """Write a whole answer with its styles."""
        self._out.print(text)

    def end(self) -> None:
        """End the answer's line."""
        self._out.print()
        self._within_line = False

    def note(self, text: str) -> None:
        """Write a dim note to stderr; on a terminal, not into an answer's line."""
        if self._within_line and self._out.is_terminal:
            self.end()
        self.notes.print(Text(text, style="dim"), soft_wrap=True)

    def legend(self, *origins: str) -> None:
        """Print what the colours of these origins (`Piece.origin`) mean."""
        legend = Text("tokens: ")
        legend.append_text(
            Text(", ").join(Text(_MEANINGS[origin], style=STYLES[origin]) for origin in origins)
        )
        self.notes.print(legend)
