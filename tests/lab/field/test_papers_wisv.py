"""wisv's cost model, held against its own Table I and against sums written out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.lab.field.papers import wisv
from pilotfish.lab.field.papers.wisv_printed import CELLS, TABLE1_RTT_MS, WINDOWS
from pilotfish.lab.field.papers.wisv_tables import (
    DRAFTER,
    SIZES,
    TARGET,
    acceptance,
    break_even_rtt_ms,
    figure4,
    latency_s,
    mismatches,
    round_s,
    table1,
)
from pilotfish.speculation.latency import Link
from pilotfish.speculation.theory import tokens_per_round

links = st.builds(
    Link, rtt_s=st.floats(0.0, 0.5), up_bps=st.floats(1e5, 1e9), down_bps=st.floats(1e5, 1e9)
)
windows = st.integers(1, 64)
losses = st.floats(0.0, 0.5)


def test_table_1_has_every_printed_cell():
    assert len(CELLS) == 5 * 3 * 2
    assert CELLS[10, "greedy", 500] == (7.616, 6.607, 31.912, 27.683)
    assert CELLS[24, "reject", 20] == (65.493, 9.505, 22.072, 3.203)
    assert CELLS[64, "wisv", 20] == (17.394, 17.343, 12.092, 12.057)


def test_the_papers_claims_are_those_of_its_table():
    best, greedy = CELLS[64, "wisv", 20], CELLS[64, "greedy", 20]
    assert best.aal / greedy.aal == pytest.approx(1.608, abs=0.001)  # + 60.8 %, they say
    assert best.rounds / greedy.rounds == pytest.approx(1 - 0.373, abs=0.001)
    faster = CELLS[64, "wisv", 500].latency_s / CELLS[64, "greedy", 500].latency_s
    assert faster == pytest.approx(1 - 0.314, abs=0.001)


@pytest.mark.parametrize("key", CELLS, ids=str)
def test_average_accepted_length_is_throughput_times_latency_over_rounds(key):
    cell = CELLS[key]
    aal = wisv.eq_20_accepted_length(cell.throughput, cell.latency_s, cell.rounds)
    assert aal == pytest.approx(cell.aal, rel=4e-4)


@pytest.mark.parametrize("key", CELLS, ids=str)
def test_one_fitted_constant_gives_every_latency_of_table_1(key):
    window, method, mbps = key
    model_s = latency_s("fh" if method == "wisv" else method, window, mbps, TABLE1_RTT_MS)
    off = 0.055 if (method, mbps) == ("wisv", 20) else 0.003
    assert model_s == pytest.approx(CELLS[key].latency_s, rel=off)


@given(windows, links, losses, losses)
def test_full_upload_written_out(window, link, per_up, per_down):
    up = window * (17 + 2048 * 16)
    seconds = link.rtt_s + up / (link.up_bps * (1 - per_up))
    seconds += (8 + 17) / (link.down_bps * (1 - per_down))
    upload = wisv.eq_5_full_upload_bits(window, SIZES)
    feedback = wisv.eq_4_feedback_bits(SIZES)
    assert wisv.eq_6_exchange_s(upload, feedback, link, per_up, per_down) == pytest.approx(seconds)


@given(windows, st.integers(1, 64), links)
def test_selective_upload_written_out(window, positions, link):
    sizes = wisv.MessageBits(
        token=17, position=8, hidden=wisv.eq_3_hidden_bits(2048, 16), overhead_up=320,
        overhead_down=240,
    )  # fmt: skip
    up = (window * 17 + 320) + (positions * 2048 * 16 + 320)
    down = (positions * 8 + 240) + (8 + 17 + 240)
    seconds = 2 * link.rtt_s + up / link.up_bps + down / link.down_bps
    assert wisv.eq_10_selective_s(window, positions, sizes, link) == pytest.approx(seconds)


@given(windows, links)
def test_selective_upload_asks_for_nothing_where_nothing_differs(window, link):
    ids, feedback = wisv.eq_7_first_upload_bits(window, SIZES), wisv.eq_4_feedback_bits(SIZES)
    once = wisv.eq_6_exchange_s(ids, feedback, link)
    assert wisv.eq_10_selective_s(window, 0, SIZES, link) == once


def test_flops_of_a_token_are_two_for_each_weight_and_the_attention():
    # 1.236e9 and 8.03e9 parameters, of which the 1B shares its embedding and the 8B has another
    assert DRAFTER.eq_13_token_flops(0) == pytest.approx(2 * 1.236e9, rel=0.001)
    assert TARGET.eq_13_token_flops(0) == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.001)
    attention = DRAFTER.eq_13_token_flops(1000) - DRAFTER.eq_13_token_flops(0)
    assert attention == 16 * 2 * (2 * 1000 * 2048)  # scores and weighted values, 2 FLOPs each


@given(st.integers(0, 500), st.integers(1, 32))
def test_drafting_adds_a_pass_over_a_context_one_longer(context, window):
    longer = wisv.eq_12_draft_flops(DRAFTER, context, window + 1)
    step = longer - wisv.eq_12_draft_flops(DRAFTER, context, window)
    assert step == pytest.approx(DRAFTER.eq_13_token_flops(context + window))
    assert wisv.eq_15_verify_flops(TARGET, context, 1) == TARGET.eq_13_token_flops(context)


@given(st.floats(0.01, 0.99), st.integers(2, 64))
def test_acceptance_undoes_tokens_per_round(alpha, window):
    assert acceptance(tokens_per_round(alpha, window), window) == pytest.approx(alpha, abs=1e-6)


@pytest.mark.parametrize("mbps", [20, 500])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_break_even_rtt_separates_full_from_selective(mbps, window):
    rtt_ms = break_even_rtt_ms(window, mbps)
    full, selective = (round_s(method, window, mbps, rtt_ms) for method in ("fh", "sh"))
    assert full == pytest.approx(selective)
    assert round_s("fh", window, mbps, rtt_ms + 1) < round_s("sh", window, mbps, rtt_ms + 1)
    assert 0 < mismatches(window, mbps)[1] <= 1


@pytest.mark.parametrize("window", WINDOWS)
def test_mismatches_are_those_of_independent_positions(window):
    positions, any_at_all = mismatches(window, 500)
    matching = 1 - positions / window
    assert tokens_per_round(matching, window) == pytest.approx(CELLS[window, "greedy", 500].aal)
    assert any_at_all == pytest.approx(1 - matching**window)


def test_figure_4_has_the_regimes_that_the_paper_describes():
    quicker = {(r["rate_mbps"], r["rtt_ms"], r["window"]): r["quicker"] for r in figure4().rows}
    assert all(quicker[20, 5, window] == "sh" for window in WINDOWS)
    assert all(quicker[500, 50, window] == "fh" for window in WINDOWS)
    for row in figure4().rows:
        assert row["fh_s"] < row["greedy_s"] < row["reject_s"]


def test_head_is_negligible():
    features = DRAFTER.hidden + TARGET.hidden + 4
    head = wisv.eq_17_head_flops(features, 64)
    assert head == 2 * (features * 64 + 64)
    assert head < 1e-3 * TARGET.eq_13_token_flops(0)


def test_table_1_reports_its_deviations():
    rows = table1().rows
    assert len(rows) == 30
    for row in rows:
        ratio = 1 + row["latency_deviation_percent"] / 100
        assert ratio * row["latency_s"] == pytest.approx(row["latency_model_s"])
        assert math.isfinite(row["aal_deviation_percent"])
