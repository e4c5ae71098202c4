"""A device that pulls less while a pass is under way, and prices near zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.edge_runtime.hint_sources import DeviceHints, HintSources, SourceBudget
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols.ahead import HintChain
from tests.conftest import VOCAB, Pair
from tests.support.hostile import PROMPT, RawSession, ids_bytes
from tests.support.passes import collect
from tests.support.socketless import SocketlessEdge
from tests.support.tiny import tiny_artifact


def taken(edge: SocketlessEdge) -> list[int]:
    """The tokens of the next reply."""
    reply, frames = edge.reply_all()
    assert isinstance(reply, m.Tokens), reply
    return decode_ids(frames[0], VOCAB).tolist()


@pytest.mark.parametrize("protocol", ["stream", "ahead"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_smaller_pull_during_a_pass(tmp_path: Path, protocol: str, count: int) -> None:
    tiny_artifact(tmp_path / "target", vocab=VOCAB)
    text, id_ = CommittedTokens(), bytes(16)
    text.extend(PROMPT)
    begin = m.Begin(
        session=id_, generation=0, keep=0, hash=CommittedTokens().hash, protocol=protocol, seed=1,
        temperature=0.0, top_k=0, top_p=1.0,
    )  # fmt: skip

    def pull(count: int) -> list[bytes]:
        wanted = m.Pull(session=id_, generation=0, start=len(PROMPT), hash=text.hash, count=count)
        return [m.encode(wanted)]

    with SocketlessEdge(tmp_path / "target") as edge:
        edge.deliver([m.encode(begin), ids_bytes(PROMPT)])
        edge.deliver(pull(8))
        edge.deliver(pull(count))  # the job of the first one is queued, or under way
        edge.start()
        assert len(taken(edge)) == 1
        assert edge.scheduler.wait_s() is None
        assert edge.replies == []


@pytest.mark.parametrize(("count", "sent"), [(0, 1), (1, 1), (3, 3), (20, 7)])
def test_a_pass_under_way_brings_no_more_than_was_pulled_last(
    pair: Pair, count: int, sent: int
) -> None:
    """Six hints are right; of what they bring, only its first token comes unasked."""
    with SocketlessEdge(pair.target) as edge:
        edge.start()

        def begun(protocol: str) -> RawSession:
            session = RawSession()
            edge.deliver(session.begin(PROMPT, protocol, temperature=0.0))
            while edge.scheduler.wait_s() is not None:
                edge.turn()
            return session

        plain = begun("stream")
        edge.deliver(plain.pull(20))
        text: list[int] = []
        while len(text) < 20:
            text += taken(edge)
        session = begun("ahead")
        edge.deliver(session.hint(text[:6]))
        edge.deliver(session.pull(20))
        batch = edge.scheduler.next_batch()
        assert batch is not None
        assert [job.work.rows for job in batch[1]] == [7], "the hints did not come along"
        edge.deliver(session.pull(count))
        number, jobs = batch
        edge.scheduler.target.start(number, [job.work for job in jobs])
        for job in collect(edge.scheduler):
            edge.service.finish_job(job)
        assert taken(edge) == text[:sent]
        if count < sent + 1:
            assert edge.scheduler.wait_s() is None  # and nothing more is computed
            assert edge.replies == []
        session.committed.extend(text[:sent])
        edge.deliver(session.pull(20 - sent))
        while sent < 20:
            result = taken(edge)
            assert result == text[sent : sent + len(result)]
            sent += len(result)


@pytest.mark.parametrize("less", [False, True])
def test_an_end_token_within_a_run(pair: Pair, less: bool) -> None:
    """It ends the stream where it is committed: as a draft, too; not where less was pulled."""
    (end,) = Artifact.open(pair.target).manifest.eos_ids
    with SocketlessEdge(pair.target, sessions=1, idle_s=0.0) as edge:
        edge.start()

        def begun(protocol: str, seed: int) -> RawSession:
            session = RawSession()
            edge.deliver(session.begin(PROMPT, protocol, seed=seed))
            while edge.scheduler.wait_s() is not None:
                edge.turn()
            return session

        def streamed(seed: int) -> list[int]:
            edge.deliver(begun("stream", seed).pull(5))
            text: list[int] = []
            while len(text) < 5 and end not in text:
                text += taken(edge)
            return text

        texts = ((seed, streamed(seed)) for seed in range(200))
        seed, text = next(each for each in texts if len(each[1]) > 2 and each[1][-1] == end)
        session = begun("ahead", seed)
        edge.deliver(session.hint(text[:-1] if less else text))
        edge.deliver(session.pull(20))
        batch = edge.scheduler.next_batch()
        assert batch is not None
        if less:
            edge.deliver(session.pull(1))
        number, jobs = batch
        edge.scheduler.target.start(number, [job.work for job in jobs])
        for job in collect(edge.scheduler):
            edge.service.finish_job(job)
        sent = taken(edge)
        assert sent == (text[:1] if less else text)
        assert edge.scheduler.wait_s() is None
        session.committed.extend(sent)
        edge.deliver(session.pull(20))
        assert (edge.scheduler.wait_s() is not None) == less


def test_a_price_near_zero() -> None:
    chain = HintChain(CommittedTokens(), 64)
    chain.ids, chain.acceptances = [1, 2], [1.0, 1.0]
    hints = HintSources([SourceBudget(DeviceHints(chain), "device")], chain)
    assert len(hints.propose(15, 1e-309)) == 2


def test_a_hint_beyond_the_rate_is_not_answered(tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "target")
    hint = m.Hint(session=bytes(16), generation=0, start=5, hash=bytes(8))
    with SocketlessEdge(tmp_path / "target", messages_per_s=1.0) as edge:
        for _ in range(3):
            edge.deliver([m.encode(hint), ids_bytes([1]), b"\xff"])
        assert edge.replies == []


def test_a_source_that_becomes_good_is_heard_again() -> None:
    chain = HintChain(CommittedTokens(), 64)
    hints = HintSources([SourceBudget(DeviceHints(chain), "device")], chain)
    for good in (False, True):
        received = 0
        for _ in range(1000):
            chain.ids, chain.acceptances = [1] * 15, [1.0] * 15
            drafts = hints.attach(len(hints.propose(15, 0.1)))
            received += bool(drafts)
            hints.record_pass([1] * (len(drafts) + 1) if good else [2], len(drafts) if good else 0)
    assert received > 500
