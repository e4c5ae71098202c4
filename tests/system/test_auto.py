"""protocol="auto" between a real device and a real edge."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.plan import Auto
from pilotfish.device_runtime.record import Choice, Round
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire.protocols import LOCAL, STREAM, Ahead
from pilotfish.wire.request import Options
from tests.conftest import Pair

AHEAD = Ahead.name
WINDOW_1 = ("greedy", 1)


@pytest.mark.parametrize("among", [None, ["greedy"]])
def test_the_text_is_the_targets_own(device: Device, among: list[str] | None) -> None:
    wanted = device.generate("abc", protocol="stream", max_tokens=40)
    for _ in range(4):
        answer = device.generate("abc", protocol=Auto(among=among), max_tokens=40)
        assert answer.tokens == wanted.tokens
        assert answer.choice is not None
        assert answer.choice.protocol == answer.protocol
        assert answer.protocol in (among or ("greedy", AHEAD, STREAM))


@pytest.mark.parametrize("among", [None, ["coupled"]])
def test_a_sampled_text_with_a_seed_can_be_had_again(
    device: Device, among: list[str] | None
) -> None:
    wanted = device.generate("abc", protocol="stream", temperature=1.0, seed=5, max_tokens=30)
    for window in (None, 1, 7, None):
        answer = device.generate(
            "abc",
            protocol=Auto(among=among),
            window=window,
            temperature=1.0,
            seed=5,
            max_tokens=30,
        )
        assert answer.tokens == wanted.tokens
        assert answer.protocol in (among or ("coupled", AHEAD, STREAM))


@pytest.mark.timing
def test_a_changed_link_is_followed_within_two_answers(pair: Pair, edge: EdgeServer) -> None:
    auto = Auto(among=["greedy", "stream"])
    with (
        Emulator(edge.endpoint) as link,
        Device(pair.draft, link.endpoint, threads=1) as device,
    ):

        def after(count: int) -> Choice:
            """What the last of so many answers chose."""
            answers = [device.generate("abc", protocol=auto, max_tokens=40) for _ in range(count)]
            assert answers[-1].choice is not None
            return answers[-1].choice

        def speculating_s(choice: Choice) -> float:
            """What a token was expected to cost at window 1, in which there is half an RTT."""
            return next(f.token_s for f in choice.forecasts if (f.protocol, f.window) == WINDOW_1)

        near = speculating_s(after(4))
        for conditions in (Conditions(rtt_s=0.15), Conditions()):
            pieces = device.stream("abc", protocol=auto, max_tokens=40)
            next(pieces)
            link.set(conditions)  # in the middle of an answer
            for _ in pieces:
                pass
            choice = after(2)
            if conditions.rtt_s:
                assert choice.protocol == STREAM
                assert speculating_s(choice) > near + 0.06
            else:
                assert speculating_s(choice) < 0.06


@pytest.mark.timing
def test_the_target_streams_where_waiting_does_not_pay(pair: Pair, edge: EdgeServer) -> None:
    """`ahead` and `stream` take equally long if no first hint is right, which chance decides."""
    with (
        Emulator(edge.endpoint, Conditions(rtt_s=0.15)) as link,
        Device(pair.draft, link.endpoint, threads=1) as device,
    ):
        for auto, streaming in (
            (Auto(), (AHEAD, STREAM)),
            (Auto(among=["greedy", STREAM]), (STREAM,)),
        ):
            protocols = [
                device.generate("abc", protocol=auto, max_tokens=30).protocol for _ in range(4)
            ]
            assert protocols[-1] in streaming


def test_a_thrifty_answer_has_the_same_text(device: Device) -> None:
    wanted = device.generate("abc", protocol="stream", max_tokens=40)
    for _ in range(3):
        answer = device.generate("abc", protocol=Auto(thrift=True), max_tokens=40)
        assert answer.tokens == wanted.tokens
        assert answer.choice is not None
        assert "of the edge's time" in answer.choice.reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossy_answers_are_never_the_drafters_alone(device: Device, temperature: float) -> None:
    """Though the drafter alone is the quickest: it is chosen where its name is given."""
    options: Options = {"max_tokens": 2, "temperature": temperature}
    named = Auto(among=[LOCAL, STREAM])
    assert device.generate("abc", protocol=named, **options).protocol == LOCAL
    chosen = [
        device.generate("abc", protocol=Auto(lossy=True), **options).protocol for _ in range(50)
    ]
    assert LOCAL not in chosen


def test_a_lossy_answer_without_the_edge_is_the_drafters(pair: Pair) -> None:
    with (
        EdgeServer(pair.target, threads=1) as edge,
        Device(pair.draft, edge.endpoint, threads=1, on_link_loss="local") as device,
    ):
        assert device.generate("abc", protocol=Auto(lossy=True), max_tokens=2).protocol != LOCAL
        edge.stop()
        pieces = [*device.stream("abc", protocol=Auto(lossy=True), max_tokens=4)]
        assert {piece.origin for piece in pieces if piece.tokens} == {"local"}


def test_without_an_edge_there_is_only_local(pair: Pair) -> None:
    with Device(pair.draft, threads=1) as alone:
        assert alone.generate("abc", protocol=Auto(lossy=True), max_tokens=4).protocol == LOCAL
        with pytest.raises(UnsupportedError, match="only protocol local"):
            alone.generate("abc", protocol="auto", max_tokens=4)


def test_an_unknown_policy(device: Device) -> None:
    with pytest.raises(UnsupportedError, match="no policy 'best'"):
        device.generate("abc", protocol=Auto(policy="best"))


def test_whoever_asked_is_told_of_every_round(pair: Pair, edge: EdgeServer) -> None:
    messages: list[Round] = []
    with Device(pair.draft, edge.endpoint, threads=1, on_round=messages.append) as device:
        for protocol in ("greedy", "stream", "local"):
            messages.clear()
            pieces = device.stream("abc", protocol=protocol, max_tokens=12)
            next(pieces)
            assert len(messages) == 1  # before the round's text is read
            for _ in pieces:
                pass
            assert device.last is not None
            assert messages == device.last.rounds


def device_run(pair: Pair, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pilotfish", "device", "run", "abc", "--draft", pair.draft]
    return subprocess.run(
        [*map(str, [*command, *arguments])], capture_output=True, text=True, check=False
    )


def test_the_command(pair: Pair, edge: EdgeServer) -> None:
    done = device_run(
        pair, "--edge", edge.endpoint, "--protocol", "auto", "--among", "greedy,stream",
        "--max-tokens", 12, "--json", "-", "--stats",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["protocol"] in ("greedy", "stream")
    assert figures["choice"]["protocol"] == figures["protocol"]
    assert figures["link"]["rtt"]["value"] > 0
    assert figures["probing"]["pings"] <= 1
    assert "ms per token predicted" in done.stderr


def test_the_command_knows_thrift(pair: Pair, edge: EdgeServer) -> None:
    done = device_run(
        pair, "--edge", edge.endpoint, "--thrift", "--max-tokens", 8, "--json", "-", "--stats"
    )
    assert done.returncode == 0, done.stderr
    choice = json.loads(done.stdout)["choice"]
    assert "of the edge's time" in choice["reason"]
    assert {hints for *_, hints, _, _ in choice["forecasts"]} == {"", "all", "edge"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--protocol", "greedy", "--among", "stream"],
            "--among, --lossy, --policy, --rtt-threshold and --thrift go",
        ),
        (["--protocol", "auto", "--among", "gredy"], "no protocol 'gredy'"),
        (["--protocol", "auto", "--policy", "threshold"], "allow lossy protocols"),
        (["--protocol", "auto", "--window", "auto"], "chooses the window itself"),
    ],
)
def test_the_command_says_what_is_wrong(
    pair: Pair, edge: EdgeServer, arguments: list[str], message: str
) -> None:
    done = device_run(pair, "--edge", edge.endpoint, *arguments)
    assert done.returncode == 64
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
