"""What the target is asked: the prompts of files and the built-in ones, and which are held out.

Every choice goes by a hash of the prompt, never by its place in a file: a run that is resumed, or
begun again with more prompts, keeps the same prompts out of training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.base.errors import UnsupportedError
from pilotfish.field.prompts import PromptLine, numbered_lines, question_of

# built-in kinds that are never trained on: what is forgotten shows there
UNTRAINED = ("stories", "translation")
_MOST_UNTRAINED = 12  # prompts of each such kind: they are read, not learnt from
_LEAST_HELD = 1  # a run without a held-out prompt could not be stopped, or judged


class DistillPrompt(msgspec.Struct, frozen=True):
    """One prompt. kind: what it is an example of. asked: a text, or messages of a chat."""

    kind: str
    asked: str | list[dict[str, Any]]

    @property
    def key(self) -> str:
        """Its name among all prompts: a hash of what is asked."""
        return hashlib.sha256(msgspec.json.encode(self.asked)).hexdigest()[:16]


class Selection(msgspec.Struct, frozen=True):
    """Prompts to learn from, and those that are kept out to measure by; each in a fixed order."""

    learnt: list[DistillPrompt]
    held: list[DistillPrompt]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that are learnt from."""
        return frozenset(one.kind for one in self.learnt)


def select(
    given: Sequence[DistillPrompt],
    built_in: Sequence[DistillPrompt],
    *,
    most: int,
    mixed: int,
    held: float,
    apart: Sequence[DistillPrompt] = (),
) -> Selection:
    """Choose what is learnt from and what is held out.

    most: prompts of ``given`` at most. mixed: of the built-in ones at most, spread over their
    kinds, `UNTRAINED` not counted. held: the share that is held out. apart: held out besides.
    """
    never = {one.key: one for one in apart}
    theirs = _spread(given, most, never)
    ours = _spread([one for one in built_in if one.kind not in UNTRAINED], mixed, never)
    unlearnt = [one for one in built_in if one.kind in UNTRAINED] if mixed else []
    seen: dict[str, DistillPrompt] = {}
    for one in chain(theirs, ours):
        seen.setdefault(one.key, one)
    bound = int(held * 0xFFFF)
    # by the last digits: those that are chosen at all are those whose first digits are low
    out = [one for one in seen.values() if int(one.key[-4:], 16) < bound]
    if len(out) < _LEAST_HELD:
        out = sorted(seen.values(), key=lambda one: one.key)[:_LEAST_HELD]
    keys = {one.key for one in out}
    learnt = [one for one in seen.values() if one.key not in keys]
    if not learnt:
        raise UnsupportedError(
            f"{len(seen)} prompts leave nothing to learn from once some are held out: give more."
        )
    for kind in UNTRAINED:
        own = sorted((one for one in unlearnt if one.kind == kind), key=lambda one: one.key)
        out += [one for one in own[:_MOST_UNTRAINED] if one.key not in {**seen, **never}]
    out += never.values()
    return Selection(_mixed(learnt), _mixed(out))


def _spread(
    prompts: Sequence[DistillPrompt], most: int, never: Container[str]
) -> list[DistillPrompt]:
    """Take ``most`` of the prompts, the kinds in turn, each in the order of its hashes.

    Each only once, however often it is given, and none whose key is among ``never``.
    """
    once: dict[str, DistillPrompt] = {}
    for one in prompts:
        if one.key not in never:
            once.setdefault(one.key, one)
    kinds: dict[str, list[DistillPrompt]] = {}
    for one in sorted(once.values(), key=lambda one: one.key):
        kinds.setdefault(one.kind, []).append(one)
    deep = max(map(len, kinds.values()), default=0)
    turns = (own[at] for at in range(deep) for own in kinds.values() if at < len(own))
    return [one for one, _ in zip(turns, range(most), strict=False)]


def _mixed(prompts: Iterable[DistillPrompt]) -> list[DistillPrompt]:
    """Order them by hash, so that the first answers are of all kinds."""
    return sorted(prompts, key=lambda one: one.key)


# Reading


def read(path: Path) -> list[DistillPrompt]:
    """Read a file: a prompt a line, or JSON lines with ``prompt``, ``question`` or ``messages``.

    A JSON line may name its "kind"; else it is the file's name. Raises `UnsupportedError`, which
    names the line that is at fault.
    """
    return [_prompting(path, line) for line in numbered_lines(path)]


def _prompting(path: Path, line: PromptLine) -> DistillPrompt:
    kind = path.stem
    if isinstance(line.content, str):
        return DistillPrompt(kind, line.content)
    stated = line.content.get("kind")
    kind = stated if isinstance(stated, str) and stated else kind
    return DistillPrompt(kind, question_of(path, line))


def built_in() -> list[DistillPrompt]:
    """Return the built-in prompts: short ones, of ten kinds."""
    folder = files("pilotfish.distill") / "prompts"
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = file.name.removesuffix(".txt")
        lines = file.read_text(encoding="utf-8").splitlines()
        found += [DistillPrompt(kind, line) for line in lines if line]
    return found
