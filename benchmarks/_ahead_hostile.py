"""A device that streams under `ahead` and, when told to, hints nonsense as fast as it can.

    python _ahead_hostile.py ENDPOINT KEYS RECORDING PROTOCOL

A process of its own, at the lowest priority, that speaks the bare wire. Lines on stdin: "flood"
(as fast as it can), "steady" (just less often than an edge refuses, and all of it fits), "spin"
(make it, send nothing: what that costs the machine), "rest", and an end. On stdout it says at each
"rest" what it has sent and received, as JSON. The nonsense of a flood takes turns: ids at random
behind the committed text, said to be certain; the same behind a hash of nothing; behind a place far
ahead; as many ids as an edge takes, and more.
"""

import json
import os
import secrets
import selectors
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from _ahead_replayed import load

from pilotfish.wire import messages as m
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.codecs.ids import decode_ids, encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.keys import DeviceKeys

_WIDTHS = (15, 64, 128, 1)
_BURST = 64  # hints between two looks at what has come
_STEADY_S = 1 / 1500  # an edge takes 2,000 messages a second of a key
_AGAIN_S = 1.0  # without a token, after which the text counts as over


class Hostile:
    """One session after the other; ``sent`` and ``refused`` are counted."""

    def __init__(self, endpoint: str, folder: Path, prompt: Any, vocab: int, protocol: str) -> None:
        self._channel = EdgeChannel(endpoint, DeviceKeys.load(folder), 1 << 20)
        self._prompt, self._vocab, self._protocol = prompt.astype(np.uint32), vocab, protocol
        self._session, self._generation = secrets.token_bytes(16), -1
        self._text = CommittedTokens()
        self.mode = "rest"
        self.sent = self.refused = self.received = 0
        self._sent_s = 0.0
        self._random = np.random.default_rng(0)
        while not self._channel.connected:
            self._channel.receive(0.1)
        self._begin()

    def _begin(self) -> None:
        self._generation += 1
        self._text = CommittedTokens()
        begin = m.Begin(
            session=self._session, generation=self._generation, keep=0, hash=self._text.hash,
            protocol=self._protocol, seed=0, temperature=0.0, top_k=0, top_p=1.0,
        )  # fmt: skip
        self._text.extend(self._prompt)
        self._channel.send(begin, (encode_ids(self._prompt, self._vocab),))
        pull = m.Pull(
            session=self._session, generation=self._generation, start=len(self._text),
            hash=self._text.hash, count=512,
        )  # fmt: skip
        self._channel.send(pull)
        self._told_s, self._begun = time.monotonic(), False

    def turn(self) -> None:
        """Take in what has come, and send a burst of nonsense."""
        hinting = self.mode != "rest" and self._begun
        while (arrived := self._channel.receive(0.0 if hinting else 0.02)) is not None:
            self._take(*arrived[:2])
        if time.monotonic() - self._told_s > _AGAIN_S:
            with suppress(zmq.Again):
                self._begin()
        if not hinting:
            return
        if self.mode != "steady":
            for _ in range(_BURST):
                self._hint(self.sent % 3)
        elif time.monotonic() - self._sent_s >= _STEADY_S:
            self._hint(0)
        else:
            time.sleep(2e-4)

    def _take(self, reply: Any, frames: Any) -> None:
        if isinstance(reply, m.Tokens) and reply.generation == self._generation:
            self._told_s, self._begun = time.monotonic(), True
            ids = decode_ids(frames[0], self._vocab)
            if reply.start == len(self._text):
                self._text.extend(ids)
                self.received += len(ids)
        elif isinstance(reply, m.Failure):
            self.refused += 1

    def _hint(self, kind: int) -> None:
        width = _WIDTHS[self.sent // 3 % len(_WIDTHS)]
        start, digest = len(self._text), self._text.hash
        if kind == 1:
            digest = secrets.token_bytes(8)
        elif kind == 2:
            start += 1000
        ids = self._random.integers(0, self._vocab, width).astype(np.uint32)
        frames: list[Any] = [encode_ids(ids, self._vocab), bytes([255]) * width]
        about: dict[str, Any] = {"session": self._session, "generation": self._generation}
        if self.mode == "spin":
            return
        try:
            self._channel.send(m.Hint(start=start, hash=digest, **about), frames)
            self.sent += 1
            self._sent_s = time.monotonic()
        except zmq.Again:
            self._channel.receive(0.002)


def main() -> int:
    endpoint, folder, recording, protocol, vocab = sys.argv[1:]
    os.nice(19)
    prompt = load(Path(recording))[0].prompt
    hostile = Hostile(endpoint, Path(folder), prompt, int(vocab), protocol)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if selector.select(0):
            word = sys.stdin.readline().strip()
            if not word:
                return 0
            if word == "rest":
                options = {"sent": hostile.sent, "refused": hostile.refused}
                print(json.dumps(options | {"received": hostile.received}), flush=True)
            hostile.mode = word
        hostile.turn()


if __name__ == "__main__":
    sys.exit(main())
