"""What each request costs an edge: bytes out over bytes in, and the serving thread's time.

    python benchmarks/request_costs.py [--json PATH] [--quick]

The edge's real service over the default target, without a socket: each request as costly as this
vocabulary and context let it be, and as small. The time is the processor's, of taking the request
in, the rule aside (benchmarks/constraints.py measures that); of passes nothing is counted, but for
the bytes of what they made. `docs/wire.md` has the table, and says what bounds each.
"""

import argparse
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from _common import Rows, at_most, conclude, options, pair, pair_options

from pilotfish.edge_runtime import admission
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.edge_runtime.scheduler import Scheduler
from pilotfish.edge_runtime.targets.local import LocalTarget
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import open_engine
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.codecs.sparse import encode_sparse
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.transfer import pack
from pilotfish.wire.transport import Envelope

CONTEXT, WINDOW, LOGPROBS = 2048, 64, 20
WORST_MS = 20.0  # goal: the serving thread's CPU time for one request
ME = b"me"


class Case(NamedTuple):
    """A request. make: its frames; before: what is sent first; passes: the target works on it."""

    name: str
    make: Callable[[], Sequence[bytes]]
    before: Callable[[], None] = lambda: None
    passes: bool = False


class Edge:
    """The service, its target, and one client's session."""

    def __init__(self, target: Any) -> None:
        artifact = Artifact.open(target)
        limits = EdgeLimits(context=CONTEXT, messages_per_s=1e9)
        held = LocalTarget(open_engine(artifact, slots=limits.sessions, context=CONTEXT))
        self.manifest = artifact.manifest
        self.scheduler = Scheduler(held)
        self.sent, self.reply = 0, None  # since the last request, and the last of it
        self.service = MessageHandler(
            artifact,
            held,
            limits,
            self.scheduler.submit,
            self._send,
            draft_cost=self.scheduler.draft_cost,
        )
        self.id, self.generation, self.committed = secrets.token_bytes(16), -1, CommittedTokens()

    def _send(self, client: bytes, reply: m.Reply, frames: Sequence[m.Buffer]) -> bool:
        self.sent += len(m.encode(reply)) + sum(map(len, frames))
        self.reply = reply
        return True

    def deliver(self, frames: Sequence[bytes]) -> None:
        header, *rest = frames
        self.service.handle(Envelope(ME, ME, header, rest, sum(map(len, frames))))

    def work(self) -> None:
        """Make all passes."""
        self.service.compiler.run_callbacks()
        while self.scheduler.wait_s() is not None:
            batch = self.scheduler.next_batch()
            if batch is not None:
                number, jobs = batch
                self.scheduler.target.start(number, [job.work for job in jobs])
            for scores in self.scheduler.target.collect_scores():
                for job in self.scheduler.finish_pass(scores):
                    self.service.finish_job(job)

    def begin(self, protocol: str, length: int = 8, **more: Any) -> list[bytes]:
        """A generation on new tokens; ``grammar``: frame 1."""
        grammar = more.pop("grammar", None)
        ids = np.arange(length, dtype=np.uint32) + 100
        self.generation += 1
        self.committed = CommittedTokens()
        self.committed.extend(ids.tolist())
        begin = m.Begin(
            session=self.id, generation=self.generation, keep=0, hash=CommittedTokens().hash,
            protocol=protocol, seed=1, temperature=0.0 if protocol == "greedy" else 1.0,
            top_k=0, top_p=1.0, **more,
        )  # fmt: skip
        frame = bytes(encode_ids(ids, self.manifest.vocab_size))
        return [m.encode(begin), frame, *(() if grammar is None else (grammar,))]

    def window(self, *frames: bytes) -> list[bytes]:
        place = {"start": len(self.committed), "hash": self.committed.hash}
        window = m.Window(session=self.id, generation=self.generation, **place)
        return [m.encode(window), *frames]

    def chunk(self, message: bytes, at: int, size: int, transfer: bytes) -> list[bytes]:
        """A part of a large message."""
        chunk = m.Chunk(transfer=transfer, offset=at, total=len(message))
        return [m.encode(chunk), message[at : at + size]]

    def more(self) -> list[bytes]:
        """A question for the rest of the last reply, which came in slices."""
        assert isinstance(self.reply, m.Slice)
        more = m.More(transfer=self.reply.transfer, offset=1024, bytes=m.MAX_CHUNK)
        return [m.encode(more)]

    def pull(self, count: int) -> list[bytes]:
        place = {"start": len(self.committed), "hash": self.committed.hash}
        pull = m.Pull(session=self.id, generation=self.generation, count=count, **place)
        return [m.encode(pull)]


def cases(edge: Edge) -> list[Case]:
    """Every kind of request, as costly as it can be."""
    vocab = edge.manifest.vocab_size
    ids = bytes(encode_ids(np.arange(WINDOW, dtype=np.uint32), vocab))
    long, deliver = CONTEXT - WINDOW - 2, edge.deliver
    bias = m.LogitsOptionsMsg(since=8, logit_bias=[(token, 1.0) for token in range(512)])
    grammar = ('{"enum": [' + ", ".join(f'"{at:07x}"' for at in range(5400)) + "]}").encode()
    row = np.arange(2040, dtype=np.uint32)
    sparse = encode_sparse(
        SparseRows(np.tile(row, WINDOW), np.zeros(WINDOW * 2040, np.uint8),
                   np.arange(1, WINDOW + 1) * 2040), vocab)  # fmt: skip
    tree = [ids, bytes([1] * WINDOW), sparse]
    dense = np.full((WINDOW, vocab), 1.0 / vocab, "<f4").tobytes()
    hello = m.Hello(
        version=m.VERSION, tokenizer=edge.manifest.tokenizer_fingerprint, vocab_size=vocab,
        padded_vocab_size=edge.manifest.padded_vocab_size, hidden_size=576,
    )  # fmt: skip
    digest = edge.service._vocabulary_server.digest
    item = bytes(encode_ids(np.array([5], np.uint32), vocab))
    split = [item, bytes(encode_ids(np.array([2**24 - 1], np.uint32), 2**24))]  # q(x) = 1

    def worked(*messages: Sequence[bytes]) -> None:
        for message in messages:
            deliver(message)
            edge.work()

    def pulled(**more: Any) -> None:
        worked(edge.begin("stream", long, **more), edge.pull(48))

    ping = [m.encode(m.Ping(nonce=1)), b"\0" * (2**18 - 16)]
    whole = pack(ping[0], ping[1:])
    large, places = bytes(16 * m.MAX_CHUNK), count()

    def sliced() -> None:
        deliver([m.encode(msgspec.structs.replace(hello, reply_bytes=1024))])
        deliver(ping)
        edge.service._replies.downloads.set_slice_limit(ME, ME, 0)

    def split_window(**more: Any) -> None:
        worked(edge.begin("dssd", **more))
        worked(edge.window(*split))

    return [
        Case("ping", lambda: [m.encode(m.Ping(nonce=1))]),
        Case("ping of 256 KiB", lambda: ping),
        Case("chunk of 256 KiB", lambda: edge.chunk(
            large, next(places) * m.MAX_CHUNK, m.MAX_CHUNK, b"\0" * 8)),
        Case("chunk without bytes", lambda: edge.chunk(whole, 0, 0, b"\1" * 8),
             lambda: deliver(edge.chunk(whole, 0, m.MAX_CHUNK, b"\1" * 8))),
        Case("more, 256 KiB", edge.more, sliced),
        Case("hello", lambda: [m.encode(hello)]),
        Case("fetch", lambda: [m.encode(m.Fetch(vocabulary=digest, part=0))]),
        Case("no message", lambda: [b"\xc1"]),
        Case("window that fits nothing", lambda: edge.window(ids)),
        Case(f"begin of {long:,} tokens", lambda: edge.begin("greedy", long)),
        Case("begin with 512 biases", lambda: edge.begin("greedy", shape=bias)),
        Case("begin with a grammar of 64 KiB", lambda: edge.begin(
            "stream", shape=m.LogitsOptionsMsg(since=8, grammar="json"), grammar=grammar)),
        Case("window of ids (greedy)", lambda: edge.window(ids),
             lambda: worked(edge.begin("greedy")), passes=True),
        Case("window of dense q (dsd)", lambda: edge.window(ids, dense),
             lambda: worked(edge.begin("dsd"))),
        Case("window of truncated q (tree)", lambda: edge.window(*tree),
             lambda: worked(edge.begin("tree"))),
        Case("window answered by P (dssd)", lambda: edge.window(*split),
             lambda: worked(edge.begin("dssd")), passes=True),
        Case("the same again", lambda: edge.window(*split), split_window),
        Case("pull of 48 tokens", lambda: edge.pull(48),
             lambda: worked(edge.begin("stream", logprobs=LOGPROBS)), passes=True),
        Case("the same again", lambda: edge.pull(48), lambda: pulled(logprobs=LOGPROBS)),
        Case("pull with the prompt's logprobs", lambda: edge.pull(1),
             lambda: worked(edge.begin("stream", long, prompt_logprobs=LOGPROBS)), passes=True),
        Case("the same again", lambda: edge.pull(1), lambda: pulled(prompt_logprobs=LOGPROBS)),
        Case("cancel", lambda: [m.encode(m.Cancel(session=edge.id, generation=edge.generation))]),
        Case("close", lambda: [m.encode(m.Close(session=edge.id))],
             lambda: worked(edge.begin("greedy", long))),
    ]  # fmt: skip


def measure(edge: Edge, case: Case, times: int) -> dict[str, Any]:
    """Send a request so often."""
    spent_s, out, size = [], [], 0
    for _ in range(times):
        case.before()
        frames = case.make()
        size, edge.sent = sum(map(len, frames)), 0
        begun_s = time.thread_time()
        edge.deliver(frames)
        spent_s.append(time.thread_time() - begun_s)
        if case.passes:
            edge.work()
        out.append(edge.sent)
        edge.service.compiler.run_callbacks()
    return {
        "request": case.name, "in": size, "out": max(out), "ratio": max(out) / size,
        "ms": 1e3 * median(spent_s), "passes": case.passes,
    }  # fmt: skip


def main() -> int:
    parser = options(__doc__ or "")
    pair_options(parser)
    args = parser.parse_args()
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure all of them."""
    admission._REPLY_BURST = 1 << 40  # what the budget would refuse is what is measured here
    edge = Edge(pair(args)[1])
    rows: Rows = [measure(edge, case, 3 if args.quick else 9) for case in cases(edge)]
    worst = max(row["ms"] for row in rows)
    goals = [at_most("the serving thread, for a request, ms", worst, WORST_MS)]
    columns = ["request", "in", "out", "ratio", "ms", "passes"]
    return conclude(args, "What a request costs", columns, rows, goals)


if __name__ == "__main__":
    raise SystemExit(main())
