"""Clients that say whatever they like, to test what the edge endures.

`RawClient` is a bare DEALER: it sends any frames and hears typed replies. `RawSession` knows how to
say the right thing on it, so that a test can say one wrong thing at the right moment.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.tree import Expansion, Tree
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.committed import Committed
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.protocols import EXCHANGES, Draft, Law, Place
from tests.conftest import HIDDEN, VOCAB

PROMPT = [3, 1, 4, 1, 5]
# Protocols that decode at temperature 0 only.
COLD = ["greedy", *(name for name, one in EXCHANGES.items() if one.needs)]
WAIT_S = 10.0  # a reply that takes so long is not coming


def fields(message: m.Request | m.Reply) -> list[Any]:
    """A message as the msgpack array that it travels as, to be spoilt."""
    found: list[Any] = msgspec.msgpack.decode(m.encode(message))
    return found


def packed(values: object) -> bytes:
    """Any msgpack."""
    return msgspec.msgpack.encode(values)


def ids_bytes(ids: Sequence[int]) -> bytes:
    """An ids frame of a small vocabulary; what does not fit wraps around."""
    return np.array(ids, dtype="<u8").astype("<u2").tobytes()


def resident_mib(pid: int | str = "self") -> float:
    """Memory that a process really holds."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def await_idle(pid: int, limit_s: float = 60.0) -> None:
    """Until a process does nothing more with what it has been sent."""
    deadline = time.monotonic() + limit_s
    spent = -math.inf
    while (ticks := _cpu_ticks(pid)) - spent > 2:  # of 10 ms
        assert time.monotonic() < deadline, "the process is still busy"
        spent = ticks
        time.sleep(0.3)


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def peak_mib(pid: int) -> float:
    """The most memory that a process held from one call to the next."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    return int(line.split()[1]) / 1024


class RawClient:
    """A DEALER that sends any frames."""

    def __init__(
        self,
        endpoint: str,
        keys: DeviceKeys | None = None,
        *,
        queue: int = 100_000,
        receive_bytes: int = -1,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = 100_000
        self.socket.rcvhwm = queue
        self.socket.rcvbuf = receive_bytes
        if keys is not None:
            self.socket.curve_serverkey = keys.edge
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        """Send these very frames."""
        self.socket.send_multipart(frames)

    def say(self, message: m.Request | m.Reply, *frames: bytes) -> None:
        """Send a message that is well-formed at least."""
        self.send(m.encode(message), *frames)

    def receive(self, timeout_s: float = WAIT_S) -> m.Reply:
        """The next reply, without its frames."""
        return self.receive_all(timeout_s)[0]

    def receive_all(self, timeout_s: float = WAIT_S) -> tuple[m.Reply, list[bytes]]:
        """The next reply and its frames."""
        if not self.socket.poll(int(timeout_s * 1000)):
            pytest.fail("the edge said nothing")
        header, *frames = self.socket.recv_multipart()
        return m.decode_reply(header), frames

    def fails(self, code: str) -> m.Failure:
        """The next reply is a failure of this kind."""
        reply = self.receive()
        assert isinstance(reply, m.Failure), reply
        assert reply.code == code, reply
        return reply

    def settle(self) -> list[m.Reply]:
        """All that the edge has said up to now, without frames."""
        return [reply for reply, _ in self.settle_all()]

    def settle_all(self) -> list[tuple[m.Reply, list[bytes]]]:
        """All that the edge has said up to now: it answers in order, but for work in progress."""
        nonce = secrets.randbits(40)
        self.say(m.Ping(nonce=nonce))
        received: list[tuple[m.Reply, list[bytes]]] = []
        while True:
            reply, frames = self.receive_all()
            if isinstance(reply, m.Pong) and reply.nonce == nonce:
                return received
            received.append((reply, frames))

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawSession:
    """A session as an honest device would hold it; every message can be had before it is sent.

    conditions: what it says under protocols that are decided by them.
    """

    def __init__(
        self, session_id: bytes | None = None, conditions: m.DecisionConditions | None = None
    ) -> None:
        self.id = session_id or secrets.token_bytes(16)
        self.conditions = conditions
        self.generation = -1
        self.committed = Committed()
        self.pending = 0  # how many of these, at the end, only this end knows: 0 or 1

    def begin(self, prompt: Sequence[int], protocol: str = "greedy", **changes: Any) -> list[bytes]:
        """The frames that begin a generation on these tokens alone."""
        self.generation += 1
        self.committed.truncate(0)
        self.committed.extend(prompt)
        self.pending = 0
        by_link = protocol in EXCHANGES and EXCHANGES[protocol].by_link
        begin = m.Begin(
            session=self.id,
            generation=self.generation,
            keep=0,
            hash=Committed().hash,
            protocol=protocol,
            seed=5,
            temperature=0.0 if protocol in COLD else 1.0,
            top_k=0,
            top_p=1.0,
            conditions=self.conditions if by_link else None,
        )
        return [m.encode(msgspec.structs.replace(begin, **changes)), ids_bytes(prompt)]

    def window(self, ids: Sequence[int] = (), *others: bytes, **changes: Any) -> list[bytes]:
        """The frames of a window at the end of the committed tokens."""
        return [self._window(**changes), ids_bytes(ids), *others]

    def propose(self, protocol: str, draft: Draft, **changes: Any) -> list[bytes]:
        """The frames of a drafted window, behind a token that only this end knows."""
        pending = self.committed.ids[len(self.committed) - self.pending :]
        frames = EXCHANGES[protocol].propose(draft, pending, VOCAB)
        return [self._window(**changes), *map(bytes, frames)]

    def supply(
        self, protocol: str, draft: Draft, asked: Sequence[bytes], **changes: Any
    ) -> list[bytes]:
        """The frames that answer an inquiry with these."""
        states = m.States(session=self.id, generation=self.generation, start=len(self.committed))
        frames = EXCHANGES[protocol].supply(draft, asked)
        return [m.encode(msgspec.structs.replace(states, **changes)), *map(bytes, frames)]

    def _window(self, **changes: Any) -> bytes:
        known = len(self.committed) - self.pending
        window = m.Window(
            session=self.id,
            generation=self.generation,
            start=len(self.committed),
            hash=self.committed.hash_of(known),
        )
        return m.encode(msgspec.structs.replace(window, **changes))

    def pull(self, count: int, **changes: Any) -> list[bytes]:
        """The frame that asks for so many tokens of a stream."""
        pull = m.Pull(
            session=self.id,
            generation=self.generation,
            start=len(self.committed),
            hash=self.committed.hash,
            count=count,
        )
        return [m.encode(msgspec.structs.replace(pull, **changes))]

    def settle(self, ids: Sequence[int], verdict: m.Reply) -> None:
        """Commit what the edge decided about a window."""
        assert isinstance(verdict, m.Verdict), verdict
        assert verdict.start == len(self.committed)
        assert verdict.token is not None
        self.committed.extend([*ids[: verdict.accepted], verdict.token])

    def follow(self, draft: Draft, verdict: m.Reply, sampled: int = 0) -> None:
        """Commit what the edge decided about a draft, and ``sampled`` if it left that to us."""
        assert isinstance(verdict, m.Verdict), verdict
        assert verdict.start == len(self.committed)
        token = sampled if verdict.token is None else verdict.token
        path = [int(draft.ids[node - 1]) for node in draft.path(verdict.accepted)]
        self.committed.extend([*path, token])
        self.pending = int(verdict.token is None)

    def go_on(self, client: RawClient, rounds: int, ids: Sequence[int] = ()) -> list[int]:
        """Some rounds with the same window; the session's tokens after them."""
        for _ in range(rounds):
            client.send(*self.window(ids))
            self.settle(ids, client.receive())
        return self.committed.ids.tolist()


@cache
def drafted(protocol: str, expansion: Expansion, seed: int = 0) -> Draft:
    """What a drafter with random logits would propose under this protocol, by the real rules."""
    exchange, random = EXCHANGES[protocol], np.random.default_rng(seed)
    sampling = Sampling(temperature=0.0 if protocol in COLD else 1.0, top_k=8)
    law = Law(sampling=sampling, seed=seed)
    tree, rows = Tree(), []
    for depth, count in enumerate(expansion):
        drawn = []
        for at in range(len(tree.level)):
            candidates = range(at * count, (at + 1) * count)
            logits = random.normal(0.0, 2.0, VOCAB).astype(np.float32)
            tokens, q = exchange.draw(logits, law, Place(0, depth, candidates))
            drawn.append(tokens)
            rows.append(q)
        tree.grow(drawn)
    states = random.normal(0.0, 1.0, (len(tree), HIDDEN)).astype(np.float32)
    draft: Draft = exchange.carry(exchange.pack(tree, rows), states.__getitem__)
    return draft


def take_tokens(client: RawClient, count: int) -> list[int]:
    """Tokens of a stream, as they come."""
    tokens: list[int] = []
    while len(tokens) < count:
        reply, frames = client.receive_all()
        assert isinstance(reply, m.Tokens), reply
        tokens += decode_ids(frames[0], 2**16).tolist()
    return tokens
