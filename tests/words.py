"""Check the words of the code: `make lint` runs `python -m tests.words [PATH…]`.

Names must be nouns and verbs of the field; comments and docstrings, sentences or noun phrases.
Exact match and a few patterns find the usual faults; readers find the rest. An exception is a line
of `tests/words_allowed.txt`: path, word, reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ALLOWED = ROOT / "tests/words_allowed.txt"
ROOMS = ("pilotfish", "benchmarks", "tests")
READ = "pilotfish/"  # comments and docstrings are checked here only, names everywhere

# Participles, pronouns and private words. A name says what a value is: `found` may be a file, a
# token or a session.
NAMES = frozenset(
    {"told", "found", "one", "own", "kept", "met", "heed", "heeded", "lead", "purse", "lexicon"}
    | {"supplies", "tally", "partners", "said", "asked", "heard", "given", "gone", "meant"}
    | {"spoken", "shown", "whose", "which", "beside", "behind", "meanwhile"}
)
# What begins a comment or a line about an attribute, and has no noun before it.
PATTERNS = {
    "a comment that begins with a preposition": re.compile(
        r"#+ (of|to|by|for|from|behind|beside|with|without|at|in) (the|a|an|its|these|this|all|"
        r"each|every|such|both|one|two|what)\b[^.:;]*$"
    ),
    "an attribute that is described by `of …`": re.compile(r"^\s*\w+: of \w"),
    "`what is told of`": re.compile(r"\b(is|are|was|were|be) told\b|\bhas told\b|\btells of\b"),
    "`so many`, `such a one`": re.compile(r"\bso many of\b|\bsuch a one\b|\bnone any more\b"),
}


class Fault(NamedTuple):
    """A place whose words are to be changed."""

    path: str
    line: int
    word: str
    text: str


def main(paths: list[str]) -> int:
    """Print every fault; the exit status is 1 if there is one."""
    files = [Path(path).resolve() for path in paths] or [ROOT / room for room in ROOMS]
    allowed = exceptions()
    faults = [fault for path in files for file in python_files(path) for fault in check(file)]
    rest = [fault for fault in faults if (fault.path, fault.word) not in allowed]
    for path, line, word, text in rest:
        print(f"{path}:{line}: {word}: {text}")
    unused = set() if paths else allowed - {(fault.path, fault.word) for fault in faults}
    for path, word in sorted(unused):
        print(f"{ALLOWED.name}: {path}: {word}: no longer needed")
    return bool(rest or unused)


def exceptions() -> set[tuple[str, str]]:
    """Read the exceptions: (path, word)."""
    lines = ALLOWED.read_text(encoding="utf-8").splitlines()
    rows = [line.split(None, 2) for line in lines if line and not line.startswith("#")]
    assert all(len(row) == 3 for row in rows), "an exception needs a path, a word and a reason"
    return {(path, word) for path, word, _ in rows}


def python_files(path: Path) -> list[Path]:
    """List a file, or a folder's Python files."""
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def check(path: Path) -> Iterator[Fault]:
    """Yield the faults of one file: names where they are defined, comments, docstrings."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    text = path.read_text(encoding="utf-8")
    for line, word in sorted(set(defined_names(ast.parse(text)))):
        if word.lstrip("_") in NAMES:
            yield Fault(name, line, word, "a name that does not say what it is")
    if path.stem.lstrip("_") in NAMES:
        yield Fault(name, 1, path.stem, "a file's name that does not say what it is")
    if name != path.name and not name.startswith(READ):
        return
    for line, prose in prose_lines(text):
        for fault, pattern in PATTERNS.items():
            if pattern.search(prose):
                yield Fault(name, line, fault, prose.strip())


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each place where a name is given to something: line, name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and docstrings: number, text."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT):
            yield from enumerate(token.string.splitlines(), token.start[0])
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
