"""What distributions cost on the wire, and what their quantisation costs in acceptance.

    python benchmarks/wire.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

q̂, the truncated distribution of `tslt` and `tree`, on recorded rows of the default pair (both
models' logits along the target's own texts at temperature 1), encoded in windows of eight: "bytes"
are those of a distribution in the frame as sent, "paper" the K·(16 + ⌈log₂V⌉) bits of the papers,
"bits" those of a token sent. "beta" is the acceptance of the drafter's untruncated q, "top_k" that
of the truncated one before quantisation, "shipped" that of q̂; "delta_1e3" is shipped − top_k in
thousandths, what quantisation alone changes, "se_1e3" its standard error. "codec_us" is the median
of encoding and decoding one window.

P̃, the distribution that `dssd` sends down, in b bits a row: "paper" is V·16 bits; "beta" is the
acceptance against p, "shipped" that against P̃.

Then real rounds of `coupled` and `dssd` over an edge process: the bytes of a round with a window of
eight, all frames and their headers.

"noise" is what making and racing the shared noise costs the edge in a round of `coupled`; its
ratio is to the target's pass.

Goals: q̂ of 64 tokens in at most 0.6 of the papers' bytes, with the acceptance changed by at most
0.002, encoded and decoded in 100 µs a window; a round of `coupled` at most 64 bytes up, and both
ways at most half of `dssd`'s, and its noise at most 5 % of the pass.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from _cases import Case, connected, take_turns
from _common import (
    PROMPTS,
    Goal,
    Rows,
    Steps,
    at_most,
    conclude,
    options,
    pair,
    pair_options,
)
from _recorded import Chat, record
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.randomness import Purpose, sample
from pilotfish.speculation.randomness import noise as random_words
from pilotfish.speculation.split import systematic
from pilotfish.speculation.theory import beta
from pilotfish.speculation.truncation import SparseRows, truncate
from pilotfish.wire.codecs.counts import decode_counts, encode_counts
from pilotfish.wire.codecs.sparse import decode_sparse, encode_sparse

WINDOW = 8
TRUNCATIONS = (
    *(Sampling(temperature=1.0, top_k=k) for k in (8, 16, 32, 64, 128, 320, 640, 1024)),
    *(Sampling(temperature=1.0, top_p=p) for p in (0.9, 0.95)),
)
BITS = (12, 14, 16, 18, 20)
COLUMNS = (
    *("what", "tokens", "bytes", "paper", "ratio", "bits"),
    *("beta", "top_k", "shipped", "delta_1e3", "se_1e3", "codec_us", "up", "up_most", "down"),
)


def truncated(sampling: Sampling, chats: Sequence[Chat], betas: Sequence[float]) -> dict[str, Any]:
    """The figures of q̂ under one truncation; ``betas`` are those of the untruncated q."""
    vocab = chats[0].target.shape[1]
    sizes, entries, codec_s, top_k, shipped = [], [], [], [], []
    for chat in chats:
        for first in range(0, len(chat), WINDOW):
            window = range(first, min(first + WINDOW, len(chat)))
            rows = SparseRows.join([truncate(chat.drafter[i], sampling) for i in window])
            sizes.append(len(encode_sparse(rows, vocab)))
            entries.append(len(rows.ids))
            if len(window) == WINDOW:
                codec_s += _seconds(partial(_rows_there_and_back, rows, vocab))
            for index in window:
                p, q_hat = chat.p(index), rows.row(index - first)
                q = probabilities(chat.drafter[index][None].astype(np.float64), sampling)[0]
                top_k.append(float(beta(p, q)))
                shipped.append(float(beta(p[q_hat.support], q_hat.probabilities())))
    tokens, size = sum(entries) / len(betas), sum(sizes) / len(betas)
    paper = (sampling.top_k or tokens) * (16 + math.ceil(math.log2(vocab))) / 8.0
    return {
        "what": f"q̂, K={sampling.top_k}" if sampling.top_k else f"q̂, ρ={sampling.top_p}",
        "tokens": tokens,
        "bytes": size,
        "paper": paper,
        "ratio": size / paper,
        "bits": 8.0 * size / tokens,
        **_acceptance(betas, top_k, shipped),
        "codec_us": float(np.median(codec_s)) * 1e6,
    }


def rounded(bits: int, chats: Sequence[Chat], betas: Sequence[float]) -> dict[str, Any]:
    """The figures of P̃ in so many bits."""
    vocab = chats[0].target.shape[1]
    offsets = np.random.default_rng(bits)
    sizes, tokens, codec_s, shipped = [], [], [], []
    for chat in chats:
        for index in range(len(chat)):
            counts = systematic(chat.p(index), bits, offsets.random())
            frame = encode_counts(counts, bits)
            codec_s += _seconds(partial(_counts_there_and_back, counts, vocab, bits))
            sizes.append(len(frame))
            tokens.append(np.count_nonzero(counts))
            shipped.append(float(beta(counts * 2.0**-bits, chat.q(index))))
    return {
        "what": f"P̃, {bits} bits",
        "tokens": float(np.mean(tokens)),
        "bytes": float(np.mean(sizes)),
        "paper": vocab * 2.0,
        "ratio": float(np.mean(sizes)) / (vocab * 2.0),
        "bits": 8.0 * float(np.sum(sizes) / np.sum(tokens)),
        **_acceptance(betas, betas, shipped),
        "codec_us": float(np.median(codec_s)) * 1e6,
    }


def rounds(case: Case) -> dict[str, Any]:
    """Bytes of real rounds of a case."""
    whole = [r for r in case.rounds if r.window == WINDOW]
    return {
        "what": f"rounds of {case.name}",
        "up": float(np.mean([r.uplink_bytes for r in whole])),
        "up_most": max(r.uplink_bytes for r in whole),
        "down": float(np.mean([r.downlink_bytes for r in whole])),
    }


def noise(case: Case, chats: Sequence[Chat]) -> dict[str, Any]:
    """What the shared noise costs the edge in a round of `coupled`, beside the pass and softmax.

    Noise is made and raced for the positions that are compared: those accepted and one more.
    """
    law = Sampling(temperature=1.0)
    seconds = [
        taken
        for position, row in enumerate(chats[0].target)
        for p in [probabilities(row[None], law)[0]]
        for taken in _seconds(partial(_race, p, position))
    ]
    choices = case.mean("accepted") + 1.0
    cost_s = choices * float(np.median(seconds))
    return {
        "what": "noise of a coupled round",
        "codec_us": cost_s * 1e6,
        "ratio": cost_s * 1e3 / case.stage_ms("verify"),
    }


def _race(p: NDArray[np.floating], position: int) -> None:
    sample(p, random_words(len(p), 1, Purpose.TARGET, position))


def _acceptance(
    betas: Sequence[float], before: Sequence[float], after: Sequence[float]
) -> dict[str, float]:
    """Means over the rows, and what the step from ``before`` to ``after`` changes."""
    change = np.subtract(after, before)
    return {
        "beta": float(np.mean(betas)),
        "top_k": float(np.mean(before)),
        "shipped": float(np.mean(after)),
        "delta_1e3": float(change.mean()) * 1e3,
        "se_1e3": float(change.std() / math.sqrt(len(change))) * 1e3,
    }


def _rows_there_and_back(rows: SparseRows, vocab: int) -> None:
    decode_sparse(encode_sparse(rows, vocab), len(rows), vocab)


def _counts_there_and_back(counts: NDArray[np.int64], vocab: int, bits: int) -> None:
    decode_counts(encode_counts(counts, bits), vocab, bits)


def _seconds(work: Callable[[], None]) -> list[float]:
    """Seconds of some repetitions, after one that warms the caches."""
    work()
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return taken


def judge(
    rows: Rows, coupled: dict[str, Any], dssd: dict[str, Any], noise: dict[str, Any]
) -> list[Goal]:
    """The goals."""
    k64 = next(row for row in rows if row["what"] == "q̂, K=64")
    both = (coupled["up"] + coupled["down"]) / (dssd["up"] + dssd["down"])
    return [
        at_most("K=64: bytes over the papers'", k64["ratio"], 0.6),
        at_most("K=64: acceptance changed by quantisation", abs(k64["delta_1e3"]) * 1e-3, 0.002),
        at_most("K=64: encoding and decoding a window of 8, in µs", k64["codec_us"], 100.0),
        at_most("coupled: bytes up in a round of 8", coupled["up_most"], 64),
        at_most("coupled: bytes up and down over dssd's", both, 0.5),
        at_most("coupled: noise of a round over its target pass", noise["ratio"], 0.05),
    ]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    drafter, target = pair(args)
    prompts, tokens = (3, 48) if args.quick else (8, 128)
    steps = Steps(len(PROMPTS) + len(TRUNCATIONS) + len(BITS) + prompts)
    chats = record(drafter, target, quick=args.quick, steps=steps)
    betas = [float(beta(chat.p(i), chat.q(i))) for chat in chats for i in range(len(chat))]
    rows: Rows = []
    for sampling in TRUNCATIONS:
        steps.next("encoding q̂")
        rows.append(truncated(sampling, chats, betas))
    for bits in BITS:
        steps.next("encoding P̃")
        rows.append(rounded(bits, chats, betas))
    cases = [Case(name, {"protocol": name, "window": WINDOW}) for name in ("coupled", "dssd")]
    with connected(drafter, target) as device:
        take_turns([(case, device) for case in cases], prompts=prompts, tokens=tokens, steps=steps)
    real = [*(rounds(case) for case in cases), noise(cases[0], chats)]
    goals = judge(rows, *real)
    return conclude(args, "distributions on the wire", COLUMNS, [*rows, *real], goals)


if __name__ == "__main__":
    sys.exit(main())
