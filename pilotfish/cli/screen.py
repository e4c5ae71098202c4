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


class AnswerScreen:
    """A writer of text to stdout and notes to stderr; colours only on a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.notes = Console(stderr=True, highlight=False)

    def show(self, piece: Piece) -> None:
        """Write one piece of an answer."""
        self._out.print(Text(piece.text, style=STYLES[piece.origin]), end="")

    def show_text(self, text: Text) -> None:
        """Write a whole answer with its styles."""
        self._out.print(text)

    def end(self) -> None:
        """End the answer's line."""
        self._out.print()

    def legend(self) -> None:
        """Print what the colours mean."""
        legend = Text("tokens: ")
        # origin `forced` is missing, since the demo uses no grammar
        for origin in ("drafted", "corrected", "bonus"):
            legend.append(f"{origin} ", style=STYLES[origin])
        self.notes.print(legend)
