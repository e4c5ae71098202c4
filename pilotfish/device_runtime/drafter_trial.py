"""Predict the speed of several drafters with one target, from measurements.

In:  artifacts of one vocabulary, prompts, the link's RTT. Out: a `DrafterTrial` per drafter.

The target generates answers to the prompts alone, at temperature 1, with each prompt's index as
seed. p is the target's distribution of the next token, q the drafter's. αᵢ is the mean of β = 1 −
TV(p, q) along these answers for drafts at place i of a pass: the share of draft tokens that an
optimal rule accepts (tslt, equation 15). Only a drafter with a mask token has more places than one.
The passes of all models are timed in turns, after the tokens of one answer. The lower quartile of
each counts: other work on the machine affects it least. A round with a window of L tokens commits N
tokens in T seconds (tslt, equations 5 and 8; `speculation.pass_drafts` with masks):

    tokens/s = N / T,    N = Σ_{c=0…L} Π_{d<c} α(d),    T = T_draft(L) + RTT + T_verify(L + 1)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PairMismatchError
from pilotfish.bridge import TrivialBridge
from pilotfish.device_runtime.device import Device
from pilotfish.drafting.model import SharedModel
from pilotfish.engines.artifact import Artifact, check_head
from pilotfish.engines.engine import Engine, Work, open_engine
from pilotfish.engines.pass_times import time_interleaved
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.pass_drafts import window_passes, window_tokens_per_s
from pilotfish.speculation.theory import beta
from pilotfish.wire.protocols import LOCAL

Progress = Callable[[str, int, "int | None"], None]

TOKENS = 48  # tokens of each answer
LONGEST = 16  # draft tokens in the longest window
SIZES = (1, 2, 3, 5, 9, LONGEST + 1)  # numbers of tokens in the timed target passes
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class DrafterTrial:
    """The predicted speed of a drafter with a target.

    acceptance: α at temperature 1, of the drafts of the window. agreement: the same at temperature
    0, where a draft is right if both ends have the same most probable token. positions: number of
    compared tokens. draft_s: seconds per draft of the window. window: the window with the most
    tokens_per_s. passes: number of drafts of each of its passes. streamed_per_s: tokens/s of the
    target alone.
    """

    acceptance: float
    agreement: float
    positions: int
    draft_s: float
    window: int
    passes: Sequence[int]
    tokens_per_s: float
    streamed_per_s: float


def try_drafters(
    drafters: Mapping[str, Artifact],
    target: Artifact,
    prompts: Sequence[str],
    *,
    rtt_s: float,
    target_s: float | None,
    progress: Progress,
) -> dict[str, DrafterTrial]:
    """Try each drafter; returns the trials by name.

    All models are in memory at once. target_s: seconds of any pass of the target; None: measure.

    Raises:
        PairMismatchError: for a drafter with another vocabulary than the target's.
    """
    check_head(target)
    for drafter in drafters.values():
        _check_vocabulary(drafter, target)
    answers = _generate_answers(target, prompts, progress)
    reader = open_engine(target)
    models = {
        name: SharedModel(open_engine(drafter, drafts=True)) for name, drafter in drafters.items()
    }
    counts = {name: _PlaceCounts(model.drafts_per_pass) for name, model in models.items()}
    for done, (text, rows) in enumerate(answers):
        progress("comparing distributions", done, len(answers))
        p = probabilities(_logits(reader, text, rows), SAMPLING)
        for name, model in models.items():
            counts[name].read(model, drafters[name], text, p)
    progress("comparing distributions", len(answers), len(answers))
    verified = [] if target_s is not None else [(reader, size) for size in SIZES]
    drafted = [(model.engine, width) for model in models.values() for width in _widths(model)]
    seconds = _time_passes([*drafted, *verified], answers[0][0], progress)
    verify_s = seconds[len(drafted) :] if target_s is None else [target_s] * len(SIZES)
    trials = {}
    for name, model in models.items():
        widths = _widths(model)
        pass_times = dict(zip(widths, seconds, strict=False))
        del seconds[: len(widths)]
        acceptance, agreement = counts[name].means()
        best = fastest_window(acceptance, pass_times, verify_s, rtt_s)
        trials[name] = DrafterTrial(
            _mean_acceptance(acceptance, best.passes),
            _mean_acceptance(agreement, best.passes),
            counts[name].positions,
            best.draft_s,
            sum(best.passes),
            best.passes,
            best.tokens_per_s,
            streamed_per_s=1.0 / verify_s[0],
        )
    return trials


class Window(NamedTuple):
    """A window's passes and its speed.

    passes: number of drafts of each pass. draft_s: seconds per draft.
    """

    passes: list[int]
    draft_s: float
    tokens_per_s: float


def fastest_window(
    acceptance: Sequence[float],
    pass_times: Mapping[int, float],
    verify_s: Sequence[float],
    rtt_s: float,
) -> Window:
    """Return the window with the most tokens/s.

    acceptance: α by place in a pass; their number is the upper limit of a pass's drafts.
    pass_times: seconds of the drafter's passes by number of tokens, ascending. verify_s: seconds of
    the target's passes over `SIZES` tokens.
    """
    windows = []
    for drafts in range(1, LONGEST + 1):
        waiting_s = rtt_s + float(np.interp(1 + drafts, SIZES, verify_s))
        several = len(acceptance) > 1
        for single in range(1 + drafts) if several else (drafts,):
            passes = window_passes(single, drafts, len(acceptance))
            rate = window_tokens_per_s(acceptance, pass_times, passes, waiting_s=waiting_s)
            tokens = 1.0 + sum(_survival(acceptance, passes))
            windows.append(Window(passes, (tokens / rate - waiting_s) / drafts, rate))
    return max(windows, key=lambda window: window.tokens_per_s)


def _survival(acceptance: Sequence[float], passes: Sequence[int]) -> list[float]:
    """Return for each draft of a window the probability that all up to it are accepted."""
    places = [alpha for drafts in passes for alpha in acceptance[:drafts]]
    survival: list[float] = np.cumprod(places).tolist()
    return survival


def _mean_acceptance(acceptance: Sequence[float], passes: Sequence[int]) -> float:
    """Return the share of accepted drafts among those whose earlier drafts were accepted."""
    survival = _survival(acceptance, passes)
    return sum(survival) / (1.0 + sum(survival[:-1]))


class _PlaceCounts:
    """Sums of β and of equal choices by the draft's place in a pass.

    positions: number of compared tokens.
    """

    def __init__(self, places: int) -> None:
        self._sums = np.zeros((places, 3))  # β, equal choices, compared drafts
        self.positions = 0

    def read(
        self, model: SharedModel, drafter: Artifact, text: NDArray[np.int64], p: Floats
    ) -> None:
        """Read a text [n], whose last tokens the target predicts by p [rows, V]."""
        rows, places = len(p), len(self._sums)
        self.positions += rows
        bridge = TrivialBridge(drafter.manifest.vocab_size, drafter.head_tokens)
        if places == 1:
            q = probabilities(bridge.project(_logits(model.engine, text, rows)), SAMPLING)
            self._add(0, p, q)
            return
        for at in range(rows):  # a pass for each position
            some = min(places, rows - at)
            masked = model.masked(text[: len(text) - rows + 1 + at], some)
            q = probabilities(bridge.project(_logits(model.engine, masked, some)), SAMPLING)
            for place in range(some):
                self._add(place, p[at + place][None], q[place][None])

    def _add(self, place: int, p: Floats, q: Floats) -> None:
        same = np.count_nonzero(p.argmax(axis=1) == q.argmax(axis=1))
        self._sums[place] += float(beta(p, q).sum()), same, len(p)

    def means(self) -> tuple[list[float], list[float]]:
        """Return the means of β and of equal choices by place, for places that have drafts."""
        compared = self._sums[self._sums[:, 2] > 0]
        acceptance, agreement = (compared[:, :2] / compared[:, 2:]).T.tolist()
        return acceptance, agreement


def _widths(model: SharedModel) -> list[int]:
    """List the widths (tokens) of the drafter's timed passes; see `speculation.pass_drafts`."""
    most = model.drafts_per_pass
    return sorted({1, *(width for width in (2, 4) if width < most), most, 2 * most - 1})


def _check_vocabulary(drafter: Artifact, target: Artifact) -> None:
    draft_manifest, target_manifest = drafter.manifest, target.manifest
    if draft_manifest.tokenizer_fingerprint != target_manifest.tokenizer_fingerprint:
        raise PairMismatchError(
            f"{target_manifest.model} has another vocabulary than {draft_manifest.model}, but the "
            "comparison needs answers in one vocabulary: name a target with the same vocabulary, "
            "or give the duration of the target's passes (--target-ms)."
        )


def _generate_answers(
    target: Artifact, prompts: Sequence[str], progress: Progress
) -> list[tuple[NDArray[np.int64], int]]:
    """Return pairs: a prompt and its answer without the last token, i64 [n]; answer's length."""
    answers = []
    with Device(target.path) as author:
        for seed, prompt in enumerate(prompts):
            progress("the target answers", seed, len(prompts))
            ids = author.prompt(prompt).ids.astype(np.int64)
            answer = author.generate(
                prompt, protocol=LOCAL, temperature=1.0, seed=seed, max_tokens=TOKENS
            ).tokens
            text = np.concatenate([ids, np.array(answer[:-1], dtype=np.int64)])
            answers.append((text, len(answer)))
    progress("the target answers", len(prompts), len(prompts))
    return answers


def _logits(engine: Engine, text: NDArray[np.integer[Any]], rows: int) -> NDArray[np.float32]:
    """Return the logits of a text's last tokens: [rows, V], or [rows, N] with a cut head."""
    return engine.run([Work(0, text, rows)])[0].logits


def _time_passes(
    passes_to_time: Sequence[tuple[Engine, int]], text: NDArray[np.int64], progress: Progress
) -> list[float]:
    """Time these passes (engine, number of tokens) in turns after a text; returns their seconds."""
    for engine in {id(engine): engine for engine, _ in passes_to_time}.values():
        engine.run([Work(0, text, rows=0)])
    longer = np.concatenate([text, np.resize(text, LONGEST + 1)])

    def timer(engine: Engine, size: int) -> Callable[[], float]:
        works = [Work(0, longer[: len(text) + size], size)]

        def timed() -> float:
            start = time.perf_counter()
            engine.run(works)
            return time.perf_counter() - start

        return timed

    return time_interleaved([timer(*timed_pass) for timed_pass in passes_to_time], progress)
