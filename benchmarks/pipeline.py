"""A target in stages over nodes: exactness, throughput by sessions, recovery of a stage.

    python benchmarks/pipeline.py [--json PATH] [--quick] [--draft DIR] [--target DIR]
                                  [--only exact | filling | recovery …]

`pilotfish field paper decentralized nodes --run` measures the time of a round.

Every stage is a process of one thread, CURVE between all, an emulated link before each node, so
that each of the N hops of a round (the one back included) takes t₁ longer.

**exact**: N = 1, 2, 4: the greatest difference of logits from the whole model's, over prompts and
answers read 5 tokens at a time, and whether answers are the same, token for token.

**filling**: 4 stages, 1 to 8 sessions, at t₁ = 0 and 10 times a stage's compute. Devices replay the
same recorded windows of 4, without drafting, each in a session of its own. "batch": windows a pass.

**recovery**: 4 stages; the middle one is killed between two rounds and started again at once.
Seconds from when it serves again to the end of the next round, against the length of the session;
and of the very first round, for which the prompt is read at both ends.

Goals: logits to 1e-4, texts identical; 4 sessions over 4 stages at least 2.5 times the tokens per
second of one where links dominate.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from typing import Any

import numpy as np
from _common import (
    PROMPTS,
    Goal,
    Rows,
    Steps,
    at_least,
    at_most,
    conclude,
    options,
    pair_options,
    show,
    throwaway_keys,
)
from _replay import Recording, Replay, record, replay
from _stages import Bench, Pipeline

from pilotfish import Device, EdgeServer
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.lab.field.papers.emulated_pipeline import PipelineEdge
from pilotfish.wire.keys import DeviceKeys
from tests.support.prefill import prefill

EXACT = (1, 2, 4)
FILLED = 4
SESSIONS = (1, 2, 4, 8)
LENGTHS = (100, 500, 1800)
HOPS_MS = (0, 20)
PARTS = ("exact", "filling", "recovery")
PROMPT = PROMPTS[3]
COLUMNS = {
    "exact": ("nodes", "logits_off", "answers", "identical"),
    "filling": ("t1_over_c", "t1_ms", "sessions", "tokens_per_s", "over_one", "batch"),
    "recovery": ("t1_ms", "length", "kills", "ready_s", "first_token_s"),
}


# exact


def exact(bench: Bench, steps: Steps) -> Rows:
    """Logits and answers against the whole model's."""
    prompts = PROMPTS[:2]
    wishes = [
        {"protocol": "greedy"},
        {"protocol": "coupled", "temperature": 1.0, "seed": 1},
        {"protocol": "tree", "temperature": 1.0, "seed": 2},
    ]
    tokens = 16 if bench.quick else 32

    def answers(device: Device) -> list[list[int]]:
        return [
            device.generate(prompt, max_tokens=tokens, **wish).tokens
            for prompt in prompts
            for wish in wishes
        ]

    steps.next("the whole model")
    with EdgeServer(bench.target, keys=bench.folder) as server, bench.device(server) as device:
        wanted = answers(device)
        texts = [device.prompt(prompt).ids for prompt in prompts]
    texts = [np.concatenate([text, reply]) for text, reply in zip(texts, wanted[::3], strict=True)]
    rows: Rows = []
    for stages in EXACT:
        steps.next(f"exactness, {stages} stages")
        with bench.pipeline(stages) as pipeline:
            off = logits_off(bench, pipeline, texts)
            with pipeline.edge() as edge, bench.device(edge) as device:
                got = answers(device)
        same = sum(item == other for item, other in zip(got, wanted, strict=True))
        rows.append({"nodes": stages, "logits_off": off, "answers": len(wanted), "identical": same})
    return rows


def logits_off(bench: Bench, pipeline: Pipeline, texts: Sequence[Any]) -> float:
    """The greatest difference of logits, over prompts and the windows of 5 tokens behind them."""
    whole, off, number = Decoder(bench.target, slots=1, context=512), 0.0, 0
    with pipeline.target() as target:
        for text in texts:
            whole.rollback(0, 0)
            for end in range(len(text) % 5 or 5, len(text) + 1, 5):
                base, number = max(0, end - 5), number + 1
                (answer,) = target.run(number, [Work(0, text[:end].astype(np.uint32), 1)])
                wanted = prefill(whole, 0, text[base:end].astype(np.int64), rows=1)
                off = max(off, float(np.abs(answer.logits - wanted.logits).max()))
    return off


# filling


def filling(bench: Bench, steps: Steps) -> Rows:
    """Tokens per second by the number of sessions."""
    steps.next("recording windows")
    recording = recorded(bench)
    rows: Rows = []
    with (
        bench.pipeline(FILLED, sessions=max(SESSIONS)) as pipeline,
        pipeline.edge() as edge,
        replaying(edge, recording, bench) as devices,
    ):
        for device in devices:  # all prompts are read
            replay([device], 2)
        before = edge.computed()
        replay(devices[:1], 12)
        stage_s = edge.computed().pass_s(before) / FILLED
        for ratio in (0, 10):
            pipeline.set_hop(ratio * stage_s)
            item = 0.0
            for count in SESSIONS:
                steps.next(f"{count} sessions, t₁ {ratio} times a stage's compute")
                before = edge.computed()
                metrics = replay(devices[:count], 8 if bench.quick else 16)
                rate = metrics.committed / metrics.seconds
                item = item or rate
                passes = edge.computed().passes - before.passes
                rows.append(
                    {
                        "t1_over_c": ratio,
                        "t1_ms": 1e3 * ratio * stage_s,
                        "sessions": count,
                        "tokens_per_s": rate,
                        "over_one": rate / item,
                        # each device's first and last windows are no part of `windows`
                        "batch": (sum(metrics.windows) + 2 * count) / passes,
                    }
                )
    return rows


def recorded(bench: Bench) -> Recording:
    """Greedy windows of 4."""
    with Device(bench.draft) as device:
        prompt = device.prompt(PROMPT).ids
    drafter = ModelDrafter.open(
        Artifact.open(bench.draft), provider="auto", threads=None, context=None
    )
    return record(drafter, Decoder(bench.target, context=512), prompt, 4, 40)


@contextmanager
def replaying(edge: PipelineEdge, recording: Recording, bench: Bench) -> Iterator[list[Replay]]:
    """A device for each session."""
    payload = DeviceKeys.load(bench.folder)
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(Replay(recording, edge.endpoint, payload)))
            for _ in range(max(SESSIONS))
        ]


# recovery


def recovery(bench: Bench, steps: Steps) -> Rows:
    """From when a killed stage serves again to the next token."""
    rows: Rows = []
    with (
        bench.pipeline(FILLED, context=2048) as pipeline,
        pipeline.edge() as edge,
        bench.device(edge) as device,
    ):
        text = device.prompt(" ".join(PROMPTS) * 20).ids
        for t1_ms in HOPS_MS:
            pipeline.set_hop(1e-3 * t1_ms)
            for length in LENGTHS:
                steps.next(f"recovery, a session of {length} tokens, t₁ = {t1_ms} ms")
                tried = (
                    killed(pipeline, device, [*map(int, text[at : at + length])])
                    for at in range(20)
                )
                results = [*islice(filter(None, tried), 1 if bench.quick else 2)]
                ready_s, first_s = np.median(results, axis=0)
                rows.append(
                    {
                        "t1_ms": t1_ms,
                        "length": length,
                        "kills": len(results),
                        "ready_s": float(ready_s),
                        "first_token_s": float(first_s),
                    }
                )
    return rows


def killed(pipeline: Pipeline, device: Device, prompt: list[int]) -> tuple[float, float] | None:
    """Seconds from when a killed stage serves again to the next round's end; and of the first.

    None for an answer that ends too soon.
    """
    begun_s = time.monotonic()
    pieces = device.stream(prompt, protocol="greedy", window=4, max_tokens=64)
    next(pieces)
    first_s = time.monotonic() - begun_s
    if next(pieces, None) is None:
        return None
    pipeline.kill(1)
    pipeline.restart(1)
    served_s = time.monotonic()
    ended = next(pieces, None) is None
    ready_s = time.monotonic() - served_s
    pieces.close()
    return None if ended else (ready_s, first_s)


def judge(options_value: dict[str, Rows]) -> list[Goal]:
    """The goals of the parts that were run."""
    goals: list[Goal] = []
    if rows := options_value.get("exact"):
        goals.append(at_most("logits off", max(row["logits_off"] for row in rows), 1e-4))
        parted = sum(row["answers"] - row["identical"] for row in rows)
        goals.append(at_most("answers that are not the whole model's", parted, 0))
    goals += [
        at_least("4 sessions over one, links dominate", row["over_one"], 2.5)
        for row in options_value.get("filling", [])
        if (row["sessions"], row["t1_over_c"]) == (4, 10)
    ]
    return goals


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    args = parser.parse_args()
    parts: dict[str, tuple[Callable[[Bench, Steps], Rows], int]] = {
        "exact": (exact, 1 + len(EXACT)),
        "filling": (filling, 1 + 2 * len(SESSIONS)),
        "recovery": (recovery, len(HOPS_MS) * len(LENGTHS)),
    }
    steps = Steps(sum(parts[part][1] for part in args.only))
    results: dict[str, Rows] = {}
    with throwaway_keys() as folder:
        bench = Bench(args, folder)
        for part in args.only:
            results[part] = parts[part][0](bench, steps)
    rows = [{"part": part, **row} for part in args.only for row in results[part]]
    *others, last = args.only
    for part in others:
        show(args, part, COLUMNS[part], results[part])
    return conclude(args, last, COLUMNS[last], rows, judge(results), table=results[last])


if __name__ == "__main__":
    sys.exit(main())
