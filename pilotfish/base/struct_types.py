"""Let msgspec gather the types of a struct in one thread at a time.

msgspec gathers them when it meets the struct first. If two threads do so at once, the process
crashes (seen with msgspec 0.22). So what several threads may decode or convert goes through
`gathered`.
"""

from threading import Lock
from typing import Any, TypeVar

import msgspec

_GATHERING = Lock()
_KNOWN: set[Any] = set()  # types whose structs have been gathered
_Kind = TypeVar("_Kind")


def gathered(kind: _Kind) -> _Kind:
    """Return a type, as given, after msgspec has gathered the types of its structs."""
    if kind not in _KNOWN:
        with _GATHERING:
            msgspec.json.Decoder[Any](kind)
        _KNOWN.add(kind)
    return kind
