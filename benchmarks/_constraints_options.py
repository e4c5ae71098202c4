"""CPU time and memory of a window's options but for a grammar; for `constraints.py` only."""

import time
import tracemalloc
from statistics import median

import numpy as np
from _common import Rows

from pilotfish.edge_runtime.reply_logprobs import Logprobs
from pilotfish.speculation.logits_options import (
    MOST_BIASED,
    LogitsOptions,
    LogitsProcessor,
    node_paths,
)
from pilotfish.wire.messages import MAX_LOGPROBS
from pilotfish.wire.protocols import Decision, Draft

V, DRAFTS, TEXTS = 151_665, 64, (2_000, 32_000, 131_000)
MIB = 2**20


def options_of(text: int, windows: int) -> Rows:
    """Time windows behind a text of so many tokens, all different, which each of them lengthens.

    512 biases, all penalties since the first token, and the most logprobs, of all rows of a window:
    a chain, and a tree of two at each node.
    """
    random = np.random.default_rng(0)
    shaping = LogitsOptions(
        logit_bias=dict.fromkeys(random.permutation(V)[:MOST_BIASED].tolist(), 1.5),
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    )
    logits = 3 * random.standard_normal((DRAFTS + 1, V), np.float32)
    trees = {"chain": None, "tree": np.arange(DRAFTS) // 2 - 1}
    rows: Rows = []
    for window, parents in trees.items():
        ids = random.permutation(V)[:text].astype(np.uint32)
        shaper, log, spent = LogitsProcessor(shaping, 0), Logprobs(MAX_LOGPROBS, 0), []
        for at in range(-1, windows):  # the first is traced, not timed
            drafts = random.integers(0, V, DRAFTS).astype(np.uint32)
            if at < 0:
                tracemalloc.start()
            begun_s = time.thread_time()
            shaper.process(logits, ids, node_paths(drafts.tolist(), parents))
            shaped_s = time.thread_time()
            log.record(Draft(drafts), logits, Decision(DRAFTS, 0))
            log.commit()
            spent.append((shaped_s - begun_s, time.thread_time() - shaped_s))
            if at < 0:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                spent.clear()
            ids = np.concatenate([ids, drafts])
        shape_s, logprobs_s = (median(each) for each in zip(*spent, strict=True))
        rows.append({
            "window": window, "text": text, "V": V, "shape_ms": 1e3 * shape_s,
            "logprobs_ms": 1e3 * logprobs_s, "window_ms": 1e3 * median(map(sum, spent)),
            "peak_mib": peak / MIB,
        })  # fmt: skip
    return rows
