"""Clients that say whatever they like, and an edge without sockets: to test what the edge endures.

`RawClient` is a bare DEALER: it sends any frames and hears typed replies. `RawSession` knows how to
say the right thing on it, so that a test can say one wrong thing at the right moment.
`SocketlessEdge` is the real service, decoder and scheduler with the socket left out: fast enough
for volume, and time stands still in it until `start`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from edge_runtime.config import EdgeLimits
from edge_runtime.scheduler import Scheduler
from edge_runtime.service import Service
from engines.artifact import Artifact
from engines.decoder import Decoder
from wire import messages as m
from wire.committed import Committed
from wire.keys import DeviceKeys
from wire.transport import Envelope

WAIT_S = 10.0  # a reply that takes so long is not coming


def fields(message: m.Request | m.Reply) -> list[Any]:
    """A message as the msgpack array that it travels as, to be spoilt."""
    found: list[Any] = msgspec.msgpack.decode(m.encode(message))
    return found


def packed(values: object) -> bytes:
    """Any msgpack."""
    return msgspec.msgpack.encode(values)


def ids_bytes(ids: Sequence[int]) -> bytes:
    """An ids frame."""
    return np.array(ids, dtype="<u4").tobytes()


def resident_mib(pid: int | str = "self") -> float:
    """Memory that a process really holds."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
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

    def hear(self, timeout_s: float = WAIT_S) -> m.Reply:
        """The next reply, without its frames."""
        return self.hear_all(timeout_s)[0]

    def hear_all(self, timeout_s: float = WAIT_S) -> tuple[m.Reply, list[bytes]]:
        """The next reply and its frames."""
        if not self.socket.poll(int(timeout_s * 1000)):
            pytest.fail("the edge said nothing")
        header, *frames = self.socket.recv_multipart()
        return m.decode_reply(header), frames

    def fails(self, code: str) -> m.Failure:
        """The next reply is a failure of this kind."""
        reply = self.hear()
        assert isinstance(reply, m.Failure), reply
        assert reply.code == code, reply
        return reply

    def settle(self) -> list[m.Reply]:
        """All that the edge has said up to now: it answers in order, but for work in progress."""
        nonce = secrets.randbits(40)
        self.say(m.Ping(nonce=nonce))
        heard: list[m.Reply] = []
        while True:
            reply = self.hear()
            if isinstance(reply, m.Pong) and reply.nonce == nonce:
                return heard
            heard.append(reply)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawSession:
    """A session as an honest device would hold it; every message can be had before it is sent."""

    def __init__(self, session_id: bytes | None = None) -> None:
        self.id = session_id or secrets.token_bytes(16)
        self.generation = -1
        self.committed = Committed()

    def begin(self, prompt: Sequence[int], protocol: str = "greedy", **changes: Any) -> list[bytes]:
        """The frames that begin a generation on these tokens alone."""
        self.generation += 1
        self.committed.truncate(0)
        self.committed.extend(prompt)
        begin = m.Begin(
            session=self.id,
            generation=self.generation,
            keep=0,
            hash=Committed().hash,
            protocol=protocol,
            seed=5,
            temperature=1.0 if protocol in {"dsd", "stream"} else 0.0,
            top_k=0,
            top_p=1.0,
        )
        return [m.encode(msgspec.structs.replace(begin, **changes)), ids_bytes(prompt)]

    def window(self, ids: Sequence[int] = (), *others: bytes, **changes: Any) -> list[bytes]:
        """The frames of a window at the end of the committed tokens."""
        window = m.Window(
            session=self.id,
            generation=self.generation,
            start=len(self.committed),
            hash=self.committed.hash,
        )
        return [m.encode(msgspec.structs.replace(window, **changes)), ids_bytes(ids), *others]

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
        self.committed.extend([*ids[: verdict.accepted], verdict.token])

    def go_on(self, client: RawClient, rounds: int, ids: Sequence[int] = ()) -> list[int]:
        """Some rounds with the same window; the session's tokens after them."""
        for _ in range(rounds):
            client.send(*self.window(ids))
            self.settle(ids, client.hear())
        return self.committed.ids.tolist()


def take_tokens(client: RawClient, count: int) -> list[int]:
    """Tokens of a stream, as they come."""
    tokens: list[int] = []
    while len(tokens) < count:
        reply, frames = client.hear_all()
        assert isinstance(reply, m.Tokens), reply
        tokens += m.read_ids(frames[0], 2**31).tolist()
    return tokens


class SocketlessEdge:
    """Service, scheduler and decoder; `deliver` is what the socket would do, `turn` one pass."""

    def __init__(self, target: Path, **limits: Any) -> None:
        artifact = Artifact.open(target)
        chosen = EdgeLimits(**{"messages_per_s": 1e9, **limits})
        decoder = Decoder(artifact, slots=chosen.sessions, context=chosen.context, threads=1)
        self.replies: list[tuple[bytes, m.Reply, list[bytes]]] = []
        self.scheduler = Scheduler(decoder)
        self._working = False
        self.service = Service(
            artifact.manifest, decoder, chosen, self.scheduler.submit, self._keep
        )

    def _keep(self, client: bytes, reply: m.Reply, frames: Sequence[m.Buffer]) -> None:
        self.replies.append((client, reply, list(map(bytes, frames))))

    def start(self) -> None:
        """Let the target work."""
        self._working = True

    def deliver(self, frames: Sequence[bytes], client: bytes = b"me") -> None:
        """A message arrives."""
        header, *rest = frames
        self.service.handle(Envelope(client, client, header, rest, sum(map(len, frames))))

    def turn(self) -> None:
        """Let the target make one pass, and apply what it has done."""
        for job in self.scheduler.run() if self._working else []:
            self.service.finish(job)

    def reply(self, client: bytes = b"me") -> m.Reply:
        """The next reply to a client, waiting for the target; replies to others are dropped."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            while self.replies:
                to, reply, _ = self.replies.pop(0)
                if to == client:
                    return reply
            self.turn()
        pytest.fail("the edge said nothing")

    def fails(self, code: str) -> m.Failure:
        """The next reply is a failure of this kind."""
        reply = self.reply()
        assert isinstance(reply, m.Failure), reply
        assert reply.code == code, reply
        return reply

    def close(self) -> None:
        """The target works no more."""
        self._working = False

    def __enter__(self) -> SocketlessEdge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
