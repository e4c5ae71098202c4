"""The command that exports an artifact's model again, in the form for a board."""

from __future__ import annotations

from pilotfish.boards.board import Board
from pilotfish.engines.manifest import Manifest

_UNKNOWN = "MODEL"  # the artifact does not say where its source's folder or file was


def export_command(manifest: Manifest, board: Board | None, jetpack: str | None = None) -> str:
    """Return the command; its words in capitals are for the user to replace.

    board: None: not known. jetpack: the board's, if it is known.
    """
    source = manifest.source
    models = {"hub": source.location, "default": "default"}
    words = ["pilotfish export model", models.get(source.kind, _UNKNOWN)]
    words += ["--board", "BOARD" if board is None else board.name]
    words += [] if jetpack is None else ["--jetpack", jetpack]
    return " ".join([*words, "--out DIR"])
