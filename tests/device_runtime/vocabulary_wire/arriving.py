"""How these tests greet an edge and take its vocabulary; an honest one, and scripts of edges."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.retry import FAIL, RetryPolicy
from pilotfish.device_runtime.vocabulary_fetch import target_vocabulary
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from tests.conftest import PADDED_VOCAB, VOCAB, Pair
from tests.device_runtime.test_bad_edge import Answer
from tests.support.hostile import RawClient
from tests.support.tiny_tokenizer import tiny_tokenizer

PARTS = 5
FAILS_SOON = RetryPolicy(policy="fail", absent_s=2.2, silent_s=0.5)
GOOD = Vocabulary(
    model="liar",
    tokenizer_json=tiny_tokenizer(VOCAB),
    vocab_size=VOCAB,
    bos_id=None,
    eos_ids=[VOCAB - 1],
    chat_template="{# " + random.Random(2).randbytes(m.PART_BYTES).hex() + " #}",
)
Script = Callable[[m.DeviceMessage], list[Answer]]


def hello(pair: Pair, **changes: Any) -> m.Hello:
    manifest = Artifact.open(pair.draft).manifest
    info = m.Hello(
        version=m.VERSION, tokenizer=manifest.tokenizer_fingerprint, vocab_size=VOCAB,
        padded_vocab_size=PADDED_VOCAB, hidden_size=64, bridges=True,
    )  # fmt: skip
    return msgspec.structs.replace(info, **changes)


def welcomed(client: RawClient, pair: Pair) -> m.Welcome:
    client.say(hello(pair))
    welcome = client.receive()
    assert isinstance(welcome, m.Welcome), welcome
    return welcome


@contextmanager
def greeted(pair: Pair, endpoint: str, patience: RetryPolicy = FAIL) -> Iterator[EdgeLink]:
    """A link of a device whose drafter has the tiny pair's vocabulary."""
    link = EdgeLink(endpoint, None, patience)
    try:
        link.set_hello(DraftSource.open(pair.draft, text=False, text_location=None).hello)
        link.handshake()
        yield link
    finally:
        link.close()


def arrive(link: EdgeLink, **options: Any) -> Vocabulary:
    assert link.welcome is not None
    return target_vocabulary(link, link.welcome, **options)


def serving(blob: bytes, spoil: Callable[[bytes, int], list[bytes]] | None = None) -> Script:
    """The script of an edge that gives these bytes, and whose frames are spoilt by part number."""

    def script(request: m.DeviceMessage) -> list[Answer]:
        if not isinstance(request, m.Fetch):
            return []
        at = request.part * m.PART_BYTES
        frame = zlib.compress(blob[at : at + m.PART_BYTES])
        frames = [frame] if spoil is None else spoil(frame, request.part)
        return [[m.Part(vocabulary=request.vocabulary, part=request.part), *frames]]

    return script
