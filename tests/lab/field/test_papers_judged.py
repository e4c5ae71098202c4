"""Table I and figures 3, 4, 5 and 7 of wisv, measured with a tiny pair and a random head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.base.errors import PairMismatchError, RunFileError, UnsupportedError
from pilotfish.cli import main
from pilotfish.cli.field import paper_judge
from pilotfish.cli.field.paper_judge import SweepJudge
from pilotfish.device_runtime.device import Device
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import CurvePoint
from pilotfish.engines.artifact import Artifact
from pilotfish.lab.field.papers import judged, wisv_accuracy, wisv_runs
from pilotfish.lab.field.papers.figure import Bench, Figure
from pilotfish.lab.field.papers.figure_file import read_figure
from pilotfish.lab.field.papers.figure_run import measure_figure
from pilotfish.lab.field.papers.judged import JudgedSetting
from pilotfish.lab.field.papers.wisv_accuracy import FIGURE3
from pilotfish.lab.field.papers.wisv_runs import FIGURE4, FIGURE5, FIGURE7, TABLE1, link_of
from pilotfish.lab.judge.facts_task import make_questions
from pilotfish.lab.pairs import OpenPair, serving
from tests.support.judging import random_head, saved
from tests.support.tiny import tiny_artifact

ASKED = 3  # questions
MOST = 48  # tokens of an answer
CURVE = [CurvePoint(threshold=float(at), forgiven=0.0) for at in np.linspace(0.2, 0.8, 26).tolist()]
FIGURES = (TABLE1, FIGURE4, FIGURE5, FIGURE7)


@pytest.fixture(autouse=True, scope="module")
def few_questions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_judge, "QUESTIONS", ASKED)
        patch.setattr(paper_judge, "MOST", MOST)
        yield


def head_for(pair, **card: Any) -> DecisionHead:
    return random_head(*(Artifact.open(path).manifest for path in pair), curve=CURVE, **card)


@pytest.fixture(scope="module")
def plain_head(pair, tmp_path_factory) -> str:
    """A head that reads no link."""
    return saved(head_for(pair, link=None), tmp_path_factory.mktemp("blind"))


@pytest.fixture(scope="module")
def link_head(pair, tmp_path_factory) -> str:
    """A head that rejects nearly everything over 500 Mbit/s, and nearly nothing over 20 Mbit/s."""
    head = head_for(pair)
    tensors = {name: array.copy() for name, array in head.tensors.items()}
    tensors["w1"][:, -4:] = 0.0
    tensors["w1"][0, -4:-2] = 20.0  # rates up and down
    tensors["w2"][0] = 20.0
    tensors["b2"][:] = -20.0
    return saved(DecisionHead(head.card, tensors), tmp_path_factory.mktemp("link"))


def bench_of(pair, head: str) -> Bench:
    judge = SweepJudge(head, 0)
    return Bench(pair=OpenPair(*pair), prompts=judge.prompts, threads=1, judge=judge)


@pytest.fixture(scope="module")
def plain_bench(pair, plain_head) -> Bench:
    return bench_of(pair, plain_head)


@pytest.fixture(scope="module")
def link_bench(pair, link_head) -> Bench:
    return bench_of(pair, link_head)


def by_identity(figure: Figure, bench: Bench) -> dict[tuple[Any, ...], Any]:
    rows = list(figure.measure(bench, set()))
    assert all(row["n"] == ASKED for row in rows)
    printed = {name for name in figure.columns if "printed" in name}
    assert all(figure.columns.keys() - printed <= row.keys() for row in rows)
    return {figure.identify(row): row for row in rows}


def test_the_rows_have_the_rounds_and_bytes_of_a_real_edge(plain_bench, plain_head, pair):
    """The edge has the same head, which reads no link."""
    table, testbed = by_identity(TABLE1, plain_bench), by_identity(FIGURE7, plain_bench)
    rows = {protocol: table[10, method, 20] for method, protocol in wisv_runs.PROTOCOLS.items()} | {
        "wisv-selective": testbed[10, 2]
    }
    with (
        serving(pair.target, threads=1, head=plain_head) as endpoint,
        Device(pair.draft, endpoint, threads=1) as device,
    ):
        for protocol, row in rows.items():
            answers = [
                device.generate(
                    question, protocol=protocol, window=10, temperature=0.0, max_tokens=MOST
                )
                for question in plain_bench.prompts[:ASKED]
            ]
            rounds = [round_ for answer in answers for round_ in answer.rounds]
            tokens = sum(len(answer.tokens) for answer in answers)
            assert row["rounds"] == pytest.approx(len(rounds) / ASKED)
            assert row["aal"] == pytest.approx(tokens / len(rounds))
            for direction in ("uplink", "downlink"):
                sent = sum(getattr(round_, f"{direction}_bytes") for round_ in rounds)
                # headers vary by some bytes
                assert row[f"{direction.removesuffix('link')}_bytes"] == pytest.approx(
                    sent / len(rounds), rel=0.03, abs=12.0
                )
    assert rows["wisv-full"]["forgiven"] > 0.1


def test_table_1_holds_together(plain_bench):
    rows = by_identity(TABLE1, plain_bench)
    assert len(rows) == len(wisv_runs.ALL_WINDOWS) * 3 * 2
    for (window, method, mbps), row in rows.items():
        greedy = rows[window, "greedy", mbps]
        assert row["aal_over_greedy"] == pytest.approx(row["aal"] / greedy["aal"])
        assert row["latency_over_greedy"] == pytest.approx(row["latency_s"] / greedy["latency_s"])
        assert row["throughput_tps"] * row["latency_s"] == pytest.approx(row["aal"] * row["rounds"])
        if method == "reject":  # the same rounds, and the drafter's distributions on the uplink
            assert (row["aal"], row["rounds"]) == (greedy["aal"], greedy["rounds"])
            assert row["latency_s"] > greedy["latency_s"]
        # a round takes at least the target's pass and the RTT, and at most L passes of the drafter
        round_ms = 1e3 * row["latency_s"] / row["rounds"]
        assert round_ms > 50.0
        if method == "greedy":
            assert round_ms < 60.0 + window * row["draft_ms"] + row["verify_ms"]
        if method != "wisv":
            assert (row["gained"], row["forgiven"]) == (0.0, 0.0)
    sheet = TABLE1.comparison(list(rows.values()), "here")
    whole = next(row for row in sheet.rows if (row["window"], row["method"]) == (64, "wisv"))
    assert whole["aal_over_greedy_printed"] == pytest.approx(15.489 / 10.789)


def test_figure_4_is_table_1_at_50_ms_and_has_a_second_round_trip_in_sh(plain_bench):
    table, rows = by_identity(TABLE1, plain_bench), by_identity(FIGURE4, plain_bench)
    for (mbps, rtt_ms, window), row in rows.items():
        if rtt_ms == 50:
            for name, method in (("greedy", "greedy"), ("reject", "reject"), ("fh", "wisv")):
                expected = table[window, method, mbps]["latency_s"]
                assert row[f"{name}_s"] == pytest.approx(expected)
        assert row["sh_over_greedy"] == pytest.approx(row["sh_s"] / row["greedy_s"])
    for window in wisv_runs.ALL_WINDOWS:
        short, long = rows[500, 5, window], rows[500, 50, window]
        rounds = table[window, "wisv", 500]["rounds"]
        assert long["fh_s"] - short["fh_s"] == pytest.approx(0.045 * rounds)
        again = long["sh_s"] - short["sh_s"] - 0.045 * rounds  # the rounds with a request
        assert 0.0 < again <= 0.045 * rounds + 1e-9
    printed = {FIGURE4.identify(row): row for row in FIGURE4.printed()}
    assert printed[20, 50, 10]["fh_over_greedy_printed"] == pytest.approx(6.816 / 7.617)


def test_figure_5_tells_a_head_that_reads_the_link_from_one_that_does_not(plain_bench, link_bench):
    for row in by_identity(FIGURE5, plain_bench).values():
        assert row["aal_gained"] == row["aal_gained_low"] == row["aal_gained_high"] == 1.0
    rows = by_identity(FIGURE5, link_bench)
    for window in wisv_runs.ALL_WINDOWS:
        good, poor = rows[500, window], rows[20, window]
        assert good["forgiven_with_link"] < 0.1
        assert poor["forgiven_with_link"] == poor["forgiven_without_link"] == 1.0
        assert good["aal_without_link"] == poor["aal_without_link"]
        assert good["aal_gained"] < 1.0 == poor["aal_gained"]


def test_figure_7_uploads_by_the_rule(link_bench):
    rows = by_identity(FIGURE7, link_bench)
    for (_, distance_m), row in rows.items():
        far = distance_m == 20
        expected = ("FH", "wisv-full") if far else ("SH", "wisv-selective")
        assert (row["upload"], row["protocol"]) == expected
        assert row["latency_over_greedy"] == pytest.approx(row["latency_s"] / row["greedy_s"])
    assert len(rows) == 2 * len(wisv_runs.ALL_WINDOWS)


def test_the_figures_share_their_answers_and_leave_out_what_is_done(pair, plain_head, monkeypatch):
    calls = []
    answer = SweepJudge.answer
    monkeypatch.setattr(
        SweepJudge, "answer", lambda *args, **named: calls.append(1) or answer(*args, **named)
    )
    bench = dataclasses.replace(bench_of(pair, plain_head), seed=1)
    for figure in FIGURES:
        rows = list(figure.measure(bench, set()))
        identities = [figure.identify(row) for row in rows]
        assert list(figure.measure(bench, set(identities[1:]))) == rows[:1]
        assert list(figure.measure(bench, set(identities))) == []
    assert len(calls) == 1


def test_figure_3_goes_from_greedy_to_accepting_all(link_bench):
    rows = by_identity(FIGURE3, link_bench)
    assert [row["rho"] for (index, mbps), row in rows.items() if mbps == 20][1:-1] == [
        CURVE[index].threshold for index in wisv_accuracy.INDICES[1:-1]
    ]
    for mbps in (500, 20):
        strict, whole = rows[0, mbps], rows[25, mbps]
        assert (strict["gained"], strict["forgiven"], strict["rho"]) == (0.0, 0.0, 0.0)
        assert (whole["forgiven"], whole["rho"]) == (1.0, 1.0)
        assert whole["aal"] > strict["aal"]
    assert rows[9, 500]["forgiven"] < rows[9, 20]["forgiven"]
    assert list(FIGURE3.measure(link_bench, {*rows} - {(12, 20)})) == [rows[12, 20]]
    assert list(FIGURE3.measure(link_bench, {*rows})) == []
    printed = {FIGURE3.identify(row): row for row in FIGURE3.printed()}
    assert printed[12, 20]["gained_printed"] == pytest.approx(-0.8)
    assert printed.keys() <= rows.keys()


def test_a_head_without_the_26_thresholds_has_no_figure_3(pair, tmp_path):
    head = saved(head_for(pair, name="short"), tmp_path)
    short = bench_of(pair, head)
    short.expect_judge().curve = [0.5]
    with pytest.raises(UnsupportedError, match="26 thresholds"):
        list(FIGURE3.measure(short, set()))


def test_a_bench_without_a_head_or_with_another_pairs_is_refused(pair, plain_bench, tmp_path):
    with pytest.raises(UnsupportedError, match="--head"):
        list(TABLE1.measure(dataclasses.replace(plain_bench, judge=None), set()))
    stranger = tiny_artifact(tmp_path / "stranger", seed=9).path
    other = dataclasses.replace(plain_bench, pair=OpenPair(stranger, pair.target))
    with pytest.raises(PairMismatchError, match="was made for the drafter"):
        list(FIGURE3.measure(other, set()))


def test_questions_that_do_not_fit_the_models_are_refused(plain_bench, monkeypatch):
    monkeypatch.setattr(paper_judge, "MOST", 1000)
    with pytest.raises(UnsupportedError, match="context of 256"):
        plain_bench.expect_judge().answer(plain_bench, [JudgedSetting(4)], costs=False)


def test_the_shipped_head_was_not_made_with_the_questions(monkeypatch):
    monkeypatch.setattr(paper_judge, "QUESTIONS", judged.QUESTIONS)
    first, second = SweepJudge("default", 0), SweepJudge("default", 1)
    assert len(set(first.prompts)) == len(first.prompts) == 30
    assert not set(first.prompts) & set(second.prompts)
    for name, count in {"train": 300, "dev": 60, "test": 500}.items():  # docs/wisv.md
        known = {question.message for question in make_questions(name, count)}
        assert not known & set(first.prompts)


def test_seconds_are_those_of_the_link_that_is_asked(plain_bench):
    (answers,) = plain_bench.expect_judge().answer(plain_bench, [JudgedSetting(4)], costs=True)
    near, far = (answers.costs("greedy", link_of(100, rtt_ms)) for rtt_ms in (10, 30))
    np.testing.assert_allclose(far.seconds - near.seconds, 0.02 * answers.rounds)
    np.testing.assert_array_equal(far.up, near.up)


def test_the_command_states_the_head_and_another_head_does_not_continue(
    pair, plain_head, link_head, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(wisv_accuracy, "INDICES", (0, 9))
    words = ["field", "paper", "wisv", "figure3", "--run", "--draft", pair.draft]
    words += ["--target", pair.target, "--head", plain_head, "--threads", 1, "--save", tmp_path]
    assert main([*map(str, words)]) == 0
    result = read_figure(tmp_path / "wisv_figure3.json")
    assert result is not None
    assert result.facts.head == DecisionHead.load(plain_head).card.sha256
    assert result.facts.prompts == ASKED
    assert f"--head {Path(plain_head).name}" in result.facts.command
    assert str(Path(plain_head).parent) not in result.facts.command
    assert f"decision head {result.facts.head[:8]}" in " ".join(capsys.readouterr().out.split())
    bench = bench_of(pair, plain_head)
    rows = iter(result.rows)

    def stopped(bench, done):
        yield next(rows)
        raise KeyboardInterrupt

    figure = dataclasses.replace(FIGURE3, measure=stopped)
    with pytest.raises(KeyboardInterrupt):
        measure_figure("wisv", figure, bench, tmp_path, "again")
    with pytest.raises(RunFileError, match="head was"):
        measure_figure("wisv", figure, bench_of(pair, link_head), tmp_path, "again")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tslt", "figure3", "--run", "--head", "default"], ["--head", "wisv"]),
        (["wisv", "figure3", "--run", "--prompts", "x"], ["--prompts", "judge sweep"]),
        (["wisv", "figure3", "--head", "default"], ["--head", "--run"]),
    ],
)
def test_options_of_other_papers_are_refused(capsys, words, named):
    assert main(["field", "paper", *words]) == 64
    reply = capsys.readouterr().err
    assert len(reply.splitlines()) == 1
    assert all(name in reply for name in named)
