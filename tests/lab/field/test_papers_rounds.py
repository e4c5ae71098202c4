"""Figures of acceptance, and of times and bytes: real rounds over a plain or an emulated link."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.device_runtime.record import Round, Timings
from pilotfish.lab.field.papers import PAPERS
from pilotfish.lab.field.papers.figure import Bench
from pilotfish.lab.field.papers.measured_rounds import resampled, sum_rounds
from pilotfish.lab.field.papers.model_rows import ModelRows
from pilotfish.lab.field.papers.sheet import interval
from pilotfish.lab.field.papers.tslt_acceptance import acceptance_at
from pilotfish.lab.pairs import OpenPair
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.theory import betas, theta
from pilotfish.speculation.truncation import truncate

DSSD = {figure.key: figure for figure in PAPERS["dssd"].measurable}


@pytest.fixture
def bench(pair) -> Bench:
    return Bench(pair=OpenPair(*pair), prompts=("abc",), threads=1)


def some_rounds(*verify_s: float) -> list[Round]:
    """Rounds of 3 drafts, of which 2 are accepted; the pass of each takes this long."""
    return [
        Round(
            protocol="dsd", start=0, window=3, accepted=2, tokens=[1, 2, 3], uplink_bytes=100,
            downlink_bytes=10, pass_s=seconds,
            timings=Timings(draft=0.3, encode=0.1, uplink=0.5, queue=0.1, verify=seconds,
                            downlink=0.25, settle=0.1),
        )
        for seconds in verify_s
    ]  # fmt: skip


def test_sums_leave_out_the_first_and_the_last_round():
    sums = sum_rounds(some_rounds(9.0, 1.0, 2.0, 9.0))
    assert (sums.rounds, sums.tokens, sums.verified, sums.accepted) == (2, 6, 6, 4)
    assert (sums.edge_s, sums.up_bytes, sums.down_bytes) == (3.0, 200, 20)
    assert sums.draft_s == pytest.approx(0.6)
    assert sums.other_s == pytest.approx(0.6)
    assert sums.link_s == pytest.approx(1.5)
    assert sums.compute_s == pytest.approx(4.2)


def test_a_ratio_of_sums_is_over_all_prompts_with_an_interval_over_prompts():
    answers = [sum_rounds(some_rounds(9.0, seconds, 9.0)) for seconds in (1.0, 2.0, 3.0, 6.0)]
    rounds = resampled(answers)
    value = interval("verify", rounds.edge_s / rounds.rounds)
    assert value["verify"] == 3.0
    assert 1.0 <= value["verify_low"] < 3.0 < value["verify_high"] <= 6.0


def test_a_printed_cell_with_two_values_shows_both():
    rows = {tuple(row.values())[:4]: row for row in DSSD["table3"].printed()}
    assert rows["dssd", 20, 100, 8]["speed_up_67b_printed"] == "0.92 / 1.04"
    assert rows["dsd", 20, 50, 8]["speed_up_67b_printed"] == 0.72
    assert rows["dssd", 20, 100, 6]["speed_up_13b_printed"] == 1.58
    assert len(DSSD["table2"].printed()) == 12


def test_rounds_over_emulated_links(bench):
    columns = DSSD["table3"].columns.keys()
    done = {("dsd", *cell) for cell in ((0, 100, 8), (20, 50, 8), (20, 100, 4), (20, 100, 6))} | {
        ("dssd", *cell) for cell in ((0, 100, 8), (20, 50, 8), (20, 100, 4), (20, 100, 8))
    }
    rows = list(DSSD["table3"].measure(bench, done))
    assert [(row["protocol"], row["gamma"]) for row in rows] == [("dssd", 6), ("dsd", 8)]
    for row in rows:
        assert columns & row.keys() == {name for name in columns if not name.endswith("printed")}
        assert row["n"] == 1
        assert (
            row["com_s"] >= row["com_modelled_s"] * 0.9 > 0.0
        )  # the emulator delays at least this
        assert row["rounds"] * 0.02 <= row["com_s"]
    assert rows[0]["up_bytes"] < rows[1]["up_bytes"]  # dssd sends no distributions


@pytest.mark.parametrize("key", ["figure5", "figure6"])
def test_speed_up_by_uplink_rate(key, bench):
    figure = next(figure for figure in PAPERS["tslt"].measurable if figure.key == key)
    rows = list(figure.measure(bench, {(1, 32)}))
    vocabulary = bench.pair.target.vocab_size
    assert {row["kept"] for row in rows} == {32, vocabulary}
    assert len(rows) == 2 * 10 - 1
    for top_k in (32, vocabulary):
        speed_ups = [row["speed_up"] for row in rows if row["kept"] == top_k]
        assert speed_ups == sorted(speed_ups)
    assert all(figure.columns.keys() <= row.keys() for row in rows)


@pytest.mark.parametrize("top_k", [1, 3, 12, 40])
def test_acceptance_of_a_truncated_row_is_that_of_the_whole_distributions(top_k):
    rng = np.random.default_rng(top_k)
    logits = (rng.normal(0.0, 2.0, (2, 1, 40))).astype(np.float32)
    rows = ModelRows(0, list(logits))
    chain, tree, *shipped, beyond = acceptance_at(rows, 0, [top_k])[0]
    p, q = rows.distribution(0, 0), rows.distribution(1, 0)
    q_hat = np.where(np.isin(np.arange(40), np.argsort(-q)[:top_k]), q, 0.0)
    each = betas(p, q_hat / q_hat.sum(), 2)
    assert (chain, tree) == pytest.approx((each[0], theta(each)))
    sent = truncate(logits[1, 0], Sampling(temperature=1.0, top_k=top_k)).row(0)
    sent_q = np.zeros(40)
    sent_q[sent.support] = sent.probabilities()
    each = betas(p, sent_q, 2)
    assert shipped == pytest.approx([each[0], theta(each)])
    assert not beyond
