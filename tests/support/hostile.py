"""Clients that can send anything, to test what the edge withstands.

`RawClient` is a bare DEALER: it sends any frames and receives typed replies. `RawSession` makes
valid messages, so that a test can send a single invalid one at the right moment.
"""

from __future__ import annotations

import math
import os
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
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, Draft, DrawKey, SamplingParams
from tests.conftest import HIDDEN, VOCAB
from tests.support.registered import temperature_of

PROMPT = [3, 1, 4, 1, 5]
# Protocols that decode at temperature 0 only.
COLD = [name for name in PROTOCOL_REGISTRY if not temperature_of(name)]
WAIT_S = 10.0  # for a reply


def fields(message: m.DeviceMessage | m.Reply) -> list[Any]:
    """Return a message as its msgpack array, to be spoilt."""
    decoded: list[Any] = msgspec.msgpack.decode(m.encode(message))
    return decoded


def packed(values: object) -> bytes:
    """Encode anything as msgpack."""
    return msgspec.msgpack.encode(values)


def ids_bytes(ids: Sequence[int]) -> bytes:
    """Make an ids frame of a small vocabulary; larger ids wrap around."""
    return np.array(ids, dtype="<u8").astype("<u2").tobytes()


def resident_mib(pid: int | str = "self") -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def await_idle(pid: int, limit_s: float = 60.0) -> None:
    """Wait until a process has worked off its messages."""
    deadline = time.monotonic() + limit_s
    spent_s = -math.inf
    while (now_s := cpu_s(pid)) - spent_s > 0.02:
        assert time.monotonic() < deadline, "the process is still busy"
        spent_s = now_s
        time.sleep(0.3)


def cpu_s(pid: int) -> float:
    """Return a process's CPU seconds, by 0.01."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def starved_s(pid: int | str = "self") -> float:
    """Return the seconds for which a process's threads could run, but had no processor."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text(encoding="ascii").split()[1]) for stat in stats) * 1e-9


def peak_mib(pid: int) -> float:
    """Return a process's peak memory since the last call."""
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
        """Send these frames."""
        self.socket.send_multipart(frames)

    def say(self, message: m.DeviceMessage | m.Reply, *frames: bytes) -> None:
        """Send a well-formed message."""
        self.send(m.encode(message), *frames)

    def receive(self, timeout_s: float = WAIT_S) -> m.Reply:
        """Receive a reply, without its frames."""
        return self.receive_all(timeout_s)[0]

    def receive_all(self, timeout_s: float = WAIT_S) -> tuple[m.Reply, list[bytes]]:
        """Receive a reply and its frames."""
        if not self.socket.poll(int(timeout_s * 1000)):
            pytest.fail("the edge said nothing")
        header, *frames = self.socket.recv_multipart()
        return m.decode_reply(header), frames

    def fails(self, code: str) -> m.Failure:
        """Assert that the next reply is a failure of this kind."""
        reply = self.receive()
        assert isinstance(reply, m.Failure), reply
        assert reply.code == code, reply
        return reply

    def settle(self) -> list[m.Reply]:
        """Receive all replies so far, without frames."""
        return [reply for reply, _ in self.settle_all()]

    def settle_all(self) -> list[tuple[m.Reply, list[bytes]]]:
        """Receive all replies so far: the edge answers in order, except for work under way."""
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
    """A session of an honest device; makes its messages without sending them.

    conditions: sent under protocols that need them.
    """

    def __init__(
        self, session_id: bytes | None = None, conditions: m.DecisionConditions | None = None
    ) -> None:
        self.id = session_id or secrets.token_bytes(16)
        self.conditions = conditions
        self.generation = -1
        self.committed = CommittedTokens()
        self.pending = 0  # tokens at the end that only this end has: 0 or 1

    def begin(self, prompt: Sequence[int], protocol: str = "greedy", **changes: Any) -> list[bytes]:
        """Make the frames that begin a generation on these tokens alone."""
        self.generation += 1
        self.committed.truncate(0)
        self.committed.extend(prompt)
        self.pending = 0
        by_link = protocol in PROTOCOL_REGISTRY and PROTOCOL_REGISTRY[protocol].decides_by_link
        begin = m.Begin(
            session=self.id,
            generation=self.generation,
            keep=0,
            hash=CommittedTokens().hash,
            protocol=protocol,
            seed=5,
            temperature=0.0 if protocol in COLD else 1.0,
            top_k=0,
            top_p=1.0,
            conditions=self.conditions if by_link else None,
        )
        return [m.encode(msgspec.structs.replace(begin, **changes)), ids_bytes(prompt)]

    def window(self, ids: Sequence[int] = (), *others: bytes, **changes: Any) -> list[bytes]:
        """Make the frames of a window at the end of the committed tokens."""
        return [self._window(**changes), ids_bytes(ids), *others]

    def propose(self, protocol: str, draft: Draft, **changes: Any) -> list[bytes]:
        """Make the frames of a drafted window, behind a pending token."""
        pending = self.committed.ids[len(self.committed) - self.pending :]
        frames = PROTOCOL_REGISTRY[protocol].encode_draft(draft, pending, VOCAB)
        return [self._window(**changes), *map(bytes, frames)]

    def supply(
        self, protocol: str, draft: Draft, frames: Sequence[bytes], **changes: Any
    ) -> list[bytes]:
        """Make the frames that answer an inquiry."""
        states = m.States(session=self.id, generation=self.generation, start=len(self.committed))
        frames = PROTOCOL_REGISTRY[protocol].encode_states(draft, frames)
        return [m.encode(msgspec.structs.replace(states, **changes)), *map(bytes, frames)]

    def _window(self, **changes: Any) -> bytes:
        known = len(self.committed) - self.pending
        window = m.Window(
            session=self.id,
            generation=self.generation,
            start=len(self.committed),
            hash=self.committed.hash_at(known),
        )
        return m.encode(msgspec.structs.replace(window, **changes))

    def pull(self, count: int, **changes: Any) -> list[bytes]:
        """Make the frame that asks for so many tokens of a stream."""
        pull = m.Pull(
            session=self.id,
            generation=self.generation,
            start=len(self.committed),
            hash=self.committed.hash,
            count=count,
        )
        return [m.encode(msgspec.structs.replace(pull, **changes))]

    def hint(
        self, ids: Sequence[int], odds: int = 255, drafts_before: Sequence[int] = (), **changes: Any
    ) -> list[bytes]:
        """Make the frames of a hint behind the committed tokens and these, hinted before."""
        hint = m.Hint(
            session=self.id,
            generation=self.generation,
            start=len(self.committed) + len(drafts_before),
            hash=self.committed.hash_after(drafts_before),
        )
        header = m.encode(msgspec.structs.replace(hint, **changes))
        return [header, ids_bytes(ids), bytes([odds]) * len(ids)]

    def settle(self, ids: Sequence[int], verdict: m.Reply) -> None:
        """Commit by the verdict on a window."""
        assert isinstance(verdict, m.Verdict), verdict
        assert verdict.start == len(self.committed)
        assert verdict.token is not None
        self.committed.extend([*ids[: verdict.accepted], verdict.token])

    def follow(self, draft: Draft, verdict: m.Reply, sampled: int = 0) -> None:
        """Commit by the verdict on a draft, and ``sampled`` if this end samples the next token."""
        assert isinstance(verdict, m.Verdict), verdict
        assert verdict.start == len(self.committed)
        token = sampled if verdict.token is None else verdict.token
        path = [int(draft.ids[node - 1]) for node in draft.path(verdict.accepted)]
        self.committed.extend([*path, token])
        self.pending = int(verdict.token is None)

    def go_on(self, client: RawClient, rounds: int, ids: Sequence[int] = ()) -> list[int]:
        """Run rounds with the same window; returns the session's tokens after them."""
        for _ in range(rounds):
            client.send(*self.window(ids))
            self.settle(ids, client.receive())
        return self.committed.ids.tolist()


@cache
def drafted(protocol: str, expansion: Expansion, seed: int = 0) -> Draft:
    """Draft by the real rules of this protocol, with random logits."""
    exchange, random = PROTOCOL_REGISTRY[protocol], np.random.default_rng(seed)
    sampling = Sampling(temperature=0.0 if protocol in COLD else 1.0, top_k=8)
    law = SamplingParams(sampling=sampling, seed=seed)
    tree, rows = Tree(), []
    for depth, count in enumerate(expansion):
        drawn = []
        for at in range(len(tree.level)):
            candidates = range(at * count, (at + 1) * count)
            logits = random.normal(0.0, 2.0, VOCAB).astype(np.float32)
            tokens, q = exchange.draw(logits, law, DrawKey(0, depth, candidates))
            drawn.append(tokens)
            rows.append(q)
        tree.grow(drawn)
    states = random.normal(0.0, 1.0, (len(tree), HIDDEN)).astype(np.float32)
    draft: Draft = exchange.attach_states(exchange.make_draft(tree, rows), states.__getitem__)
    return draft


def take_tokens(client: RawClient, count: int) -> list[int]:
    """Receive tokens of a stream."""
    tokens: list[int] = []
    while len(tokens) < count:
        reply, frames = client.receive_all()
        assert isinstance(reply, m.Tokens), reply
        tokens += decode_ids(frames[0], 2**16).tolist()
    return tokens
