"""Select a run's prompts from files and from the built-in prompts, and hold some prompts out.

Every choice depends on a hash of the prompt, never on its position in a file. So a run that is
resumed, or begun again with more prompts, holds out the same prompts.
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
from pilotfish.lab.prompts import PromptLine, question_of, read_lines

# Built-in kinds that training never uses. Agreement on them shows what the drafter forgets.
UNTRAINED = ("stories", "translation")
# maximum number of prompts per untrained kind, since each prompt costs measuring time
_MOST_UNTRAINED = 12
_LEAST_HELD = 1  # minimum number of held-out prompts: early stopping and the report need one


class DistillPrompt(msgspec.Struct, frozen=True):
    """One prompt. kind: name of its group in the report. content: a text, or a chat's messages."""

    kind: str
    content: str | list[dict[str, Any]] = msgspec.field(name="asked")

    @property
    def key(self) -> str:
        """The prompt's identifier: a hash of its content."""
        return hashlib.sha256(msgspec.json.encode(self.content)).hexdigest()[:16]


class Selection(msgspec.Struct, frozen=True):
    """The prompts of a run. learnt: prompts for training. held: held-out prompts, for measuring."""

    learnt: list[DistillPrompt]
    held: list[DistillPrompt]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the prompts for training."""
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
    """Select prompts for training and prompts to hold out.

    most_from_files: largest number of prompts from ``file_prompts``. most_built_in: largest number
    of built-in prompts, spread evenly over their kinds; kinds in `UNTRAINED` do not count. held:
    share of these prompts to hold out. measure_only: further prompts to hold out.
    """
    measured_only = {prompt.key: prompt for prompt in measure_only}
    from_files = _take_by_kind(file_prompts, most_from_files, measured_only)
    from_built_in = _take_by_kind(
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
    # Use the hash's last digits: its first digits have already decided which are candidates.
    held_out = [prompt for prompt in candidates.values() if int(prompt.key[-4:], 16) < bound]
    if len(held_out) < _LEAST_HELD:
        held_out = sorted(candidates.values(), key=lambda prompt: prompt.key)[:_LEAST_HELD]
    keys = {prompt.key for prompt in held_out}
    learnt = [prompt for prompt in candidates.values() if prompt.key not in keys]
    if not learnt:
        raise UnsupportedError(
            f"{len(candidates)} prompts are too few, since no prompt is left for training "
            "after some are held out: give more prompts."
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
    return Selection(_order_by_hash(learnt), _order_by_hash(held_out))


def _take_by_kind(
    prompts: Sequence[DistillPrompt], most: int, excluded: Container[str]
) -> list[DistillPrompt]:
    """Take up to ``most`` different prompts: one of each kind in turn, in the order of hashes.

    excluded: keys of the prompts that must not be taken.
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


def _order_by_hash(prompts: Iterable[DistillPrompt]) -> list[DistillPrompt]:
    """Sort prompts by hash, so that the first answers cover all kinds."""
    return sorted(prompts, key=lambda prompt: prompt.key)


# Reading


def read_prompts(path: Path) -> list[DistillPrompt]:
    """Read a file of prompts: texts, one a line, or JSON lines.

    A JSON line has ``prompt``, ``question`` or ``messages``. It may also have ``kind``; the default
    kind is the file's name. Raises `UnsupportedError`, which names the faulty line.
    """
    return [_parse_prompt(path, line) for line in read_lines(path)]


def _parse_prompt(path: Path, line: PromptLine) -> DistillPrompt:
    kind = path.stem
    if isinstance(line.content, str):
        return DistillPrompt(kind, line.content)
    stated = line.content.get("kind")
    kind = stated if isinstance(stated, str) and stated else kind
    return DistillPrompt(kind, question_of(path, line))


def built_in() -> list[DistillPrompt]:
    """Return the built-in prompts, which are short and of several kinds."""
    folder = files("pilotfish.lab.distill") / "prompts"
    prompts = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = file.name.removesuffix(".txt")
        lines = file.read_text(encoding="utf-8").splitlines()
        prompts += [DistillPrompt(kind, line) for line in lines if line]
    return prompts
