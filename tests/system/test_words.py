"""The check of words finds each kind of fault, and passes over what is none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.words import ROOT, check, exceptions

FIELD = re.compile(r"\{[^{}]*[(.]")  # a replacement field that only an f-string would fill
FAULTY = {
    "a local": "def f():\n    found = 1\n    return found\n",
    "a parameter": "def f(told):\n    return told\n",
    "a private function": "def _told():\n    pass\n",
    "an attribute": "class A:\n    def __init__(self):\n        self._kept = 1\n",
    "a loop's variable": "def f(items):\n    return [one for one in items]\n",
    "an alias": "import json as own\n",
    "a capture": "def f(x):\n    match x:\n        case [said]:\n            return said\n",
    "a comment without a noun": "x = 1  # of the last round\n",
    "an attribute's line": 'class A:\n    """A thing.\n\n    x: of the window.\n    """\n',
    "a riddle in the passive": 'def f():\n    """What is told of a pass."""\n',
}
FAULTLESS = {
    "words in strings": 'x = {"told": 1, "found": 2}\n',
    "attributes of others": "def f(reply):\n    return reply.found\n",
    "a keyword of others": "def f(g):\n    return g(kept=1)\n",
    "longer names": "kept_tokens = one_line = founder = 1\n",
    "a comment with a noun": "x = 1  # seconds of the last round\n",
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_is_seen(case: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(FAULTY[case])
    assert [fault.line for fault in check(file)]


@pytest.mark.parametrize("case", FAULTLESS)
def test_what_is_none_passes(case: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(FAULTLESS[case])
    assert not list(check(file))


def test_a_files_name_counts(tmp_path: Path) -> None:
    file = tmp_path / "beside.py"
    file.write_text("")
    assert [fault.word for fault in check(file)] == ["beside"]


def test_every_exception_has_a_reason() -> None:
    assert exceptions()


def lost_pieces(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of strings after a `return`, and of fields that no f-string fills."""
    nodes = [*ast.walk(tree)]
    filled = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        statements = getattr(node, "body", None)
        for before, statement in pairwise(statements if isinstance(statements, list) else []):
            if isinstance(before, ast.Return) and isinstance(statement, ast.Expr):
                yield statement.lineno
        for inner in ast.walk(node) if isinstance(node, ast.Raise) else ():
            if isinstance(inner, ast.Constant) and id(inner) not in filled:
                yield from [inner.lineno] if FIELD.search(str(inner.value)) else []


def test_no_piece_of_a_message_is_lost() -> None:
    faulty = "def f():\n    return 'one '\n    'two'\ndef g(x):\n    raise E('{x.y} is wrong')\n"
    assert [*lost_pieces(ast.parse(faulty))] == [3, 5]
    for path in sorted((ROOT / "pilotfish").rglob("*.py")):
        assert not [*lost_pieces(ast.parse(path.read_text("utf-8")))], path
