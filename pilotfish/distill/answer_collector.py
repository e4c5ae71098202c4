"""Ask the target, in several sessions at once, and keep each answer as it comes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager

from pilotfish.base.errors import EdgeLostError, UnsupportedError
from pilotfish.device_runtime.bridge import Prompt
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.link.retry import AWAY
from pilotfish.distill.answers import TrainingExample, TrainingExampleFile
from pilotfish.distill.distill_settings import AnswerOptions
from pilotfish.distill.prompt_selection import DistillPrompt, Selection
from pilotfish.distill.training_rows import row_of
from pilotfish.wire.protocols import STREAM

_OWN_TOKENS = 2  # a drafter's for one of the target's, at most, in ordinary text

Progress = Callable[[int, int], None]
"""Called as progress(answers done, answers in all)."""


class AnswerCollector:
    """A device and its lanes, which ask the target."""

    def __init__(self, device: Device, options: AnswerOptions, sessions: int) -> None:
        self._device, self._options, self._sessions = device, options, sessions

    def collect(
        self, selection: Selection, examples: TrainingExampleFile, progress: Progress
    ) -> tuple[list[TrainingExample], int]:
        """Answer what has no answer yet; return all answers, and how many prompts had no room.

        Raises what ended it: an edge that is gone, a disk that is full. What was answered by then
        is kept.
        """
        held = {one.key for one in selection.held}
        wanted = {one.key: one for one in [*selection.held, *selection.learnt]}
        # in the order of the hashes, so that whatever is there is of all kinds
        ordered = [wanted[key] for key in sorted(wanted)]
        fitting = [(one, prompt) for one in ordered if (prompt := self._fitting(one)) is not None]
        self._expect_any(fitting)
        left = [(one, prompt) for one, prompt in fitting if one.key not in examples.answers]
        done = len(fitting) - len(left)
        progress(done, len(fitting))
        try:
            with closing(self._answers(left, held)) as answers:  # also if one cannot be kept
                for answered in answers:
                    examples.add(answered)
                    done += 1
                    progress(done, len(fitting))
        except AWAY as error:
            raise EdgeLostError(
                f"{error} {done} of {len(fitting)} answers are kept in {examples.path}: give the same "
                "command again to go on."
            ) from error
        found = [examples.answers[one.key] for one, _ in fitting]
        # some come to more of the drafter's tokens than was expected
        read = [one for one in found if len(one.row.ids) <= self._device.context]
        self._expect_any(read)
        return read, len(ordered) - len(read)

    def _expect_any(self, fitting: Sequence[object]) -> None:
        if not fitting:
            raise UnsupportedError(
                f"The drafter or the edge has {self._device.context} tokens of context, and no "
                f"prompt fits into them with an answer of {self._options.tokens}: lower --tokens."
            )

    def _fitting(self, one: DistillPrompt) -> Prompt | None:
        """Make the prompt; None if it has no room for its answer."""
        prompt = self._device.pair.prompt(one.asked)
        most = self._options.tokens
        own = most if self._device.pair.trivial else _OWN_TOKENS * most
        longest = max(len(prompt.ids) + most, len(prompt.draft_ids) + own)
        return prompt if longest <= self._device.context else None

    def _answers(
        self, left: Sequence[tuple[DistillPrompt, Prompt]], held: set[str]
    ) -> Generator[TrainingExample, None, None]:
        """Yield the answers as they come; at the first error all lanes stop."""
        todo: queue.SimpleQueue[tuple[DistillPrompt, Prompt]] = queue.SimpleQueue()
        for one in left:
            todo.put(one)
        came: queue.SimpleQueue[TrainingExample | None] = queue.SimpleQueue()
        with self._lanes(min(self._sessions, len(left))) as lanes:
            pool = ThreadPoolExecutor(max(1, len(lanes)))
            running = [pool.submit(self._work, lane, todo, came, held) for lane in lanes]
            try:
                for _ in running:  # each lane tells its end by None
                    while (answered := came.get()) is not None:
                        yield answered
                    _raise_failed(running)
            finally:
                _drain(todo)
                for lane in lanes:
                    lane.interrupt()
                pool.shutdown()
        _raise_failed(running)

    @contextmanager
    def _lanes(self, count: int) -> Iterator[list[Device]]:
        with ExitStack() as stack:
            others = [stack.enter_context(self._device.beside()) for _ in range(count - 1)]
            yield [self._device, *others][:count]

    def _work(
        self,
        lane: Device,
        todo: queue.SimpleQueue[tuple[DistillPrompt, Prompt]],
        came: queue.SimpleQueue[TrainingExample | None],
        held: set[str],
    ) -> None:
        """Answer one prompt after the other."""
        try:
            while True:
                try:
                    asked, prompt = todo.get_nowait()
                except queue.Empty:
                    return
                came.put(self._answer(lane, asked, prompt, held=asked.key in held))
        finally:
            came.put(None)

    def _answer(
        self, lane: Device, one: DistillPrompt, prompt: Prompt, *, held: bool
    ) -> TrainingExample:
        options = self._options
        found = lane.generate(
            prompt,
            protocol=STREAM,
            max_tokens=options.tokens,
            temperature=options.temperature,
            seed=(options.seed + int(one.key[:12], 16)) % 2**63,
            logprobs=options.top,
        )
        row = row_of(lane.pair, prompt, found.tokens, found.logprobs)
        return TrainingExample(
            key=one.key,
            prompting=one,
            held=held,
            told=prompt.ids.tolist(),
            answer=list(found.tokens),
            finish_reason=found.finish_reason,
            row=row,
        )


def _raise_failed(running: Sequence[Future[None]]) -> None:
    done, _ = wait(running, timeout=0, return_when=FIRST_EXCEPTION)
    for one in done:
        one.result()


def _drain(todo: queue.SimpleQueue[tuple[DistillPrompt, Prompt]]) -> None:
    while not todo.empty():
        todo.get_nowait()
