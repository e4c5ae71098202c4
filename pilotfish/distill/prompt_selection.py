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
        return frozenset(prompt.kind for prompt in self.learnt)


def select(
    file_prompts: Sequence[DistillPrompt],
    built_in: Sequence[DistillPrompt],
    *,
    most_from_files: int,
    most_built_in: int,
    held: float,
    measure_only: Sequence[DistillPrompt] = (),
) -> Selection:
    """Choose what is learnt from and what is held out.

    most: prompts of ``given`` at most. mixed: of the built-in ones at most, spread over their
    kinds, `UNTRAINED` not counted. held: the share that is held out. apart: held out besides.
    """
    measured_only = {prompt.key: prompt for prompt in measure_only}
    from_files = _spread(file_prompts, most_from_files, measured_only)
    from_built_in = _spread(
        [prompt for prompt in built_in if prompt.kind not in UNTRAINED],
        most_built_in,
        measured_only,
    )
    forgetting_tests = (
        [prompt for prompt in built_in if prompt.kind in UNTRAINED] if most_built_in else []
    )
    candidates: dict[str, DistillPrompt] = {}
    for prompt in chain(from_files, from_built_in):
        candidates.setdefault(prompt.key, prompt)
    bound = int(held * 0xFFFF)
    # by the last digits: those that are chosen at all are those whose first digits are low
    held_out = [prompt for prompt in candidates.values() if int(prompt.key[-4:], 16) < bound]
    if len(held_out) < _LEAST_HELD:
        held_out = sorted(candidates.values(), key=lambda prompt: prompt.key)[:_LEAST_HELD]
    keys = {prompt.key for prompt in held_out}
    learnt = [prompt for prompt in candidates.values() if prompt.key not in keys]
    if not learnt:
        raise UnsupportedError(
            f"{len(candidates)} prompts leave nothing to learn from once some are held out: give more."
        )
    for kind in UNTRAINED:
        of_kind = sorted(
            (prompt for prompt in forgetting_tests if prompt.kind == kind),
            key=lambda prompt: prompt.key,
        )
        held_out += [
            prompt
            for prompt in of_kind[:_MOST_UNTRAINED]
            if prompt.key not in {**candidates, **measured_only}
        ]
    held_out += measured_only.values()
    return Selection(_mixed(learnt), _mixed(held_out))


def _spread(
    prompts: Sequence[DistillPrompt], most: int, excluded: Container[str]
) -> list[DistillPrompt]:
    """Take ``most`` of the prompts, the kinds in turn, each in the order of its hashes.

    Each only once, however often it is given, and none whose key is among ``never``.
    """
    unique: dict[str, DistillPrompt] = {}
    for prompt in prompts:
        if prompt.key not in excluded:
            unique.setdefault(prompt.key, prompt)
    kinds: dict[str, list[DistillPrompt]] = {}
    for prompt in sorted(unique.values(), key=lambda prompt: prompt.key):
        kinds.setdefault(prompt.kind, []).append(prompt)
    largest = max(map(len, kinds.values()), default=0)
    turns = (
        of_kind[at] for at in range(largest) for of_kind in kinds.values() if at < len(of_kind)
    )
    return [prompt for prompt, _ in zip(turns, range(most), strict=False)]


def _mixed(prompts: Iterable[DistillPrompt]) -> list[DistillPrompt]:
    """Order them by hash, so that the first answers are of all kinds."""
    return sorted(prompts, key=lambda prompt: prompt.key)


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
    prompts = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = file.name.removesuffix(".txt")
        lines = file.read_text(encoding="utf-8").splitlines()
        prompts += [DistillPrompt(kind, line) for line in lines if line]
    return prompts
