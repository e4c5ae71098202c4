"""Predict the speed of several drafters with one target, from measurements.

In:  artifacts of one vocabulary, prompts, the link's RTT. Out: a `DrafterTrial` of each drafter.

The target answers the prompts alone, at temperature 1 with the prompt's number as seed. Along these
answers both ends' distributions are compared: α is the mean of β = 1 − TV(p, q), the share of draft
tokens that an optimal rule accepts (tslt (15)). Passes are timed in turns, behind one answer; their
lower quartiles are taken, which other work on the machine affects least. From these follow T and N
of a round for every window (tslt (5), (8)):

    tokens/s = N / T,    N = (1 − α^{L+1}) / (1 − α),    T = L·T_draft + RTT + T_verify(L + 1)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PairMismatchError
from pilotfish.device_runtime.bridge import TrivialBridge
from pilotfish.device_runtime.device import Device
from pilotfish.engines.artifact import Artifact, check_head
from pilotfish.engines.language_model import LanguageModel, open_model
from pilotfish.engines.pass_times import time_interleaved
from pilotfish.engines.passes import Pass
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.speeds import best_window
from pilotfish.speculation.theory import beta, tokens_per_round
from pilotfish.wire.protocols import LOCAL

Progress = Callable[[str, int, "int | None"], None]

TOKENS = 48  # of each answer
LONGEST = 16  # window
SIZES = (1, 2, 3, 5, 9, LONGEST + 1)  # tokens of a target's pass that is timed
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class DrafterTrial:
    """The predicted speed of a drafter with a target.

    acceptance: α at temperature 1; agreement: α at temperature 0, the share of positions where both
    ends' most probable token is the same. draft_s: a pass of one token. window: the one with the
    most tokens_per_s. streamed_per_s: of the target alone.
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

    All models are in memory at once. target_s: seconds of any pass of the target; None: measure
    them here.

    Raises:
        PairMismatchError: for a drafter of another vocabulary.
    """
    check_head(target)
    for drafter in drafters.values():
        _check_vocabulary(drafter, target)
    answers = _answers(target, prompts, progress)
    reader = open_model(target)
    readers = {name: open_model(drafter, drafts=True) for name, drafter in drafters.items()}
    bridges = {
        name: TrivialBridge(drafter.manifest.vocab_size, drafter.head_tokens)
        for name, drafter in drafters.items()
    }
    found: dict[str, list[tuple[float, bool]]] = {name: [] for name in readers}
    for done, (text, rows) in enumerate(answers):
        progress("comparing distributions", done, len(answers))
        p = probabilities(_logits(reader, text, rows), SAMPLING)
        for name, own in readers.items():
            logits = bridges[name].project(_logits(own, text, rows))
            q = probabilities(logits, SAMPLING)
            same = p.argmax(axis=1) == q.argmax(axis=1)
            found[name] += zip(beta(p, q).tolist(), same.tolist(), strict=True)
    progress("comparing distributions", len(answers), len(answers))
    verified = [] if target_s is not None else [(reader, size) for size in SIZES]
    drafted = [(own, 1) for own in readers.values()]
    seconds = _timed([*drafted, *verified], answers[0][0], progress)
    taken = seconds[len(drafted) :] if target_s is None else [target_s] * len(SIZES)
    trials = {}
    for (name, positions), draft_s in zip(found.items(), seconds, strict=False):
        acceptance, agreement = np.mean(positions, axis=0).tolist()
        window, tokens_per_s = fastest_window(acceptance, draft_s, taken, rtt_s)
        trials[name] = DrafterTrial(
            acceptance,
            agreement,
            len(positions),
            draft_s,
            window,
            tokens_per_s,
            streamed_per_s=1.0 / taken[0],
        )
    return trials


def fastest_window(
    acceptance: float, draft_s: float, verify_s: Sequence[float], rtt_s: float
) -> tuple[int, float]:
    """Find the window with the most tokens/s, and these; verify_s: of passes of `SIZES` tokens."""
    windows = range(1, LONGEST + 1)
    pass_s = [float(np.interp(1 + drafts, SIZES, verify_s)) for drafts in (0, *windows)]
    tokens = [tokens_per_round(acceptance, window) for window in windows]
    window, token_s = best_window(tokens, rtt_s=rtt_s, draft_s=draft_s, pass_s=pass_s)
    return window, 1.0 / token_s


def _check_vocabulary(drafter: Artifact, target: Artifact) -> None:
    own, other = drafter.manifest, target.manifest
    if own.tokenizer_fingerprint != other.tokenizer_fingerprint:
        raise PairMismatchError(
            f"{other.model} has another vocabulary than {own.model}, and precisions are compared "
            "along answers that both read alike: name a target of the same vocabulary, or say how "
            "long its passes take (--target-ms)."
        )


def _answers(
    target: Artifact, prompts: Sequence[str], progress: Progress
) -> list[tuple[NDArray[np.int64], int]]:
    """Return each prompt with its answer, i64 [n] less the last token, and the answer's length."""
    found = []
    with Device(target.path) as author:
        for seed, prompt in enumerate(prompts):
            progress("the target answers", seed, len(prompts))
            ids = author.prompt(prompt).ids.astype(np.int64)
            answer = author.generate(
                prompt, protocol=LOCAL, temperature=1.0, seed=seed, max_tokens=TOKENS
            ).tokens
            text = np.concatenate([ids, np.array(answer[:-1], dtype=np.int64)])
            found.append((text, len(answer)))
    progress("the target answers", len(prompts), len(prompts))
    return found


def _logits(decoder: LanguageModel, text: NDArray[np.int64], rows: int) -> NDArray[np.float32]:
    """Return the logits [rows, V], or [rows, N], after each of a text's last tokens."""
    decoder.rollback(0, 0)
    return decoder.prefill(0, text, rows=rows).logits


def _timed(
    wanted: Sequence[tuple[LanguageModel, int]], text: NDArray[np.int64], progress: Progress
) -> list[float]:
    """Time passes of these numbers of tokens behind a text, in turns; returns seconds."""
    for decoder in {id(decoder): decoder for decoder, _ in wanted}.values():
        decoder.rollback(0, 0)
        decoder.prefill(0, text, rows=0)
    more = np.resize(text, LONGEST + 1)

    def timer(decoder: LanguageModel, size: int) -> Callable[[], float]:
        passes = [Pass(0, more[:size])]

        def timed() -> float:
            start = time.perf_counter()
            decoder.forward(passes)
            taken_s = time.perf_counter() - start
            decoder.rollback(0, len(text))
            return taken_s

        return timed

    return time_interleaved([timer(*one) for one in wanted], progress)
