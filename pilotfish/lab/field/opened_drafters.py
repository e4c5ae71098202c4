"""Open the drafters of a comparison, read the target's answers with them, and time them.

In:  names of drafters, the target's vocabulary, the target's answers. Out: each drafter's agreement
     with the answers, and its seconds per draft token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PromptTooLongError, UnsupportedError
from pilotfish.bridge import Pair, Prompt
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.drafting.window import Drafter
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.pass_times import time_interleaved
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab.agreement import GREEDY, Agreed, PassesInUse, agreement
from pilotfish.lab.field.target_answers import AnswerHeader, TargetAnswer
from pilotfish.lab.pairs import pair_vocabularies
from pilotfish.wire.protocols.ahead import draft_with_margin

Progress = Callable[[str, int, "int | None"], None]

_RUN = 8  # maximum number of consecutive drafts that are timed


@dataclass(kw_only=True)
class Contender:
    """An opened drafter and its pair with the target.

    name: the last parts of the drafter's path; as many parts as make the name unique. agreed:
    whether each token of an answer is drafted correctly, by prompt number, without prompts that
    exceed the drafter's context. passes: how many drafts a pass makes, learnt from the answers.
    """

    name: str
    source: DraftSource
    pair: Pair
    drafter: Drafter
    passes: PassesInUse = field(default_factory=lambda: PassesInUse(0.0))
    agreed: dict[int, Agreed] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of the artifact's files in bytes; 0 for a drafter without an artifact."""
        artifact = self.source.artifact
        if artifact is None:
            return 0
        return sum(file.stat().st_size for file in artifact.path.rglob("*") if file.is_file())

    def prompt(self, header: AnswerHeader, prompt: int) -> Prompt:
        """Tokenise one of the header's prompts with this pair. prompt: number of the prompt."""
        return self.pair.prompt(header.prompts[prompt])


def open_contenders(
    names: Sequence[str], target: Vocabulary, engine: EngineSettings
) -> list[Contender]:
    """Open drafters and sort them by size.

    All drafters stay in memory, so that their timing can alternate.
    """
    contenders = [
        _open(name, source, target, engine)
        for name, source in zip(_shorten_names(names), open_sources(names), strict=True)
    ]
    return sorted(contenders, key=lambda contender: contender.size_bytes)


def _open(name: str, source: DraftSource, target: Vocabulary, engine: EngineSettings) -> Contender:
    """Open one drafter for this target."""
    pair = pair_vocabularies(source, target)
    drafter = source.load(provider=engine.provider, threads=engine.threads, context=None, lanes=1)
    drafter.set_bridge(pair.bridge(), pair.fingerprint)
    return Contender(name=name, source=source, pair=pair, drafter=drafter)


def open_sources(names: Sequence[str]) -> list[DraftSource]:
    """Open the drafters' sources without loading a model."""
    return [DraftSource.open(name, text=False, text_location=None) for name in names]


def expect_pairs(names: Sequence[str], target: Vocabulary) -> None:
    """Raise `PairMismatchError` for a drafter that shares no token with the target."""
    for source in open_sources(names):
        pair_vocabularies(source, target)


def _shorten_names(names: Sequence[str]) -> list[str]:
    """Shorten paths to as many of their last parts as keep them different."""
    parts = [Path(name).resolve().parts for name in names]
    for count in range(1, max(map(len, parts))):
        short = ["/".join(part[-count:]) for part in parts]
        if len({*short}) == len(short):
            return short
    return list(names)


def read_answers(
    contenders: Sequence[Contender], header: AnswerHeader, answers: Sequence[TargetAnswer]
) -> Iterator[None]:
    """Read each answer with each drafter; add the result to the drafter's ``agreed``.

    Yields after each reading, for progress. If prompt and answer exceed a drafter's context, its
    ``agreed`` gets no entry for this prompt.
    """
    for answer in answers:
        for contender in contenders:
            prompt = contender.prompt(header, answer.prompt)
            contender.passes.target_s = answer.pass_s
            try:
                agreed = agreement(
                    contender.drafter,
                    prompt,
                    answer.tokens,
                    header.sampling(answer.prompt),
                    contender.passes,
                )
            except PromptTooLongError:
                pass
            else:
                contender.agreed[answer.prompt] = agreed
            yield
    if not any(contender.agreed for contender in contenders):
        raise UnsupportedError(
            "No drafter's context can hold any prompt together with its answer: lower --max-tokens."
        )


def measure_draft_s(
    contenders: Sequence[Contender],
    header: AnswerHeader,
    answers: Sequence[TargetAnswer],
    progress: Progress = lambda label, done, total: None,
) -> list[float]:
    """Measure each drafter's seconds per draft token; the drafters take turns.

    All drafters draft at the end of the same answer: among the answers that fit the context of all
    drafters, the one of median length. If no answer fits all drafters, each drafter uses the median
    of the answers that fit it. A drafter that no answer fits drafts after a single token.
    """
    tokens_by_prompt = {answer.prompt: answer.tokens for answer in answers}
    common = set.intersection(*(set(contender.agreed) for contender in contenders))
    timers = []
    for contender in contenders:
        readable = sorted(
            common or contender.agreed, key=lambda prompt: len(tokens_by_prompt[prompt])
        )
        if readable:
            middle = readable[len(readable) // 2]
            timers.append(
                _timer(contender, contender.prompt(header, middle), tokens_by_prompt[middle])
            )
        else:
            first = contender.prompt(header, answers[0].prompt).ids[:1]
            timers.append(_timer(contender, contender.pair.prompt(first.tolist()), []))
    return time_interleaved(timers, progress)


def _timer(contender: Contender, prompt: Prompt, answer: Sequence[int]) -> Callable[[], float]:
    """Return a function that makes the next pass and returns the seconds per draft.

    The drafts take the places of the answer's last tokens, so that they fit the context.
    """
    drafter, most = contender.drafter, contender.passes.drafts
    drafter.start(prompt)
    count = min(max(_RUN, 2 * most), max(1, len(answer)))
    length = len(prompt.ids) + max(0, len(answer) - count)
    committed = np.concatenate([prompt.ids, np.asarray(answer, np.uint32)])[:length]
    drafter.prefill(committed)
    drafts: list[int] = []

    def make_drafts() -> float:
        if len(drafts) + most > count:
            drafts.clear()
        draft_ids: NDArray[np.uint32] = np.array(drafts, dtype=np.uint32)
        begun_s = time.perf_counter()
        level = drafter.predict_next(committed, draft_ids, most)
        tokens = [0]
        if level is not None:
            tokens = [draft_with_margin(row, GREEDY, len(committed))[0] for row in level.logits]
        taken_s = time.perf_counter() - begun_s
        drafts.extend(tokens)
        return taken_s / len(tokens)

    return make_drafts
