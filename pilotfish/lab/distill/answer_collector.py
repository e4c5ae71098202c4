"""Collect the target's answers over several sessions in parallel; store each on arrival."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager

from pilotfish.base.errors import EdgeLostError, UnsupportedError
from pilotfish.bridge import Prompt
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.link.retry import AWAY
from pilotfish.lab.distill.answers import TrainingExample, TrainingExampleFile
from pilotfish.lab.distill.distill_settings import AnswerOptions
from pilotfish.lab.distill.prompt_selection import DistillPrompt, Selection
from pilotfish.lab.distill.training_rows import make_row
from pilotfish.lab.pairs import most_tokens
from pilotfish.wire.protocols import STREAM

Progress = Callable[[int, int], None]
"""A callback, called as progress(answers done, number of all answers)."""


class AnswerCollector:
    """Collects the target's answers through a device; the device has a lane for each session."""

    def __init__(self, device: Device, options: AnswerOptions, sessions: int) -> None:
        self._device, self._options, self._sessions = device, options, sessions

    def collect(
        self, selection: Selection, examples: TrainingExampleFile, progress: Progress
    ) -> tuple[list[TrainingExample], int]:
        """Collect the missing answers; return all answers, and the number of too long prompts.

        An error ends the collection and is raised: the edge is lost, or the disk is full. The
        answers that arrived before the error are stored.
        """
        held_keys = {selected.key for selected in selection.held}
        prompts_by_key = {
            selected.key: selected for selected in [*selection.held, *selection.learnt]
        }
        # order by hash, so that the first answers cover all kinds of prompts
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
            ) as answers:  # closes the generator after a failed write, too
                for example in answers:
                    examples.add(example)
                    done += 1
                    progress(done, len(fitting))
        except AWAY as error:
            raise EdgeLostError(
                f"{error} {done} of {len(fitting)} answers are kept in {examples.path}: give "
                "the same command again to continue."
            ) from error
        collected = [examples.answers[selected.key] for selected, _ in fitting]
        # skip answers that have more drafter tokens than the drafter reads
        readable = [
            example for example in collected if len(example.row.ids) <= self._device.context
        ]
        self._expect_any(readable)
        return readable, len(ordered) - len(readable)

    def _expect_any(self, fitting: Sequence[object]) -> None:
        if not fitting:
            raise UnsupportedError(
                f"The context of drafter or edge is {self._device.context} tokens, and no "
                f"prompt fits into it together with an answer of {self._options.tokens} "
                "tokens: lower --tokens."
            )

    def _make_fitting_prompt(self, selected: DistillPrompt) -> Prompt | None:
        """Tokenise the prompt; return None if prompt and answer may exceed the context."""
        prompt = self._device.pair.prompt(selected.content)
        longest = most_tokens(prompt, self._device.pair, self._options.tokens)
        return prompt if longest <= self._device.context else None

    def _answers(
        self, remaining: Sequence[tuple[DistillPrompt, Prompt]], held: set[str]
    ) -> Generator[TrainingExample, None, None]:
        """Yield each answer when it arrives; stop all lanes at the first error."""
        todo: queue.SimpleQueue[tuple[DistillPrompt, Prompt]] = queue.SimpleQueue()
        for entry in remaining:
            todo.put(entry)
        arrived: queue.SimpleQueue[TrainingExample | None] = queue.SimpleQueue()
        with self._lanes(min(self._sessions, len(remaining))) as lanes:
            pool = ThreadPoolExecutor(max(1, len(lanes)))
            running = [pool.submit(self._work, lane, todo, arrived, held) for lane in lanes]
            try:
                for _ in running:  # each lane puts None into the queue when it ends
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
        """Generate answers to the prompts in ``todo`` until it is empty; put them in ``arrived``.

        held: keys of the prompts that are held out of training.
        """
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
