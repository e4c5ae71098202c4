"""What becomes of a file on its way: damages that every reader of foreign files must name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (None, [], {}, "", -1, 1e308, 10**30, True, [None], {"a": None}, "\0")
LITERALS = ("1e400", "9" * 5000, "NaN", "[" * 2000 + "]" * 2000, '{"a":1,"a":2}', '"\\ud800"')


def damages(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of files that are no longer what they were, whatever they were."""
    yield "empty", b""
    yield "UTF-16", whole.decode("utf-8", "replace").encode("utf-16")
    yield "with a mark", b"\xef\xbb\xbf" + whole
    for at in sorted({min(5, len(whole)), len(whole) // 2, max(len(whole) - 5, 0)}):
        yield f"no UTF-8 at {at}", whole[:at] + b"\xff\xfe" + whole[at:]
        yield f"NUL at {at}", whole[:at] + b"\0" + whole[at:]
        yield f"cut at {at}", whole[:at]
    yield "deep lists", b"[" * 100_000
    yield "deep objects", b'{"a":' * 100_000
    for literal in ("null", "[]", "{}", "1", '["a"]', "[{}]", *LITERALS):
        yield f"only {literal[:8]}", literal.encode()


def wrong_values(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """JSON with one of its values replaced by one of another kind, or left out."""
    tree = json.loads(whole)
    for place in _places(tree)[:24]:
        for value in VALUES:
            yield f"{place} is {value!r:.10}", json.dumps(_with(tree, place, value)).encode()
        marked = json.dumps(_with(tree, place, "@here@"))
        for literal in LITERALS:
            yield f"{place} is {literal:.8}", marked.replace('"@here@"', literal).encode()


def _places(node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside: Any = node.items() if isinstance(node, dict) else ()
    if isinstance(node, list):
        inside = enumerate(node[:2])
    results = []
    for key, value in inside:
        results += [(*above, key), *_places(value, (*above, key))]
    return results


def _with(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    made = json.loads(json.dumps(tree))
    node = made
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return made


def no_files(path: Path) -> Iterator[str]:
    """Put in the place of a file, one after the other, nothing and a folder."""
    path.unlink()
    yield "missing"
    path.unlink(missing_ok=True)  # some readers begin a new one
    path.mkdir()
    yield "a folder"
    path.rmdir()
    path.write_bytes(b"")
