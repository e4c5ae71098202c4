"""Get the target's answer to each prompt through a device, and store the answers in a file.

In:  a device, and a request. Out: each answer when it is finished.

The file has JSON lines: first the request, which names the target, then one line for each answer.
Each line is on the disk before the next answer begins. So a kill or a power cut loses only the
current answer. Resuming removes an incomplete last line.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pilotfish.base.errors import PromptTooLongError, RunFileError
from pilotfish.base.files import PRIVATE, sync
from pilotfish.base.reading import reading_file
from pilotfish.device_runtime.device import Device
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import STREAM, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_BYTES = 1 << 30


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts, the target and the options that determine the answers in a file.

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
    device: Device, request: AnswerRequest, done: dict[int, TargetAnswer]
) -> Iterator[TargetAnswer]:
    """Yield the answers that are not in ``done``; raise the same errors as `Device.generate`."""
    for prompt, question in enumerate(request.prompts):
        if prompt not in done:
            yield _answer(device, request, prompt, question)


def _answer(device: Device, request: AnswerRequest, prompt: int, question: Any) -> TargetAnswer:
    params = request.sampling(prompt)
    try:
        generation = device.generate(
            question,
            protocol=STREAM,
            max_tokens=request.max_tokens,
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
        of answers; it began with a different request; another process is writing it.
    """

    def __init__(
        self, path: Path, request: AnswerRequest, vocab_size: int, *, resume: bool
    ) -> None:
        if path.exists() and not resume:
            raise RunFileError(
                f"{path} exists: continue with its answers by --resume, or name "
                "another folder by --out."
            )
        self.answers: dict[int, TargetAnswer] = {}
        if path.is_dir():
            raise RunFileError(f"{path} is a folder: name another folder by --out.")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
        self._file = os.fdopen(
            descriptor, "r+b", buffering=0
        )  # unbuffered, so that a full disk raises an error at once
        try:
            self._lock(path)
            if self._read(path, request, vocab_size):
                self._write(request)
                sync(path.parent)
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFileError(f"Another process is writing {path}: wait until it ends.") from None

    def _read(self, path: Path, request: AnswerRequest, vocab_size: int) -> bool:
        """Read the file and cut off an incomplete last line; return whether the file is new."""
        if path.stat().st_size > _MOST_BYTES:
            raise RunFileError(f"{path} is too large for a file of answers.")
        complete, _, _ = self._file.read().rpartition(b"\n")
        lines = complete.split(b"\n") if complete else []
        self._file.truncate(len(complete) + 1 if lines else 0)
        fault = f"{path} is not a file of answers, or is damaged"
        with reading_file(lambda problem: RunFileError(f"{fault}: {problem}.")):
            headers = [msgspec.json.decode(line, type=AnswerRequest) for line in lines[:1]]
            answers = [msgspec.json.decode(line, type=TargetAnswer) for line in lines[1:]]
        for header in headers:
            _expect_same(path, header, request)
        if any(token >= vocab_size for answer in answers for token in answer.tokens):
            raise RunFileError(
                f"{path} is damaged: its answers have tokens that the target "
                f"{request.target} lacks."
            )
        self.answers = {
            answer.prompt: answer for answer in answers if answer.prompt < len(request.prompts)
        }
        return not lines

    def add(self, answer: TargetAnswer) -> None:
        """Append an answer to the file; wait until the disk has it."""
        self._write(answer)
        self.answers[answer.prompt] = answer

    def _write(self, value: msgspec.Struct) -> None:
        line = msgspec.json.encode(value) + b"\n"
        while line:
            line = line[os.write(self._file.fileno(), line) :]
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _expect_same(path: Path, header: AnswerRequest, request: AnswerRequest) -> None:
    for name in AnswerRequest.__struct_fields__:
        original, value = getattr(header, name), getattr(request, name)
        if original != value:
            difference, current = "other prompts", ""
            if name != "prompts":
                difference = f"{name.replace('_', ' ')} {_format_value(original)}"
                current = f", but now it is {_format_value(value)}"
            raise RunFileError(
                f"The answers in {path} were begun with {difference}{current}: "
                "name another folder by --out."
            )


def _format_value(value: str | float) -> str:
    return "unknown" if value == "" else str(value)
