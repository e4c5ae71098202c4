"""Predict the speed of several drafters with one target, from measurements.

In:  artifacts of one vocabulary, prompts, the link's RTT. Out: a `DrafterTrial` per drafter.

The target generates answers to the prompts alone, at temperature 1, with each prompt's index as
seed. p is the target's distribution of the next token, q the drafter's. α is the mean of β = 1 −
TV(p, q) along these answers: the share of draft tokens that an optimal rule accepts (tslt, equation
15). The passes of all models are timed in turns, after the tokens of one answer. The lower quartile
of each counts: other work on the machine affects it least. A round with a window of L tokens
commits N tokens in T seconds (tslt, equations 5 and 8):

    tokens/s = N / T,    N = (1 − α^{L+1}) / (1 − α),    T = L·T_draft + RTT + T_verify(L + 1)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PairMismatchError
from pilotfish.bridge import TrivialBridge
from pilotfish.device_runtime.device import Device
from pilotfish.engines.artifact import Artifact, check_head
from pilotfish.engines.engine import Engine, Work, open_engine
from pilotfish.engines.pass_times import time_interleaved
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.speeds import best_window
from pilotfish.speculation.theory import beta, tokens_per_round
from pilotfish.wire.protocols import LOCAL

Progress = Callable[[str, int, "int | None"], None]

TOKENS = 48  # tokens of each answer
LONGEST = 16  # draft tokens in the longest window
SIZES = (1, 2, 3, 5, 9, LONGEST + 1)  # numbers of tokens in the timed target passes
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class DrafterTrial:
    """The predicted speed of a drafter with a target.

    acceptance: α at temperature 1. agreement: α at temperature 0, the share of positions where both
    ends have the same most probable token. positions: number of compared tokens. draft_s: seconds
    of the drafter's pass over one token. window: the window with the most tokens_per_s.
    streamed_per_s: tokens/s of the target alone.
    """

    acceptance: float
    agreement: float
    positions: int
    draft_s: float
    window: int
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
    readers = {name: open_engine(drafter, drafts=True) for name, drafter in drafters.items()}
    bridges = {
        name: TrivialBridge(drafter.manifest.vocab_size, drafter.head_tokens)
        for name, drafter in drafters.items()
    }
    positions_by_name: dict[str, list[tuple[float, bool]]] = {name: [] for name in readers}
    for done, (text, rows) in enumerate(answers):
        progress("comparing distributions", done, len(answers))
        p = probabilities(_logits(reader, text, rows), SAMPLING)
        for name, engine in readers.items():
            logits = bridges[name].project(_logits(engine, text, rows))
            q = probabilities(logits, SAMPLING)
            same = p.argmax(axis=1) == q.argmax(axis=1)
            positions_by_name[name] += zip(beta(p, q).tolist(), same.tolist(), strict=True)
    progress("comparing distributions", len(answers), len(answers))
    verified = [] if target_s is not None else [(reader, size) for size in SIZES]
    drafted = [(engine, 1) for engine in readers.values()]
    seconds = _time_passes([*drafted, *verified], answers[0][0], progress)
    verify_s = seconds[len(drafted) :] if target_s is None else [target_s] * len(SIZES)
    trials = {}
    for (name, positions), draft_s in zip(positions_by_name.items(), seconds, strict=False):
        acceptance, agreement = np.mean(positions, axis=0).tolist()
        window, tokens_per_s = fastest_window(acceptance, draft_s, verify_s, rtt_s)
        trials[name] = DrafterTrial(
            acceptance,
            agreement,
            len(positions),
            draft_s,
            window,
            tokens_per_s,
            streamed_per_s=1.0 / verify_s[0],
        )
    return trials


def fastest_window(
    acceptance: float, draft_s: float, verify_s: Sequence[float], rtt_s: float
) -> tuple[int, float]:
    """Return the window with the most tokens/s, and its tokens/s.

    verify_s: seconds of the target's passes over `SIZES` tokens.
    """
    windows = range(1, LONGEST + 1)
    pass_s = [float(np.interp(1 + drafts, SIZES, verify_s)) for drafts in (0, *windows)]
    tokens = [tokens_per_round(acceptance, window) for window in windows]
    window, token_s = best_window(tokens, rtt_s=rtt_s, draft_s=draft_s, pass_s=pass_s)
    return window, 1.0 / token_s


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


def _logits(engine: Engine, text: NDArray[np.int64], rows: int) -> NDArray[np.float32]:
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
