"""`pilotfish field replay`: the model returns what was recorded, and moves as a link does."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import RunFileError, UnsupportedError
from pilotfish.cli import main
from pilotfish.device_runtime.record import Round, Timings
from pilotfish.lab.field.replay import fastest, replay, replay_token_s, round_s
from pilotfish.lab.field.report.figures import steady_token_ms
from pilotfish.lab.field.run import Run
from pilotfish.speculation.latency import Link, communication_s
from tests.support.made_answers import answer, chosen, recorded

QUICK = Link(rtt_s=0.0, up_bps=math.inf, down_bps=math.inf)

seconds = st.floats(0.0, 0.5)
links = st.builds(Link, rtt_s=seconds, up_bps=st.floats(1e4, 1e9), down_bps=st.floats(1e4, 1e9))


@st.composite
def rounds_over(draw, link):
    """Rounds of an answer whose time on the link is exactly what the model says of it."""
    results = []
    for _ in range(draw(st.integers(1, 6))):
        window = draw(st.integers(1, 16))
        accepted = draw(st.integers(0, window))
        up, down = draw(st.integers(1, 10**6)), draw(st.integers(1, 10**6))
        on_link = communication_s(up, down, link)
        share = draw(st.floats(0.0, 1.0))
        timings = Timings(
            draft=draw(seconds),
            encode=draw(seconds),
            uplink=share * on_link,
            queue=draw(seconds),
            verify=draw(seconds),
            downlink=(1 - share) * on_link,
            settle=draw(seconds),
        )
        results.append(
            Round(
                protocol="dssd",
                start=0,
                window=window,
                accepted=accepted,
                tokens=[0] * (accepted + 1),
                uplink_bytes=up,
                downlink_bytes=down,
                timings=timings,
            )
        )
    return results


def streamed(tokens, *, pass_s=0.02, down=60, rtt_s=0.0, settle_s=0.0):
    """An answer of `stream`: one RTT, then a token a pass."""
    return [
        Round(
            protocol="stream",
            start=at,
            window=0,
            accepted=0,
            tokens=[0],
            uplink_bytes=0 if at else 50,
            downlink_bytes=down,
            timings=Timings(
                verify=pass_s - settle_s, downlink=0.0 if at else rtt_s, settle=settle_s
            ),
        )
        for at in range(tokens)
    ]


def local(tokens, draft_s=0.006):
    return [
        Round(
            protocol="local",
            start=at,
            window=0,
            accepted=0,
            tokens=[0],
            timings=Timings(draft=draft_s, settle=0.001),
        )
        for at in range(tokens)
    ]


# The model


@given(links.flatmap(lambda link: st.tuples(st.just(link), rounds_over(link))))
def test_replay_over_the_recorded_link_is_what_was_recorded(case):
    link, rounds = case
    tokens = sum(len(r.tokens) for r in rounds)
    assert replay_token_s(rounds, link) == pytest.approx(
        sum(r.timings.total for r in rounds) / tokens
    )


@given(st.integers(1, 50), st.floats(1e-3, 0.1), seconds)
def test_a_stream_over_the_recorded_link_is_what_was_recorded(tokens, pass_s, rtt_s):
    """The RTT is that of the first round, which is not replayed."""
    rounds = streamed(1 + tokens, pass_s=pass_s, rtt_s=rtt_s, settle_s=0.2 * pass_s)[1:]
    link = replace(QUICK, rtt_s=rtt_s)
    assert replay_token_s(rounds, link) == pytest.approx(
        sum(r.timings.total for r in rounds) / tokens
    )


@given(links.flatmap(lambda link: st.tuples(st.just(link), rounds_over(link))), st.floats(1.0, 9.0))
def test_a_longer_or_slower_link_is_never_faster(case, factor):
    link, rounds = case
    for wire in (rounds, streamed(4)):
        now = replay_token_s(wire, link)
        assert replay_token_s(wire, replace(link, rtt_s=link.rtt_s * factor)) >= now
        assert replay_token_s(wire, replace(link, up_bps=link.up_bps / factor)) >= now
        assert replay_token_s(wire, replace(link, down_bps=link.down_bps / factor)) >= now


@given(rounds_over(QUICK), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0))
def test_stated_compute_times_take_the_place_of_recorded_ones(rounds, draft_s, verify_s):
    tokens = sum(len(r.tokens) for r in rounds)
    stated = sum(
        draft_s * r.window + r.timings.encode + r.timings.queue + verify_s + r.timings.settle
        for r in rounds
    )
    assert replay_token_s(rounds, QUICK, draft_s, verify_s) == pytest.approx(stated / tokens)
    others = [replace(r, timings=replace(r.timings, draft=9.0, verify=9.0)) for r in rounds]
    assert replay_token_s(others, QUICK, draft_s, verify_s) == pytest.approx(stated / tokens)


def test_one_round_in_numbers():
    round_ = Round(
        protocol="dssd",
        start=0,
        window=4,
        accepted=2,
        tokens=[1, 2, 3],
        uplink_bytes=1000,
        downlink_bytes=2000,
        timings=Timings(draft=0.024, encode=0.001, queue=0.002, verify=0.03, settle=0.003),
    )
    link = Link(rtt_s=0.05, up_bps=1e6, down_bps=8e6)  # 8 ms up, 2 ms down
    assert round_s(round_, link) == pytest.approx(0.024 + 0.001 + 0.06 + 0.002 + 0.03 + 0.003)
    assert round_s(round_, link, draft_s=0.01) == pytest.approx(0.040 + 0.001 + 0.095)
    assert replay_token_s([round_], link, verify_s=0.3) == pytest.approx(0.39 / 3)


def test_a_second_exchange_takes_a_second_rtt():
    far = replace(QUICK, rtt_s=0.05)
    for inquired, trips in ((0, 1), (3, 2)):
        wanted = Round(
            protocol="wisv-selective", start=0, window=4, accepted=4, tokens=[1], inquired=inquired
        )
        assert round_s(wanted, far) == pytest.approx(0.05 * trips)


def test_a_state_of_the_last_token_takes_a_pass_of_the_drafter():
    for protocol, window, passes in (
        ("wisv-full", 4, 5), ("wisv-full", 0, 0), ("wisv-selective", 4, 4), ("greedy", 4, 4),
    ):  # fmt: skip
        drafted = Round(protocol=protocol, start=0, window=window, accepted=0, tokens=[1])
        assert round_s(drafted, QUICK, draft_s=0.01) == pytest.approx(0.01 * passes)


def test_a_link_slower_than_the_pass_holds_up_a_stream():
    slow = Link(rtt_s=0.1, up_bps=1e3, down_bps=4.8e3)  # 60 bytes in 100 ms
    assert replay_token_s(streamed(10), slow) == pytest.approx(0.1)
    assert replay_token_s(streamed(10), slow, verify_s=0.2) == pytest.approx(0.2)


def test_local_knows_no_link():
    far = Link(rtt_s=9.0, up_bps=1.0, down_bps=1.0)
    assert replay_token_s(local(5), far) == pytest.approx(0.007)
    assert replay_token_s(local(5), far, draft_s=0.002, verify_s=7.0) == pytest.approx(0.003)


def test_rounds_without_a_token_are_refused():
    with pytest.raises(UnsupportedError):
        replay_token_s([], QUICK)


# A run


def pair_of_answers(window, accepted, **more):
    """The first round reads the prompt; two of 10 ms drafting and 20 ms verifying follow."""
    item = Round(
        protocol="greedy",
        start=0,
        window=window,
        accepted=accepted,
        tokens=[0] * (accepted + 1),
        uplink_bytes=50,
        downlink_bytes=50,
        timings=Timings(draft=0.0025 * window, verify=0.02),
    )
    first = replace(item, timings=replace(item.timings, verify=5.0))
    return answer([first, item, item], window=window, **more)


def test_a_slow_target_makes_long_windows_pay():
    """T_verify = 10 × T_draft: a pass wants many tokens, until on a long way none pays."""
    stream = answer(streamed(65), protocol="stream", window=None)
    answers = [pair_of_answers(2, 2), pair_of_answers(8, 5), stream]
    near, far = QUICK, replace(QUICK, rtt_s=0.4)
    cheap = replay(answers, [near], draft_s=0.005, verify_s=0.01)
    assert str(fastest(cheap, 0).configuration) == "greedy γ=2"
    slow = replay(answers, [near, far], draft_s=0.005, verify_s=0.05)
    assert [str(fastest(slow, at).configuration) for at in (0, 1)] == ["greedy γ=8", "stream"]
    by_name = {str(item.configuration): item for item in slow}
    assert by_name["greedy γ=8"].modelled_s == [
        pytest.approx((8 * 0.005 + 0.05) / 6),
        pytest.approx((8 * 0.005 + 0.05 + 0.4) / 6),
    ]


def test_prompts_are_not_replayed():
    (result,) = replay([pair_of_answers(2, 2)], [QUICK])
    assert result.measured_s == pytest.approx(0.025 / 3)
    assert result.modelled_s == [pytest.approx(0.025 / 3)]


def test_local_is_best_only_alone():
    alone = answer(local(4), protocol="local", window=None)
    result = replay([alone, pair_of_answers(2, 0)], [QUICK])
    assert fastest(result, 0).configuration.protocol == "greedy"
    assert fastest(replay([alone], [QUICK]), 0).configuration.protocol == "local"


def test_what_auto_chose_counts_to_that():
    auto = pair_of_answers(2, 2, protocol="auto", choice=chosen("greedy", 2, 0.01, []))
    auto = replace(auto, window=None)
    (result,) = replay([pair_of_answers(2, 2), auto], [QUICK])
    assert (str(result.configuration), result.n) == ("greedy γ=2", 2)


@pytest.fixture(scope="module")
def walk(pair, edge, tmp_path_factory):
    path = tmp_path_factory.mktemp("replayed") / "walk.pilotfish"
    options = ["--draft", pair.draft, "--edge", edge.endpoint, "--threads", 1, "--out", path]
    options += ["--protocols", "greedy,stream,local", "--windows", "3", "--repeat", 1]
    assert main(["field", "measure", *map(str, options), "--max-tokens", "16"]) == 0
    return path


def test_a_real_run_in_json(walk, capsys):
    options = ["--link", "rtt=50ms,up=20mbit,down=100mbit", "--link", "rtt=0", "--verify-ms", "40"]
    assert main(["field", "replay", str(walk), *options, "--json", "-"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["modelled"] is True
    assert payload["verify_s"] == pytest.approx(0.04)
    assert payload["links"][0]["up_bps"] == 20e6
    assert payload["links"][1]["up_bps"] is None
    link = Link(rtt_s=0.05, up_bps=20e6, down_bps=100e6)
    with Run.open(walk) as run:
        answers = list(run.answers())
    assert [each["protocol"] for each in payload["figures"]] == ["greedy", "stream", "local"]
    for result in payload["figures"]:
        mine = [item for item in answers if item.protocol == result["protocol"]]
        modelled = [replay_token_s(item.rounds[1:], link, verify_s=0.04) for item in mine]
        assert result["n"] == len(mine)
        assert result["modelled_token_s"][0] == pytest.approx(statistics.median(modelled))
        measured = statistics.median(steady_token_ms(item) for item in mine)
        assert result["measured_token_s"] == pytest.approx(measured * 1e-3)
        if result["protocol"] == "greedy":
            assert result["modelled_token_s"][0] > result["modelled_token_s"][1] > 0.04 / 4


def test_a_real_run_as_a_table(walk, capsys):
    assert main(["field", "replay", str(walk), "--link", "rtt=50ms,up=20mbit,down=100mbit"]) == 0
    out = capsys.readouterr().out
    for words in ("RTT 50 ms, up 20 Mbit/s, down 100 Mbit/s (modelled)", "greedy γ=3", "best"):
        assert words in out
    assert "modelled, not measured. A drafter's pass: as recorded; a target's" in out


# What goes wrong


@pytest.mark.parametrize(
    "link",
    [
        "",
        "up=20mbit",
        "rtt=50",
        "rtt=-1ms",
        "rtt=1ms,rtt=2ms",
        "rtt=1ms,up=0mbit",
        "rtt=1ms,loss=1",
    ],
)
def test_conditions_that_mean_nothing(walk, capsys, link):
    with pytest.raises(SystemExit) as ended:
        main(["field", "replay", str(walk), "--link", link])
    assert ended.value.code == 2
    assert "--link" in capsys.readouterr().err.splitlines()[-1]


def test_files_without_anything_to_replay(tmp_path, capsys):
    short = recorded(tmp_path / "short.pilotfish", [answer(streamed(1), protocol="stream")])
    for path in (short, tmp_path / "absent.pilotfish"):
        assert main(["field", "replay", str(path), "--link", "rtt=1ms"]) == RunFileError.exit_code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("pilotfish: ")


def test_answers_under_ahead_are_left_out():
    pair = pair_of_answers(2, 2)
    hinted = pair_of_answers(2, 2, protocol="auto", choice=chosen("ahead", 0, 0.01, []))
    assert replay([pair, hinted], [QUICK]) == replay([pair], [QUICK])
    with pytest.raises(RunFileError, match="ahead"):
        replay([hinted], [QUICK])
