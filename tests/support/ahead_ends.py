"""Both ends of `ahead` without sockets and clocks, played by a schedule of moves.

Service, scheduler, rules, chain of hints and budgets are those of the edge; `DraftAhead` and
`draft_with_margin` are those of the device. Models are tables (`tests.support.enumeration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import cache
from itertools import count

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.edge_runtime.scheduler import Scheduler
from pilotfish.edge_runtime.steps import record_works
from pilotfish.edge_runtime.targets.target import Scores, Target
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.contents import SlotContents
from pilotfish.engines.engine import Work
from pilotfish.engines.onnx_decoder import Output
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids, encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols import SamplingParams, choose
from pilotfish.wire.protocols.ahead import DraftAhead, draft_with_margin
from pilotfish.wire.transport import Envelope
from tests.support.enumeration import Model

VOCAB = 5
END = VOCAB - 1
CONTEXT = 40
ME, OTHER = b"m" * 16, b"o" * 16


@cache
def logits(model: Model, tokens: tuple[int, ...]):
    """Return logits f32 [V], which depend on the last two tokens."""
    return model.logits(tokens[-2:])


class TableTarget(Target):
    """A target whose logits are a table's, with slots like those of an engine."""

    context, digest = CONTEXT, "table"

    def __init__(self, model: Model) -> None:
        self._model = model
        self._contents = SlotContents(EdgeLimits().sessions, CONTEXT)
        self._done: list[Scores] = []

    def start(self, number: int, works: Sequence[Work]) -> None:
        outputs = []
        for work in works:
            tokens = tuple(work.tokens.tolist())
            assert len(tokens) <= CONTEXT
            assert work.parents is None, "hints are no trees"
            ends = range(len(tokens) - work.rows + 1, len(tokens) + 1)
            rows = [logits(self._model, tokens[:end]) for end in ends]
            outputs.append(Output(np.array(rows), np.zeros((len(rows), 1), np.float32)))
        record_works(works, self._contents)
        self._done.append(Scores(number, outputs))

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        return self._contents.find(slot, tokens, rows).tokens

    def clear(self, slot: int) -> None:
        self._contents.clear(slot)

    def collect_scores(self) -> Sequence[Scores]:
        done, self._done = self._done, []
        return done


class Edge:
    """The edge's half without socket and clock: every pass takes as long as its positions say."""

    def __init__(self, artifact: Artifact, model: Model, a_s: float, b_s: float) -> None:
        price = DraftCost({width: a_s + b_s * width for width in (1, 2, 4, 8, 16)})
        ticks = count(0, 1_000_000)
        self._target, self.metrics = TableTarget(model), EdgeMetrics()
        self._scheduler = Scheduler(self._target, lambda: next(ticks), self.metrics, price)
        self.sent: dict[bytes, list[tuple[m.Reply, list[int]]]] = {ME: [], OTHER: []}
        self._service = MessageHandler(
            artifact, self._target, EdgeLimits(messages_per_s=1e9), self._scheduler.submit,
            self._keep, draft_cost=price, metrics=self.metrics,
        )  # fmt: skip

    def _keep(self, client: bytes, reply: m.Reply, frames: Sequence[m.Buffer]) -> bool:
        assert isinstance(reply, m.Tokens), reply
        self.sent[client].append((reply, decode_ids(frames[0], VOCAB).tolist()))
        return True

    def take(self, client: bytes, message: m.DeviceMessage, *frames: m.Buffer) -> None:
        header = m.encode(message)
        size = len(header) + sum(map(len, frames))
        self._service.handle(Envelope(client, client, header, list(frames), size))

    def go(self) -> bool:
        """Make a pass; returns whether there was something to do."""
        batch = self._scheduler.next_batch()
        if batch is None:
            return False
        number, jobs = batch
        self._target.start(number, [job.work for job in jobs])
        for scores in self._target.collect_scores():
            for job in self._scheduler.finish_pass(scores):
                self._service.finish_job(job)
        return True

    def close(self) -> None:
        """Close the pipe of the edge's compiler of grammars."""
        self._service.compiler.close()


class Device:
    """The device's half, one step at a time. requests: the tokens of its answer."""

    def __init__(
        self,
        edge: Edge,
        model: Model,
        law: SamplingParams,
        prompt: Sequence[int],
        requests: int,
        prediction: Sequence[int] = (),
    ):
        self._edge, self._model, self._law = edge, model, law
        self._last = len(prompt) + requests - 1
        self.committed = CommittedTokens()
        self.committed.extend(prompt)
        self.answer: list[int] = []
        self.drafts_ahead = DraftAhead()
        self.drafts_ahead.start(self.committed.ids)
        self.hints: list[tuple[m.Hint, list[bytes]]] = []  # under way
        self._read = 0
        begin(edge, ME, "ahead", law, prompt, prediction)
        self.pull()

    def pull(self) -> None:
        left = self._last + 1 - len(self.committed)
        if left > 0 and not self.over:
            self._edge.take(ME, pulling(ME, self.committed, left))

    @property
    def over(self) -> bool:
        return bool(self.answer) and (self.answer[-1] == END or len(self.committed) > self._last)

    def draft(self) -> None:
        if len(self.drafts_ahead) < self._last - self.drafts_ahead.committed:
            row = logits(self._model, tuple(self.drafts_ahead.text.ids.tolist()))
            token, margin = draft_with_margin(row, self._law, len(self.drafts_ahead.text))
            self.drafts_ahead.append(token, 1.0, margin)

    def tell(self) -> None:
        if self.drafts_ahead.unsent > 0:
            start, digest, frames = self.drafts_ahead.encode_hint(VOCAB)
            hint = m.Hint(session=ME, generation=0, start=start, hash=digest)
            self.hints.append((hint, [bytes(frame) for frame in frames]))

    def arrive(self, count_value: int, *, drop: bool, twice: bool) -> None:
        if not self.hints:
            return
        at = count_value % len(self.hints)
        if not drop:
            hint, frames = self.hints[at]
            self._edge.take(ME, hint, *frames)
        if drop or not twice:
            del self.hints[at]

    def forge(self, back: int, ids: Sequence[int], *, rightly: bool) -> None:
        """Send a hint of made-up ids; with the right hash, if so wished."""
        text = self.drafts_ahead.text if back % 2 else self.committed
        start = max(0, min(len(text), len(text) - back))
        digest = text.hash_at(start) if rightly else b"\0" * 8
        hint = m.Hint(session=ME, generation=0, start=start, hash=digest)
        frame = encode_ids(np.array(ids, np.uint32), VOCAB)
        self._edge.take(ME, hint, frame, b"\xff" * len(ids))

    def receive(self) -> bool:
        """Take in the edge's next message, if there is one; what came before is passed over."""
        if self._read == len(self._edge.sent[ME]) or self.over:
            return False
        reply, ids = self._edge.sent[ME][self._read]
        self._read += 1
        assert isinstance(reply, m.Tokens)
        assert reply.accepted <= min(reply.drafted, len(ids))
        if reply.start != len(self.committed):
            assert reply.start < len(self.committed)  # sent again
            return True
        self.drafts_ahead.compare(ids)
        self.committed.extend(ids)
        self.answer += ids
        return True


def begin(
    edge: Edge,
    session: bytes,
    protocol: str,
    law: SamplingParams,
    prompt: Sequence[int],
    prediction: Sequence[int] = (),
) -> None:
    sampling = law.sampling
    message = m.Begin(
        session=session, generation=0, keep=0, hash=CommittedTokens().hash, protocol=protocol,
        seed=law.seed, temperature=sampling.temperature, top_k=sampling.top_k,
        top_p=sampling.top_p, predicted=len(prediction) or None,
    )  # fmt: skip
    frames = [encode_ids(np.array(ids, np.uint32), VOCAB) for ids in (prompt, prediction)]
    edge.take(session, message, *frames[: 1 + (len(prediction) > 0)])


def pulling(session: bytes, committed: CommittedTokens, requests: int) -> m.Pull:
    return m.Pull(
        session=session, generation=0, start=len(committed), hash=committed.hash, count=requests
    )


def own_text(model: Model, law: SamplingParams, prompt: Sequence[int], requests: int) -> list[int]:
    """Choose the target's text token by token, up to the first end token."""
    text = list(prompt)
    while len(text) < min(len(prompt) + requests, CONTEXT):
        row = logits(model, tuple(text))
        text.append(choose(row, law, len(text), Purpose.TARGET))
        if text[-1] == END:
            break
    return text[len(prompt) :]


Move = tuple[str, int, list[int]]
MOVES = ("draft", "draft", "draft", "tell", "arrive", "arrive", "twice", "drop", "forge", "lie",
         "pass", "pass", "receive", "receive", "pull")  # fmt: skip
moves = st.tuples(
    st.sampled_from(MOVES), st.integers(0, 7), st.lists(st.integers(0, END), max_size=6)
)


def play(
    artifact: Artifact,
    models: tuple[Model, Model],
    law: SamplingParams,
    prompt: Sequence[int],
    requests: int,
    schedule: Sequence[Move],
    pace: tuple[float, float] = (0.03, 0.0),
    prediction: Sequence[int] = (),
) -> Edge:
    """Play a schedule, and then until the answer is there; asserts what comes of it."""
    target, drafter = models
    with closing(Edge(artifact, target, *pace)) as edge:
        begin(edge, OTHER, "stream", law, prompt[:1])  # shares the passes
        committed_tokens = CommittedTokens()
        committed_tokens.extend(prompt[:1])
        edge.take(OTHER, pulling(OTHER, committed_tokens, 6))
        device = Device(edge, drafter, law, prompt, requests, prediction)
        for move, kind, ids in schedule:
            step(device, edge, move, kind, ids)
        while edge.go():
            device.receive()
        while device.receive():
            pass
    assert device.answer == own_text(target, law, prompt, requests)
    other = [id for _, ids in edge.sent[OTHER] for id in ids]
    assert other == own_text(target, law, prompt[:1], 6)
    return edge


def step(device: Device, edge: Edge, move: str, count_value: int, ids: list[int]) -> None:
    match move:
        case "draft":
            device.draft()
        case "tell":
            device.tell()
        case "arrive" | "twice" | "drop":
            device.arrive(count_value, drop=move == "drop", twice=move == "twice")
        case "forge" | "lie":
            device.forge(count_value, ids, rightly=move == "forge")
        case "pass":
            edge.go()
        case "receive":
            device.receive()
        case "pull":
            device.pull()
