"""A worker that lies: what it says is not believed, its list's policy is applied, all is counted.

The liar is a real worker whose reports are spoilt on their way to the socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.targets import node_client as peer
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.nodes import Ready, Refused, Scored
from pilotfish.wire.protocols import SamplingParams
from tests.conftest import VOCAB
from tests.support.daemons import await_sample, check_exposition, exposition, free_port, scrape
from tests.support.federating import (
    SESSIONS,
    Cast,
    Ensemble,
    Frames,
    Said,
    WorkerThread,
    await_,
    cast_in,
    endless,
    write_list,
)
from tests.support.lying import (
    BROKEN,
    EVERY,
    KEPT,
    MISPLACED,
    NONSENSE,
    REFUSALS,
    WORK,
    Spoil,
    as_it_is,
    federated,
    greeting,
    logits_of,
    once,
    replaced,
    same_logits,
    wanted_of,
)


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Cast:
    return endless(cast_in(tmp_path_factory.mktemp("cast")))


# by what is counted of them, and where they differ
ONE_OF_EACH = (
    "NaN of a half", "a hundred frames", "of the next step", "nothing like a header", "a refusal",
    "nothing", "more than an answer may have",
)  # fmt: skip


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused worker is asked again soon."""
    monkeypatch.setattr(peer, "_RETRY_S", (0.02, 0.5))


@pytest.mark.parametrize("lie", [lie for lie, (event, *_) in EVERY.items() if event != "late"])
def test_under_wait_a_liar_is_asked_again_until_it_is_honest(
    cast: Cast, tmp_path: Path, lie: str
) -> None:
    event, form, spoil = EVERY[lie]
    with federated(cast, tmp_path, late="wait", values=form) as (held, liar):
        liar.lies(once(spoil))
        same_logits(logits_of(held), wanted_of([cast.a, cast.b], form))
        events = held.events("b")
        assert events[event] == 1
        assert ("lied" in events) == (event == "lied")
        assert "dropped" not in events
        assert held.events("a") == {}
        same_logits(logits_of(held, 8), wanted_of([cast.a, cast.b], form))


@pytest.mark.parametrize("lie", EVERY)
def test_under_drop_the_others_answer(cast: Cast, tmp_path: Path, lie: str) -> None:
    event, form, spoil = EVERY[lie]
    late_s = 0.3 if event == "late" else 30.0  # a liar is not waited for
    settings = {"late": "drop", "values": form, "late_s": late_s}
    with federated(cast, tmp_path, **settings) as (held, liar):
        liar.lies(spoil)
        same_logits(logits_of(held), wanted_of([cast.a], form))
        events = held.events("b")
        assert events[event] >= 1
        assert events["dropped"] >= 1
        assert "\n" not in held.target.problem  # it stands in a line to systemd
        if event == "late":
            assert held.target.problem == "b: late"


@pytest.mark.parametrize("lie", ONE_OF_EACH)
def test_under_fail_a_typed_error_names_the_liar(cast: Cast, tmp_path: Path, lie: str) -> None:
    event, form, spoil = EVERY[lie]
    with federated(cast, tmp_path, late="fail", values=form, late_s=0.4) as (held, liar):
        liar.lies(spoil)
        with pytest.raises(TargetLostError, match="b did not answer"):
            logits_of(held)
        assert held.events("b")[event] >= 1
        if event != "late":
            liar.is_honest()
            await_(lambda: held.target.problem == "", turn=held.target.collect_scores)
            same_logits(logits_of(held, 8), wanted_of([cast.a, cast.b], form))


def test_an_answer_that_comes_twice_is_a_lie(cast: Cast, tmp_path: Path) -> None:
    """The pass ends with the first answer, which was right; so does the next pass."""
    with federated(cast, tmp_path) as (held, liar):
        liar.lies(once(replaced(as_it_is, as_it_is)))
        wanted = wanted_of([cast.a, cast.b], "fp16")
        same_logits(logits_of(held), wanted)
        await_(lambda: "lied" in held.events("b"), turn=held.target.collect_scores)
        same_logits(logits_of(held, 8), wanted)
        assert held.events("b")["lied"] == 1


def of_two(tell: Callable[[Said, Said], Iterable[Said]]) -> Spoil:
    """It keeps an answer back until there are two, and tells these together."""
    lines: list[Said] = []

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        if not isinstance(message, Scored):
            return [(message, frames)]
        lines.append((message, frames))
        return tell(*lines) if len(lines) == 2 else []

    return spoil


def test_answers_that_are_told_the_wrong_way_round_are_a_lie(cast: Cast, tmp_path: Path) -> None:
    """They have as many rows each: by their number alone they would be believed."""
    with federated(cast, tmp_path, late="drop") as (held, liar):
        liar.lies(of_two(lambda first, second: [second, first]))
        target = held.target
        target.start(1, [WORK])
        target.start(2, [WORK._replace(slot=2)])
        left = {1, 2}
        await_(
            lambda: not left,
            turn=lambda: left.difference_update(each.number for each in target.collect_scores()),
        )
        assert held.events("b")["lied"] == 1


def test_what_comes_behind_nonsense_is_not_believed(cast: Cast, tmp_path: Path) -> None:
    """Two passes are under way; the first answer is nonsense, and the second comes at once."""
    with federated(cast, tmp_path, late="drop") as (held, liar):
        liar.lies(of_two(lambda first, second: [(first[0], [b"nonsense"]), second]))
        target = held.target
        target.start(1, [WORK])
        target.start(2, [WORK._replace(slot=2)])
        finished: dict[int, NDArray[np.float32]] = {}

        def receive() -> None:
            finished.update(
                {each.number: each.outputs[0].logits for each in target.collect_scores()}
            )

        await_(lambda: len(finished) == 2, turn=receive)
        for logits in finished.values():
            same_logits(logits, wanted_of([cast.a], "fp16"))
        assert held.events("b")["lied"] == 1


# No hot loop


def flood(spoil: Spoil) -> Spoil:
    """The lie, and behind it everything that could have the liar asked again at once."""

    def spoil_more(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        yield from spoil(message, frames)
        if isinstance(message, Scored):
            for index in range(20):
                yield ready, []
                yield Refused(incarnation=None, code="x", message=f"no {index}"), []
                yield bytes(index + 1), []

    ready = Ready(
        version=1, software="x", model="tiny", digest="x", tokenizer="x", vocab_size=VOCAB,
        hidden_size=64, slots=SESSIONS, context=256,
    )  # fmt: skip
    return spoil_more


@pytest.mark.parametrize(
    "spoil",
    [
        NONSENSE["NaN of a half"][1],
        REFUSALS["a refusal of all"],
        flood(NONSENSE["no frame"][1]),
        pytest.param(MISPLACED["nothing like a header"], marks=pytest.mark.slow),
        pytest.param(BROKEN["more than an answer may have"], marks=pytest.mark.slow),
        greeting(tokenizer="ab" * 32),
    ],
    ids=["nonsense", "refusal", "flood", "no-header", "too-long", "unfit"],
)
def test_a_constant_liar_is_asked_ever_more_rarely(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(peer, "_RETRY_S", (0.1, 30.0))
    greeted: list[float] = []

    def noting(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Ready):
            greeted.append(time.monotonic())
        yield from spoil(message, frames)

    with federated(cast, tmp_path, late="wait") as (held, liar):
        liar.lies(noting)
        liar.service._incarnation = None  # what is asked of it from now on it refuses
        held.target.start(1, [WORK])
        end_s = time.monotonic() + 2.6
        turns = 0
        while time.monotonic() < end_s:
            assert not held.target.collect_scores()
            held.target.pause()
            turns += 1
        pauses = np.diff(greeted)
        assert 3 <= len(greeted) <= 6  # 0.1, 0.2, 0.4, 0.8, 1.6 s between them
        assert (pauses[1:] > 1.4 * pauses[:-1]).all()
        assert turns < 400
        assert len(caplog.records) < 4 * len(greeted)
        liar.is_honest()
        await_(lambda: bool(held.target.collect_scores()), turn=held.target.pause)
        liar.lies(noting)  # a good answer has made up for it all


# A whole edge


@pytest.mark.parametrize("policy", ["wait", "drop", "fail"])
def test_an_edge_over_a_liar(cast: Cast, tmp_path: Path, policy: str) -> None:
    """Sessions live on, and everything is counted."""
    options = {"protocol": "coupled", "temperature": 1.0, "seed": 2, "window": 3, "max_tokens": 30}
    law = SamplingParams(sampling=Sampling(temperature=1.0), seed=2)
    both = Ensemble([cast.a, cast.b], kept=KEPT).decode([3, 1, 4], 30, law)
    first = Ensemble([cast.a], kept=KEPT).decode([3, 1, 4], 30, law)
    port = free_port()
    with WorkerThread(cast.a) as honest, WorkerThread(cast.b) as liar:
        listed = [("a", honest.endpoint), ("b", liar.endpoint)]
        settings = {"late": policy, "late_s": 1.5, "give_up_s": 60.0, "kept": KEPT}
        path = write_list(tmp_path / "w.toml", listed, **settings)
        flags = {"threads": 1, "sessions": SESSIONS, "federate": path, "metrics": port}
        with (
            EdgeServer(cast.a, **flags) as edge,
            Device(cast.draft, edge.endpoint, threads=1) as device,
        ):
            assert device.generate([3, 1, 4], **options).tokens == both
            for lie in ("NaN of a half", "nothing like a header", "more than an answer may have"):
                spoil = EVERY[lie][2]
                liar.lies(once(spoil) if policy == "wait" else spoil)
                if policy == "fail":
                    with pytest.raises(TargetLostError, match="b did not answer"):
                        device.generate([3, 1, 4], **options)
                else:
                    wanted = both if policy == "wait" else first
                    assert device.generate([3, 1, 4], **options).tokens == wanted
                liar.is_honest()
                await_sample(port, 'node_up{node="b"}', 1)
                assert device.generate([3, 1, 4], **options).tokens == both
            figures = scrape(port)
            event = 'node_events_total{{event="{}",node="b"}}'
            for kind in ("lied", "refused", "gone"):
                assert figures[event.format(kind)] >= 1
            assert (event.format("dropped") in figures) == (policy == "drop")
            assert (event.format("late") in figures) == (policy == "fail")
            assert figures['node_up{node="a"}'] == 1
            for node in "ab":
                for direction in ("to", "from"):
                    name = f'node_bytes_total{{direction="{direction}",node="{node}"}}'
                    assert figures[name] > 1000
            assert figures['node_compute_seconds_total{node="a"}'] > 0
            rows = figures['node_rows_total{node="a"}']
            assert rows == figures["ensemble_rows_total"]
            assert 0.0 < figures['node_retained_mass_total{node="a"}'] < rows
            assert 0.0 < figures["ensemble_omitted_mass_total"] < rows
            check_exposition(exposition(port))
