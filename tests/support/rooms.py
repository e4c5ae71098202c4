"""The room that a file of the package, or of its tests, belongs to."""

from __future__ import annotations

NESTED = ("lab",)  # folders of rooms: `lab/field/run.py` belongs to `field`


def room_of(path: str) -> str:
    """Return a file's room: the first folder of its path, or the second one in a folder of rooms.

    path: relative to `pilotfish/` or `tests/`. A file in no folder has the room "(root)".
    """
    folders = path.split("/")[:-1]
    if len(folders) > 1 and folders[0] in NESTED:
        return folders[1]
    return folders[0] if folders else "(root)"
