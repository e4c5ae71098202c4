"""A drafter without a model against `stream`, and beside a model: which texts does it pay for?

    python benchmarks/text.py [--draft DIR] [--target DIR] [--questions FILE] [--prompts N]
        [--tokens N] [--rtt MS …] [--json PATH] [--quick]

Each end has cores of its own, and one thread; between them an emulated link. Questions, chats, and
code and text that are to be repeated with changes, at temperature 0. On each prompt `stream`, and
`greedy` (window "auto") and `ahead` by the text, by the model, and by both, take turns. Texts
should be equal but for ties.

"alpha" is the share accepted of the drafts that were compared, "a round" tokens a round, or a pass
under `ahead`; "draft_ms" a token drafted; "ratio" tokens/s over `stream`'s on the same prompt, the
median over prompts, from the first token on. Earlier conversations are not used (``texts="off"``):
the ways would repeat each other's answers. Under `ahead` the edge's own hints count in "ratio".

The second table is the search alone, behind 100,000 tokens of this text and as many earlier ones.
"""

import sys
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _ahead_prompts import REPEATING, questions
from _common import (
    Rows,
    Steps,
    at_least,
    at_most,
    conclude,
    options,
    pair,
    pair_options,
    show,
    throwaway_keys,
)
from _pair_prompts import CHATS

from pilotfish import Device, EdgeServer
from pilotfish.base.cpus import pinned, split_cpus
from pilotfish.device_runtime.record import Generation
from pilotfish.device_runtime.texts.text_memory import OFF
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.speculation.corpus import MOST_TOKENS, Corpus
from pilotfish.speculation.recall import Recall

LONG = 100_000
COLUMNS = ("rtt_ms", "kind", "drafter", "protocol", "alpha", "a round", "draft_ms", "ratio", "same")


class Way(NamedTuple):
    """One way to answer. drafter: of which device."""

    drafter: str
    protocol: str

    @property
    def options(self) -> dict[str, Any]:
        """As `Device.generate` takes them."""
        window = {"window": "auto"} if self.protocol == "greedy" else {}
        return {"protocol": self.protocol, "temperature": 0.0, **window}


DRAFTERS = ("text", "model", "both")
WAYS = [
    Way("text", "stream"),
    *(Way(drafter, how) for drafter in DRAFTERS for how in ("greedy", "ahead")),
]


def figures(answer: Generation) -> dict[str, float]:
    """Of one answer."""
    runs = [item.run or (0, item.verified, item.accepted) for item in answer.rounds]
    compared, agreed = sum(run[1] for run in runs), sum(run[2] for run in runs)
    drafted = sum(item.nodes for item in answer.rounds)
    drafting_s = sum(item.timings.draft for item in answer.rounds)
    after = answer.total_s - answer.first_token_s
    return {
        "alpha": agreed / compared if compared else float("nan"),
        "a round": len(answer.tokens) / max(1, len(answer.rounds)),
        "draft_ms": 1e3 * drafting_s / drafted if drafted else float("nan"),
        "tokens_per_s": (len(answer.tokens) - len(answer.rounds[0].tokens)) / max(after, 1e-9),
    }


def measured(devices: dict[str, Device], items: Sequence[Any], tokens: int, steps: Steps) -> Rows:
    """The rows of one kind at one RTT."""
    results: dict[Way, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn, prompt in enumerate(items):
        steps.next(f"prompt {turn + 1}, all ways")
        at = turn % len(WAYS)
        answers = {
            way: devices[way.drafter].generate(prompt, max_tokens=tokens, **way.options)
            for way in (*WAYS[at:], *WAYS[:at])
        }
        plain = answers[WAYS[0]]
        for way, answer in answers.items():
            info = figures(answer)
            info["ratio"] = info["tokens_per_s"] / figures(plain)["tokens_per_s"]
            info["same"] = float(answer.tokens == plain.tokens)
            results[way].append(info)
    return [
        {
            "drafter": "none" if way.protocol == "stream" else way.drafter,
            "protocol": way.protocol,
            **{name: _median([item[name] for item in info]) for name in info[0] if name != "same"},
            "same": f"{sum(item['same'] for item in info):.0f}/{len(info)}",
        }
        for way, info in results.items()
    ]


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.median(known)) if known else float("nan")


def searches(tokens: int) -> Rows:
    """The search alone: microseconds of a drafted token, and what the earlier texts take."""
    random = np.random.default_rng(0)
    rows: Rows = []
    for kind in ("words", "copied"):

        def text(count: int) -> Any:
            return np.minimum(random.zipf(1.3, count), 49_000).astype(np.uint32)

        tracemalloc.start()
        corpus = Corpus()
        for _ in range(MOST_TOKENS // 10_000):
            corpus.add(text(10_000))
        held = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        corpus = Corpus()
        for _ in range(LONG // 1000):
            corpus.add(text(1000))
        recall = Recall()
        recall.set_corpus(corpus.snapshot())
        whole = text(LONG + tokens)
        if kind == "copied":
            whole[LONG:] = whole[1000 : 1000 + tokens]
        recall.update(whole[:LONG])
        each = []
        for end in range(LONG, LONG + tokens):
            path: list[int] = []
            begun = time.perf_counter()
            recall.update(whole[:end])
            while len(path) < 4 and (echo := recall.predict(path)) is not None:
                recall.acceptance(echo)
                path.append(echo.likeliest)
            each.append((time.perf_counter() - begun) * 1e6 / max(1, len(path)))
        rows.append({"text": kind, "us_a_draft": float(np.median(each)), "most_mib": held})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = options(__doc__ or "")
    pair_options(parser)
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="JSON lines, a question each"
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each kind (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer (%(default)s)")
    parser.add_argument("--rtt", type=float, nargs="+", default=[0.0, 50.0], metavar="MS")
    args = parser.parse_args(argv)
    if args.quick:
        args.prompts, args.tokens, args.rtt = 2, 32, [0.0]
    drafter, target = pair(args)
    result = searches(100 if args.quick else 500)
    show(args, "the search alone", ("text", "us_a_draft", "most_mib"), result)
    kinds = {
        "questions": questions(args.questions, args.prompts),
        "chats": list(CHATS[: args.prompts]),
        "repeat": [*REPEATING["edit"], *REPEATING["summary"]][: args.prompts],
    }
    steps = Steps(len(args.rtt) * sum(map(len, kinds.values())))
    theirs, ours = split_cpus()
    rows: Rows = []
    with ExitStack() as stack:
        folder = stack.enter_context(throwaway_keys())
        edge = stack.enter_context(EdgeServer(target, keys=folder, cores=theirs, threads=1))
        link = stack.enter_context(Emulator(edge.endpoint))
        stack.enter_context(pinned(ours))
        for rtt_ms in args.rtt:
            link.set(Conditions(rtt_s=rtt_ms * 1e-3))
            for kind, wanted in kinds.items():
                with ExitStack() as devices:
                    opened = {
                        name: devices.enter_context(
                            Device(
                                path,
                                link.endpoint,
                                folder,
                                threads=1,
                                draft_text=name == "both",
                                texts=None if name == "model" else OFF,
                            )
                        )
                        for name, path in (("text", "text"), ("model", drafter), ("both", drafter))
                    }
                    info = measured(opened, wanted, args.tokens, steps)
                rows += [{"rtt_ms": rtt_ms, "kind": kind, **row} for row in info]
    goals = [at_most(f"us a draft, {row['text']}", row["us_a_draft"], 50.0) for row in result]
    goals += [
        at_most("MiB of earlier texts, at most", max(row["most_mib"] for row in result), 64.0)
    ]
    goals += [
        at_least(f"repeat, text, {row['protocol']}, RTT {row['rtt_ms']:g}", row["ratio"], 1.0)
        for row in rows
        if row["kind"] == "repeat" and row["drafter"] == "text"
    ]
    return conclude(args, "text", COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
