"""Where two answers part that should be equal, and what the target says there.

`stream` reads its answer token by token, a round's verdict comes from one pass over the window, and
passes of different shape differ in their logits: by 1e-5 in fp32, by more where activations are
quantised. So both ways are replayed on a decoder of the target. "gap" is how far the token of
`stream` is ahead of the other one (in logits, with the position's noise if one was sampled) when
tokens are read one by one, "gap_window" when they are read as the rounds did.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _pair_runs import ALONE, Line, Run
from numpy.typing import NDArray

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.randomness import Purpose, exponentials, noise
from tests.support.prefill import prefill

TIE = 1e-3  # in logits
Logits = NDArray[np.float32]


class Replays:
    """A decoder that reads prompts and answers again."""

    def __init__(self, target: Path) -> None:
        self._decoder = Decoder(target)

    def read(self, prompt: Sequence[int], answer: Sequence[int], widths: Sequence[int]) -> Logits:
        """The logits [n, V] that the answer's n tokens were chosen by.

        widths: how many of them each pass gave logits for, the first one's being the prompt's last
        token's; their sum is n.
        """
        text = np.array([*prompt, *answer], dtype=np.int64)
        self._decoder.rollback(0, 0)
        prefill(self._decoder, 0, text[: len(prompt) - 1], rows=0)
        rows, at = [], len(prompt) - 1
        for width in widths:
            passed = Pass(slot=0, tokens=text[at : at + width])
            rows.append(self._decoder.forward([passed])[0].logits.copy())
            at += width
        return np.concatenate(rows)

    def read_as(self, line: Line, run: Run, at: int) -> Logits:
        """The logits [V] of one position of a run's answer, by passes as wide as its were."""
        reply = line["runs"][run.name]
        text = np.array([*line["prompt_ids"], *reply["tokens"]], dtype=np.int64)
        prompt, start = len(line["prompt_ids"]), 0
        self._decoder.rollback(0, 0)
        prefill(self._decoder, 0, text[: prompt - 1], rows=0)
        for window, committed in zip(reply["window"], reply["committed"], strict=True):
            # what was drafted and rejected is not known any more, nor does it matter to the others
            passed = np.zeros(1 + window, dtype=np.int64)
            known = text[prompt + start - 1 :][: 1 + window]
            passed[: len(known)] = known
            logits = self._decoder.forward([Pass(slot=0, tokens=passed)])[0].logits
            if at < start + committed:
                copy: Logits = logits[at - start].copy()
                return copy
            start += committed
            self._decoder.rollback(0, prompt - 1 + start)
        raise ValueError(f"{run.name} said nothing at {at}")


def parted(got: Sequence[int], wanted: Sequence[int]) -> int | None:
    """The first position at which two answers differ, if there is one."""
    if got == wanted:
        return None
    differing = (at for at, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
    return next(differing, min(len(got), len(wanted)))


def partings(line: Line, every: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """The runs of a prompt that part from `stream`, and where."""
    for run in every:
        wanted = line["runs"][ALONE[run.temperature]]["tokens"]
        at = parted(line["runs"][run.name]["tokens"], wanted)
        if at is not None:
            yield run, at


def examined(replays: Replays, line: Line, run: Run, at: int) -> dict[str, Any]:
    """What happened where a run parted from `stream`.

    verdict: "tie" if the two tokens are as good as equal, "shape" if either way of reading gives
    the token of its run, else "differ".
    """
    alone = line["runs"][ALONE[run.temperature]]["tokens"]
    reply = line["runs"][run.name]["tokens"]
    results: dict[str, Any] = {"run": run.name, "at": at, "verdict": "differ"}
    if at >= min(len(alone), len(reply)):
        return results  # one ends where the other goes on: there are no two tokens to compare
    prompt, wanted, got = line["prompt_ids"], alone[at], reply[at]
    single = replays.read(prompt, alone[: at + 1], [1] * (at + 1))[at]
    windowed = replays.read_as(line, run, at)
    best = np.argsort(single)[:-3:-1]
    position = len(prompt) + at
    gaps, agrees = [], []
    for logits, token, other in ((single, wanted, got), (windowed, got, wanted)):
        scores = _scores(logits, run.temperature, line["seed"], position)
        gaps.append(float(scores[wanted] - scores[got]))
        agrees.append(bool(scores[token] >= scores[other]))
    if abs(gaps[0]) < TIE:
        results["verdict"] = "tie"
    elif all(agrees):
        results["verdict"] = "shape"
    return results | {
        "wanted": wanted,
        "got": got,
        "gap": gaps[0],
        "gap_window": gaps[1],
        "top": [[int(token), float(single[token])] for token in best],
        "top_window": [[int(token), float(windowed[token])] for token in best],
    }


def _scores(logits: Logits, temperature: float, seed: int, position: int) -> NDArray[np.float64]:
    """What the argmax is taken of, [V]."""
    scores = logits.astype(np.float64)
    if temperature:
        scores /= temperature
        scores -= np.log(exponentials(noise(len(scores), seed, Purpose.TARGET, position)))
    return scores


def shapes(replays: Replays, line: Line, width: int) -> dict[str, Any]:
    """How much a pass's width changes the lead of the best token, along the answer at T=0.

    leads: of the best token over the second best, read one by one, in logits. changes: what is
    added to each when ``width`` tokens are read at once.
    """
    answer = line["runs"][ALONE[0.0]]["tokens"]
    count = len(answer) // width * width
    single = replays.read(line["prompt_ids"], answer[:count], [1] * count)
    wide = replays.read(line["prompt_ids"], answer[:count], [width] * (count // width))
    # [count, 2]
    best = np.argsort(single, axis=1)[:, :-3:-1]
    leads = _leads(single, best)
    return {
        "width": width,
        "leads": leads.tolist(),
        "changes": (_leads(wide, best) - leads).tolist(),
    }


def _leads(logits: Logits, best: NDArray[np.int64]) -> NDArray[np.float64]:
    values = np.take_along_axis(logits, best, axis=1).astype(np.float64)
    leads: NDArray[np.float64] = values[:, 0] - values[:, 1]
    return leads
