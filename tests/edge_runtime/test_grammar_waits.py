"""A generation waits for its grammar beside the serving thread, and so does what comes for it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.edge_runtime.grammar_compiler import Compilation, GrammarCompiler
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import Daemon, running
from tests.support.hostile import RawClient, RawSession
from tests.support.socketless import SocketlessEdge
from tests.support.writing import writers

assert writers  # a fixture

PROMPT = [3, 1, 4]
REGEX = b"(ab|cd){40}"


def many(count: int) -> str:
    """A schema that takes about 0.3 ms of a processor for each of so many bounded numbers."""
    return json.dumps({"type": "array", "prefixItems": [
        {"type": "integer", "minimum": at, "maximum": 10**9 + 7 * at} for at in range(count)
    ]})  # fmt: skip


def begin(session: RawSession, grammar: bytes, kind: str = "regex", **more: Any) -> list[bytes]:
    shape = m.LogitsOptionsMsg(since=len(PROMPT), grammar=kind)
    return [*session.begin(PROMPT, more.pop("protocol", "stream"), shape=shape, **more), grammar]


@pytest.fixture
def edge(writers: Pair) -> Iterator[SocketlessEdge]:
    with SocketlessEdge(writers.target, sessions=3, sessions_per_client=2) as opened:
        opened.start()
        yield opened


def compiled(edge: SocketlessEdge) -> None:
    """Wait until all grammars are compiled, and go on with their generations."""
    until_s = time.monotonic() + 30.0
    while any(session.queued for session in edge.service.sessions) and time.monotonic() < until_s:
        edge.service.compiler.run_callbacks()
        time.sleep(0.005)


def tokens(edge: SocketlessEdge, count: int, client: bytes = b"me") -> list[int]:
    results: list[int] = []
    while len(results) < count:
        reply, frames = edge.reply_all(client)
        assert isinstance(reply, m.Tokens), reply
        results += decode_ids(frames[0], 2**16).tolist()
    return results


def test_what_comes_meanwhile_is_served_in_order(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(begin(session, REGEX))
    edge.deliver(session.pull(6))
    assert edge.replies == []
    info = tokens(edge, 6)
    again = RawSession()
    edge.deliver(begin(again, REGEX))
    compiled(edge)
    edge.deliver(again.pull(6))
    assert tokens(edge, 6) == info


def test_hints_wait_too(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(begin(session, REGEX, protocol="ahead", temperature=0.0))
    edge.deliver(session.hint([5, 6]))
    compiled(edge)
    assert edge.metrics.hints["kept"] == 1


def test_the_last_generation_goes_on_until_then(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(session.begin(PROMPT))
    old = session.window([1])
    edge.deliver(begin(session, REGEX))
    edge.deliver(old)
    reply = edge.reply()
    assert isinstance(reply, m.Verdict)
    assert reply.generation == 0


@pytest.mark.parametrize("wrong", [b"(", b"a" * 70_000], ids=["no regex", "too large"])
def test_a_refused_grammar_refuses_all_that_waits(edge: SocketlessEdge, wrong: bytes) -> None:
    session, code = RawSession(), "bad-grammar" if len(wrong) < 2**16 else "too-large"
    edge.deliver(begin(session, wrong))
    edge.deliver(session.pull(6))
    edge.fails(code)
    edge.fails(code if code == "bad-grammar" else "unknown-session")
    assert len(edge.service.sessions) == 0
    edge.deliver(begin(session, wrong))  # now it is known, and refused at once
    assert len(edge.service.sessions) == 0
    edge.fails(code)


def test_a_later_generation_takes_the_place(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(begin(session, b"("))
    edge.deliver(begin(session, REGEX))
    edge.deliver(session.pull(3))
    assert len(tokens(edge, 3)) == 3
    session.generation = 0
    edge.deliver(begin(session, REGEX))
    edge.fails("diverged")


@pytest.mark.parametrize("message", [m.Cancel, m.Close])
def test_it_can_be_given_up(edge: SocketlessEdge, message: Any) -> None:
    session = RawSession()
    edge.deliver(begin(session, REGEX))
    edge.deliver(session.pull(3))
    more = {} if message is m.Close else {"generation": session.generation}
    edge.deliver([m.encode(message(session=session.id, **more))])
    compiled(edge)
    edge.turn()
    assert edge.replies == []
    edge.deliver(begin(session, REGEX))
    edge.deliver(session.pull(3))
    assert len(tokens(edge, 3)) == 3


def test_what_is_sent_again_takes_no_more_room(writers: Pair) -> None:
    """A device that hears nothing repeats its window; there is room for it, once."""
    with SocketlessEdge(writers.target, message_mib=1) as edge:
        sessions = [RawSession() for _ in range(2)]
        for session in sessions:
            edge.deliver(begin(session, REGEX, protocol="dsd"))
        for _ in range(4):
            edge.deliver([*sessions[0].window([0]), bytes(600_000)])
            edge.deliver(sessions[0].hint([1]))
        assert edge.replies == []
        edge.deliver([*sessions[1].window([0]), bytes(600_000)])
        edge.fails("rate-limited")
        compiled(edge)
        edge.fails("malformed")  # no such q: but served, once
        assert edge.replies == []


def test_few_hints_wait(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(begin(session, REGEX, protocol="ahead", temperature=0.0))
    for _ in range(100):
        edge.deliver(session.hint([5, 6]))
    compiled(edge)
    assert 0 < sum(edge.metrics.hints.values()) < 20


def parked(edge: SocketlessEdge, monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """Let nothing be compiled."""
    compiler = edge.service.compiler
    monkeypatch.setattr(compiler, "start", lambda: None)
    return compiler


def test_nothing_is_compiled_for_a_session_that_ended(
    edge: SocketlessEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a revoked key, nor for a session that another one displaced: that is told so."""
    compiler, limits = parked(edge, monkeypatch), EdgeLimits(sessions=3)
    edge.service.apply_config(limits, {b"me": "a", b"you": "b", b"they": "c"})
    for _ in range(2):
        edge.deliver(begin(RawSession(), REGEX))
    for client in (b"you", b"they"):
        edge.deliver(RawSession().begin(PROMPT), client=client)
    assert sum(map(len, compiler._waiting.values())) == 1
    edge.fails("unknown-session")
    edge.service.apply_config(limits, {b"you": "b"})
    assert not compiler._waiting


def test_one_that_is_given_up_leaves_no_session(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(begin(session, REGEX))
    edge.deliver([m.encode(m.Cancel(session=session.id, generation=session.generation))])
    assert len(edge.service.sessions) == 0


def test_what_fails_refuses_its_own_generation_alone(
    edge: SocketlessEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the serving thread as in that of the grammars, in which the parser may panic."""

    class Panic(BaseException):
        """As Rust's are: no `Exception`."""

    def panics(*_: object, **__: object) -> Any:
        raise Panic

    def fails(*_: object) -> Any:
        raise ZeroDivisionError

    for owner, name, failing in (
        (edge.service.compiler._grammars, "constraint", panics),
        (edge.service._starter._logits_processors, "create", fails),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            edge.deliver(begin(RawSession(), REGEX))
            edge.fails("internal")
    assert len(edge.service.sessions) == 0
    session = RawSession()
    edge.deliver(begin(session, REGEX))
    edge.deliver(session.pull(3))
    assert len(tokens(edge, 3)) == 3


def test_no_other_client_joins_it(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(begin(session, REGEX))
    edge.deliver(session.pull(1))
    edge.deliver(session.pull(1), client=b"another")  # nor does it take the place of what waits
    assert isinstance(edge.reply(b"another"), m.Failure)
    edge.deliver([m.encode(m.Close(session=session.id))], client=b"another")
    assert len(tokens(edge, 1)) == 1


def test_it_holds_its_place(writers: Pair) -> None:
    """A session that waits for a grammar is not idle, however long it waits."""
    with SocketlessEdge(writers.target, sessions=1, idle_s=1e-9, expire_s=1e-9) as edge:
        first, second = RawSession(), RawSession()
        edge.deliver(begin(first, REGEX), client=b"one")
        edge.service.expire()
        edge.deliver(second.begin(PROMPT), client=b"two")
        refused = edge.reply(b"two")
        assert isinstance(refused, m.Failure)
        assert refused.code == "too-many-sessions"


def test_a_drain_refuses_what_waits(edge: SocketlessEdge) -> None:
    session = RawSession()
    edge.deliver(begin(session, REGEX))
    edge.deliver(session.pull(1))
    edge.service.drain()
    edge.fails("draining")
    edge.fails("draining")
    assert edge.service.drained


@pytest.fixture(scope="module")
def compiler_words(writers: Pair) -> Vocabulary:
    vocabulary = Vocabulary.from_artifact(Artifact.open(writers.target))
    vocabulary.grammars.warm()
    return vocabulary


def order(vocabulary: Vocabulary, items: Sequence[tuple[bytes, str]]) -> list[bytes]:
    """Whose grammars are compiled, in which order, if all wait behind one that is under way."""
    compiler = GrammarCompiler(vocabulary.grammars)
    done: list[Compilation] = []
    results: list[Compilation] = []
    try:
        for owner, text in ((b"first", many(300)), *items):
            done.append(Compilation(owner, Grammar("json", text), 1, results.append))
            compiler.submit(done[-1])
        until_s = time.monotonic() + 60.0
        while len(results) < len(done) and time.monotonic() < until_s:
            compiler.run_callbacks()
            time.sleep(0.002)
        assert not any(result.error for result in results)
        return [result.owner for result in results][1:]
    finally:
        compiler.close()


def test_keys_take_turns(compiler_words: Vocabulary) -> None:
    """Whoever has used least of the processor is next; numbers of grammars do not count."""
    costly = [(b"bob", many(250) + " " * at) for at in range(4)]
    cheap = [(b"alice", f'{{"const": "a{at}"}}') for at in range(4)]
    assert order(compiler_words, [*costly, *cheap])[:5] == [b"bob", *[b"alice"] * 4]


@pytest.fixture(scope="module")
def daemon(writers: Pair, key_folders: dict[str, Path]) -> Iterator[Daemon]:
    flags = ("--target", writers.target, "--threads", 1, "--keys", key_folders["edge"])
    with running(*flags, "--rate", 1e6) as item:
        yield item


def trial_of(pid: int) -> int:
    """The process in which this one tries grammars."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == pid
                and b"pilotfish.engines.grammar_trial" in (path / "cmdline").read_bytes()
            ):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("there is none")


def test_a_trial_that_stood_still_bars_nobody(
    daemon: Daemon, writers: Pair, key_folders: dict[str, Path]
) -> None:
    schema = {"const": "ab"}
    requests: dict[str, Any] = {"protocol": "stream", "schema": schema, "max_tokens": 12}
    with (
        Device(writers.draft, daemon.endpoint, key_folders["alice"], threads=1) as alice,
        Device(writers.draft, daemon.endpoint, key_folders["bob"], threads=1) as bob,
    ):
        os.kill(trial_of(daemon.pid), signal.SIGSTOP)
        for device in (alice, bob, alice):
            assert device.generate(PROMPT, **requests).text == '"ab"'


def test_grammars_of_one_key_delay_nobody_else(
    daemon: Daemon, key_folders: dict[str, Path]
) -> None:
    """Beside them another key has all its rounds; they are long under way when these are over."""
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    with RawClient(daemon.endpoint, alice) as honest, RawClient(daemon.endpoint, bob) as hostile:
        session, theirs = RawSession(), [RawSession() for _ in range(8)]
        honest.send(*session.begin(PROMPT))
        session.go_on(honest, 2, [1])
        for at, item in enumerate(theirs):
            hostile.send(*begin(item, f"{many(400)}{' ' * at}".encode(), "json"))
            hostile.send(*item.pull(1))
        session.go_on(honest, 30, [1])
        info = [reply for reply in hostile.settle() if isinstance(reply, m.Tokens | m.Failure)]
        assert len(info) < 4
        while len(info) < len(theirs):
            info.append(hostile.receive(30.0))
        assert all(isinstance(reply, m.Tokens) for reply in info), info
