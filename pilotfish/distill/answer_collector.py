"""Collect the target's answers in several sessions at once, and store each when it arrives."""

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
from pilotfish.distill.training_rows import make_row
from pilotfish.wire.protocols import STREAM

_OWN_TOKENS = 2  # most drafter's tokens for one target's token, in ordinary text

Progress = Callable[[int, int], None]
"""Called as progress(answers done, answers in all)."""


class AnswerCollector:
    """Asks the target through a device and its lanes, one for each session."""

    def __init__(self, device: Device, options: AnswerOptions, sessions: int) -> None:
        self._device, self._options, self._sessions = device, options, sessions

    def collect(
        self, selection: Selection, examples: TrainingExampleFile, progress: Progress
    ) -> tuple[list[TrainingExample], int]:
        """Collect the missing answers; return all answers, and the number of prompts too long.

        Raises the error that ended it, such as a lost edge or a full disk; the answers collected
        before it are stored.
        """
        held_keys = {selected.key for selected in selection.held}
        prompts_by_key = {
            selected.key: selected for selected in [*selection.held, *selection.learnt]
        }
        # ordered by hash, so that the first answers cover all kinds
        ordered = [prompts_by_key[key] for key in sorted(prompts_by_key)]
        fitting = [
            (selected, prompt)
            for selected in ordered
            if (prompt := self._make_fitting_prompt(selected)) is not None
        ]
        self._expect_any(fitting)
        remaining = [
            (selected, prompt)
            for selected, prompt in fitting
            if selected.key not in examples.answers
        ]
        done = len(fitting) - len(remaining)
        progress(done, len(fitting))
        try:
            with closing(
                self._answers(remaining, held_keys)
            ) as answers:  # also after a failed write
                for example in answers:
                    examples.add(example)
                    done += 1
                    progress(done, len(fitting))
        except AWAY as error:
            raise EdgeLostError(
                f"{error} {done} of {len(fitting)} answers are kept in {examples.path}: give the "
                "same command again to go on."
            ) from error
        collected = [examples.answers[selected.key] for selected, _ in fitting]
        # some have more of the drafter's tokens than estimated
        readable = [
            example for example in collected if len(example.row.ids) <= self._device.context
        ]
        self._expect_any(readable)
        return readable, len(ordered) - len(readable)

    def _expect_any(self, fitting: Sequence[object]) -> None:
        if not fitting:
            raise UnsupportedError(
                f"The drafter or the edge has {self._device.context} tokens of context, and no "
                f"prompt fits into them with an answer of {self._options.tokens}: lower --tokens."
            )

    def _make_fitting_prompt(self, selected: DistillPrompt) -> Prompt | None:
        """Tokenise the prompt; None if prompt and answer may exceed the context."""
        prompt = self._device.pair.prompt(selected.content)
        most = self._options.tokens
        draft_tokens = most if self._device.pair.trivial else _OWN_TOKENS * most
        longest = max(len(prompt.ids) + most, len(prompt.draft_ids) + draft_tokens)
        return prompt if longest <= self._device.context else None

    def _answers(
        self, remaining: Sequence[tuple[DistillPrompt, Prompt]], held: set[str]
    ) -> Generator[TrainingExample, None, None]:
        """Yield the answers as they arrive; stop all lanes at the first error."""
        todo: queue.SimpleQueue[tuple[DistillPrompt, Prompt]] = queue.SimpleQueue()
        for entry in remaining:
            todo.put(entry)
        arrived: queue.SimpleQueue[TrainingExample | None] = queue.SimpleQueue()
        with self._lanes(min(self._sessions, len(remaining))) as lanes:
            pool = ThreadPoolExecutor(max(1, len(lanes)))
            running = [pool.submit(self._work, lane, todo, arrived, held) for lane in lanes]
            try:
                for _ in running:  # each lane ends with None
                    while (example := arrived.get()) is not None:
                        yield example
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
        arrived: queue.SimpleQueue[TrainingExample | None],
        held: set[str],
    ) -> None:
        """Answer prompts of the queue until it is empty."""
        try:
            while True:
                try:
                    selected, prompt = todo.get_nowait()
                except queue.Empty:
                    return
                arrived.put(self._answer(lane, selected, prompt, held=selected.key in held))
        finally:
            arrived.put(None)

    def _answer(
        self, lane: Device, selected: DistillPrompt, prompt: Prompt, *, held: bool
    ) -> TrainingExample:
        options = self._options
        generation = lane.generate(
            prompt,
            protocol=STREAM,
            max_tokens=options.tokens,
            temperature=options.temperature,
            seed=(options.seed + int(selected.key[:12], 16)) % 2**63,
            logprobs=options.top,
        )
        row = make_row(lane.pair, prompt, generation.tokens, generation.logprobs)
        return TrainingExample(
            key=selected.key,
            prompting=selected,
            held=held,
            prompt_ids=prompt.ids.tolist(),
            answer=list(generation.tokens),
            finish_reason=generation.finish_reason,
            row=row,
        )


def _raise_failed(running: Sequence[Future[None]]) -> None:
    finished, _ = wait(running, timeout=0, return_when=FIRST_EXCEPTION)
    for future in finished:
        future.result()


def _drain(todo: queue.SimpleQueue[tuple[DistillPrompt, Prompt]]) -> None:
    while not todo.empty():
        todo.get_nowait()
