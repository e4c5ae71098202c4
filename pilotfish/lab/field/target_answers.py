"""Get the target's answer to each prompt through a device, and store the answers in a file.

In:  a device, and the header of a file. Out: each answer when it is finished.

The file has JSON lines: first the header, which names the target, then one line for each answer.
Each line is on the disk before the next answer begins. So a kill or a power cut loses only the
current answer. Resuming removes an incomplete last line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import structs

from pilotfish.base.errors import PromptTooLongError, RunFileError
from pilotfish.base.files import sync
from pilotfish.device_runtime.device import Device
from pilotfish.lab.runs import LineFile, WriterLock, changes
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import STREAM, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self


class AnswerHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a file of answers: the prompts, the target and the options that determine them.

    digest: hash of the target's artifact; "" if the edge does not send a hash. prompts: each is a
    text, or a list of messages.
    """

    target: str
    digest: str
    prompts: list[str | list[dict[str, str]]]
    max_tokens: int
    temperature: float
    seed: int

    def sampling(self, prompt: int) -> SamplingParams:
        """Return the sampling parameters for a prompt; each prompt has a different seed."""
        return SamplingParams(
            sampling=Sampling(temperature=self.temperature), seed=self.seed + prompt
        )


class TargetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The target's answer to one prompt.

    pass_s: median time of the target's passes, s. left_out: reason why there is no answer.
    """

    prompt: Annotated[int, msgspec.Meta(ge=0)]
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    pass_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    left_out: str = ""


def answer_all(
    device: Device, header: AnswerHeader, done: dict[int, TargetAnswer]
) -> Iterator[TargetAnswer]:
    """Yield the answers that are not in ``done``; raise the same errors as `Device.generate`."""
    for prompt, question in enumerate(header.prompts):
        if prompt not in done:
            yield _answer(device, header, prompt, question)


def _answer(device: Device, header: AnswerHeader, prompt: int, question: Any) -> TargetAnswer:
    params = header.sampling(prompt)
    try:
        generation = device.generate(
            question,
            protocol=STREAM,
            max_tokens=header.max_tokens,
            temperature=params.sampling.temperature,
            seed=params.seed,
        )
    except PromptTooLongError as error:
        return TargetAnswer(prompt=prompt, left_out=str(error))
    later = [
        round_.pass_s for round_ in generation.rounds[1:] if round_.pass_s > 0.0
    ]  # the first round is not counted, because it reads the prompt
    return TargetAnswer(
        prompt=prompt, tokens=generation.tokens, pass_s=median(later) if later else 0.0
    )


class AnswerFile:
    """A file of answers, which is locked for one writer. answers: answers by prompt number.

    vocab_size: size of the target's vocabulary; a file with larger token ids counts as damaged.

    Raises `RunFileError` in four cases: the file exists and ``resume`` is false; it is not a file
        of answers; it began with a different header; another process is writing it.
    """

    def __init__(self, path: Path, header: AnswerHeader, vocab_size: int, *, resume: bool) -> None:
        if path.exists() and not resume:
            raise RunFileError(
                f"{path} exists: continue with its answers by --resume, or name "
                "another folder by --out."
            )
        if path.is_dir():
            raise RunFileError(f"{path} is a folder: name another folder by --out.")
        self._lines = LineFile(path, synced=True)
        self._lock = WriterLock(path, f"Another process is writing {path}: wait until it ends.")
        try:
            self.answers = self._read(header, vocab_size)
        except BaseException:
            self._lock.close()
            raise

    def _read(self, header: AnswerHeader, vocab_size: int) -> dict[int, TargetAnswer]:
        """Read the answers; write the header into a new file."""
        path = self._lines.path
        values = self._lines.read(_decode, self._damage_error)
        if not values:
            self._lines.append(header)
            sync(path.parent)
        answers: dict[int, TargetAnswer] = {}
        for value in values:
            if isinstance(value, AnswerHeader):
                _expect_same(path, value, header)
            elif any(token >= vocab_size for token in value.tokens):
                raise RunFileError(
                    f"{path} is damaged: its answers have tokens that the target "
                    f"{header.target} lacks."
                )
            elif value.prompt < len(header.prompts):
                answers[value.prompt] = value
        return answers

    def _damage_error(self, number: int, problem: str) -> RunFileError:
        where = f"line {number}: " if number else ""
        return RunFileError(
            f"{self._lines.path} is not a file of answers, or is damaged: {where}{problem}."
        )

    def add(self, answer: TargetAnswer) -> None:
        """Append an answer to the file; wait until the disk has it."""
        self._lines.append(answer)
        self.answers[answer.prompt] = answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def _decode(number: int, line: bytes) -> AnswerHeader | TargetAnswer:
    """Decode a line: the first one is the header, all others are answers."""
    if number == 1:
        return msgspec.json.decode(line, type=AnswerHeader)
    return msgspec.json.decode(line, type=TargetAnswer)


def _expect_same(path: Path, old: AnswerHeader, header: AnswerHeader) -> None:
    for name, original, value in changes(structs.asdict(old), structs.asdict(header)):
        difference = "other prompts"
        if name != "prompts":
            before, now = (str(each) if each != "" else "unknown" for each in (original, value))
            difference = f"{name.replace('_', ' ')} {before}, but now it is {now}"
        raise RunFileError(
            f"The answers in {path} were begun with {difference}: name another folder by --out."
        )
