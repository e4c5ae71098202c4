"""Measured figures of specfed and decentralized: their rows on tiny models, their arithmetic."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from pilotfish.base.errors import (
    EdgeLostError,
    PairMismatchError,
    PilotfishError,
    UnsupportedError,
)
from pilotfish.lab.field.papers import (
    decentralized_nodes,
    decentralized_printed,
    decentralized_runs,
    decentralized_tau,
    specfed_runs,
)
from pilotfish.lab.field.papers.emulated_pipeline import EmulatedPipeline, make_keys
from pilotfish.lab.field.papers.figure import Bench
from pilotfish.lab.pairs import OpenPair
from pilotfish.speculation.theory import tokens_per_round
from tests.support.pipelines import made_pair
from tests.support.tiny import tiny_artifact

PROMPTS = ("abc", "bcd ef", "c")


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    """A pair that can be cut into stages, and whose answers do not end."""
    paths = made_pair(tmp_path_factory.mktemp("pair"), 512, endless=True)
    return Bench(pair=OpenPair(*paths), prompts=PROMPTS, threads=1)


# specfed


@pytest.fixture(scope="module")
def federation(bench) -> Bench:
    worker = bench.pair.paths[0]
    return dataclasses.replace(bench, workers=lambda: [worker])


@pytest.mark.parametrize("scheme", ["5", "6"])
def test_the_errors_of_an_average_by_brute_force(scheme):
    rng = np.random.default_rng(1)
    workers = [rng.normal(0, 3, (4, 50)).astype(np.float32) for _ in range(2)]
    drafter = rng.normal(0, 3, (4, 50)).astype(np.float32)
    sums = specfed_runs.compare(workers, drafter, 1.5, [10])[10]

    def law(logits):
        weights = np.exp(logits.astype(np.float64) / 1.5)
        return weights / weights.sum()

    bias = vary = bound = 0.0
    for position in range(4):
        p = [law(worker[position]) for worker in workers]
        q, rebuilt = law(drafter[position]), []
        for each in p:
            top = np.argsort(-each)[:10]
            rho = each[top].sum()
            other = np.full(50, 0.0 if scheme == "5" else (1 - rho) / 40)
            other[top] = each[top] / rho if scheme == "5" else each[top]
            rebuilt.append(other)
            bound += (1 - rho) / 2
        whole, merged = (p[0] + p[1]) / 2, (rebuilt[0] + rebuilt[1]) / 2
        bias += np.abs(whole - merged).sum()
        vary += abs(np.minimum(whole, q).sum() - np.minimum(merged, q).sum())
    assert sums[f"bias_{scheme}"] == pytest.approx(bias, abs=1e-5)
    assert sums[f"vary_{scheme}"] == pytest.approx(vary, abs=1e-5)
    assert sums["vary_19"] == pytest.approx(bound, abs=1e-5)
    assert sums["beyond"] == 0


def test_an_ensemble_of_a_model_and_itself_answers_as_the_model(bench):
    target = bench.pair.paths[1]
    ensemble = specfed_runs.Ensemble(bench, target)
    for workers, drafter in ensemble.answer(PROMPTS, 1.0, 7):
        assert len(drafter) == specfed_runs.ANSWER
        np.testing.assert_array_equal(*workers)


def test_figures_2_and_3_keep_to_their_bounds_and_resume(federation, monkeypatch):
    monkeypatch.setattr(specfed_runs, "TEMPERATURES", (1.0, 1.5))
    rows = list(specfed_runs.FIGURE2.measure(federation, set()))
    sizes = [k for k in specfed_runs.SIZES if k < federation.pair.target.vocab_size]
    assert len(rows) == len(sizes) * len(specfed_runs.TEMPERATURES)
    for row in rows:
        assert row["beyond"] == 0
        assert row["bias_6"] <= row["bias_5"] <= row["bias_17"] + 1e-6
        assert row["bias_5_low"] <= row["bias_5"] <= row["bias_5_high"]
        assert row["positions"] == len(PROMPTS) * specfed_runs.ANSWER
        assert row.keys() >= specfed_runs.FIGURE2.columns.keys()
    identities = [specfed_runs.FIGURE2.identify(row) for row in rows]
    again = specfed_runs.FIGURE2.measure(federation, set(identities[1:]))
    assert list(again) == rows[:1]
    (row, *_) = specfed_runs.FIGURE3.measure(federation, set())
    assert 0.0 < row["vary_6"] <= row["vary_19"] < 1.0
    assert row.keys() >= specfed_runs.FIGURE3.columns.keys()


def test_a_federation_needs_a_second_worker_of_the_same_vocabulary(bench, tmp_path):
    with pytest.raises(UnsupportedError, match="--worker"):
        list(specfed_runs.FIGURE2.measure(bench, set()))
    alike = dataclasses.replace(bench, workers=lambda: [bench.pair.paths[0], bench.pair.paths[1]])
    with pytest.raises(UnsupportedError, match="could not tell them apart"):
        list(specfed_runs.FIGURE2.measure(alike, set()))
    other = tiny_artifact(tmp_path / "other", vocab=77).path
    wrong = dataclasses.replace(bench, workers=lambda: [other])
    with pytest.raises(UnsupportedError, match="another vocabulary"):
        list(specfed_runs.FIGURE2.measure(wrong, set()))
    foreign = OpenPair(other, bench.pair.paths[1])
    with pytest.raises(PairMismatchError):
        specfed_runs.Ensemble(dataclasses.replace(bench, pair=foreign), other)


# decentralized


def test_the_ablation_of_tau(bench, monkeypatch):
    monkeypatch.setattr(decentralized_tau, "TAUS", (0.0, 0.4, 0.8))
    many_keys = {"built in": (1e6, 0.02, 0.0), "no key token": (1e6, 1.0, 0.0)}
    monkeypatch.setattr(decentralized_tau, "LAMBDAS", many_keys)
    rows = list(decentralized_tau.TAU.measure(bench, {("built in", 0.4)}))
    assert [(row["lambdas"], row["tau"]) for row in rows] == [
        ("built in", 0.0), ("built in", 0.8),
        ("no key token", 0.0), ("no key token", 0.4), ("no key token", 0.8),
    ]  # fmt: skip
    strict, *relaxed = rows[2:]
    assert (strict["longer_4"], strict["deviation"]) == (1.0, 0.0)
    for row in relaxed:  # acceptance rises by exactly the deviation
        assert row["acceptance"] - strict["acceptance"] == pytest.approx(row["deviation"])
    assert 0.0 < relaxed[0]["deviation"] < relaxed[1]["deviation"]
    assert rows[1]["deviation"] < relaxed[1]["deviation"]
    assert rows[1]["key"] > relaxed[1]["key"] == 0.0
    for row in rows:
        assert (row["n"], row["positions"]) == (len(PROMPTS), len(PROMPTS) * 48)
        assert row["tokens_4_low"] <= row["tokens_4"] <= row["tokens_4_high"]
        assert row.keys() >= decentralized_tau.TAU.columns.keys()


def test_the_expected_tokens_of_a_round_written_out():
    acceptance = np.array([[0.5, 0.8, 0.25]])
    starts = (1 + 0.5 + 0.5 * 0.8) + (1 + 0.8 + 0.8 * 0.25)
    np.testing.assert_allclose(decentralized_tau.expected_tokens(acceptance, 2), [starts])
    assert decentralized_tau.expected_tokens(acceptance, 4) == [0.0]  # a very short answer


def test_table_1_measures_the_settings_beside_the_printed_ones(bench, monkeypatch):
    monkeypatch.setattr(decentralized_runs, "TOKENS", 24)
    figure = decentralized_runs.TABLE1
    rows = list(figure.measure(bench, {("t=1, qx=1",)}))
    assert [row["setting"] for row in rows] == [
        setting for setting in decentralized_runs.SETTINGS if setting != "t=1, qx=1"
    ]
    assert all(1.0 <= row["length"] <= 9.0 for row in rows)
    sheet = figure.comparison(rows, "here")
    assert [row["setting"] for row in sheet.rows][-1] == "t=1, qx=1"  # printed, not measured
    assert {row["length_printed"] for row in sheet.rows} == {5.93, 5.26, 3.55, 1.98}


def test_the_settings_are_the_options_that_table_1_names():
    for setting, options in decentralized_runs.SETTINGS.items():
        words = decentralized_printed.READINGS[setting].option.split()
        flags = dict(zip(words[::2], words[1::2], strict=True))
        assert flags == {
            f"--{name.replace('_', '-')}": f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in options.items()
        }
    names = {row["setting"] for row in decentralized_printed.printed_settings()}
    assert names == decentralized_runs.SETTINGS.keys()


def test_what_tables_1_and_2_say_of_each_other():
    rows = {(row.task, row.target, row.printed): row for row in decentralized_printed.TABLE1}
    eagle = rows["HumanEval", "Qwen3-8B", "t=1, k=1, qx=1"]
    relaxed = rows["HumanEval", "Qwen3-8B", "t=1, k=1, qx=x, r=0.90"]
    printed = (eagle.speed, eagle.length, relaxed.speed, relaxed.length)
    assert printed == pytest.approx(decentralized_printed.TABLE2["HumanEval"], abs=0.006)
    for row in decentralized_printed.TABLE1:
        if row.setting == "ratio":
            ratio, d = (float(part.split()[-1].split("=")[-1]) for part in row.printed.split(","))
            assert math.log(ratio) == pytest.approx(d, abs=1.1e-4)
            hops = decentralized_printed.hops_by_eq_9(row.speed, row.length)
            assert 13.5 < hops < 15.5


@pytest.mark.parametrize("alpha", [0.1, 0.74, 0.95])
def test_the_acceptance_of_a_printed_length(alpha):
    length = tokens_per_round(alpha, 8)
    assert decentralized_printed.acceptance(length) == pytest.approx(alpha)


def test_the_hops_of_a_printed_speed_up():
    from pilotfish.lab.field.papers.decentralized import eq_9_speed_up

    hops = decentralized_printed.hops_by_eq_9(2.56, 3.86)
    assert eq_9_speed_up(3.86, 8, 8, 1.0, hops / 7) == pytest.approx(2.56)


def node_row(window: int, ratio: int, **values: float) -> dict[str, float]:
    return {"nodes": 8, "window": window, "t1_over_c": ratio, "n": 12, **values}


ROWS = [
    node_row(0, 0, t1_ms=0.0, tokens=1.0, round_ms=40.0, draft_ms=0.0, compute_ms=32.0),
    node_row(4, 0, t1_ms=0.0, tokens=3.0, round_ms=70.0, draft_ms=20.0, compute_ms=40.0),
    node_row(0, 10, t1_ms=50.0, tokens=1.0, round_ms=440.0, draft_ms=0.0, compute_ms=32.0),
    node_row(4, 10, t1_ms=50.0, tokens=3.0, round_ms=480.0, draft_ms=20.0, compute_ms=40.0),
]


def test_measured_rounds_beside_the_model_written_out():
    row = decentralized_nodes.compare(ROWS)[-1]
    assert row["model_ms"] == 20.0 + 40.0 + 8 * 50.0
    assert row["fixed_ms"] == 10.0
    assert row["off"] == pytest.approx(460 / 480 - 1)
    assert row["off_fixed"] == pytest.approx(470 / 480 - 1)
    assert row["eq4_ms"] == 3 * 32.0 + 7 * 50.0
    assert row["gain"] == pytest.approx(3 / 480 * 440)
    assert row["reduction"] == pytest.approx(1 - 480 / (3 * 440))
    assert row["eq5"] == pytest.approx(1 - (3 * 32 + 350) / (3 * (32 + 350)))


def test_16_nodes_are_modelled_from_8():
    *_, row = decentralized_nodes.extrapolate(decentralized_nodes.compare(ROWS))
    assert row["nodes"] == 16
    assert row["round_ms"] == 20.0 + 40.0 + 2 * 10.0 + 16 * 50.0
    assert row["gain"] == pytest.approx(3 / row["round_ms"] * (32.0 + 2 * 8.0 + 800.0))
    assert decentralized_nodes.extrapolate([]) == []


def test_rounds_over_nodes(bench, monkeypatch):
    monkeypatch.setattr(decentralized_nodes, "NODES", (2,))
    monkeypatch.setattr(decentralized_nodes, "RATIOS", (0, 3))
    monkeypatch.setattr(decentralized_nodes, "PROMPTS", 2)
    figure = decentralized_nodes.NODES_FIGURE
    rows = list(figure.measure(bench, {(2, 8, 3)}))
    assert [figure.identify(row) for row in rows] == [
        (2, window, ratio) for ratio in (0, 3) for window in (0, 4, 8)
    ][:-1]
    for row in rows:
        assert row["n"] == 2
        assert row["round_ms"] > row["draft_ms"]
        assert row["compute_ms"] > 0.0
        assert row["round_ms_low"] <= row["round_ms"] <= row["round_ms_high"]
        assert row["t1_ms"] == pytest.approx(row["t1_over_c"] * rows[1]["compute_ms"] / 2)
        # under stream, tokens that arrived while the device was not running seem to take no time
        assert row["round_ms"] >= row["hops_ms"] or not row["window"]
        assert row.keys() >= figure.columns.keys()
    assert all(row["tokens"] == 1.0 for row in rows if not row["window"])
    assert list(figure.measure(bench, {(2, w, r) for w in (0, 4, 8) for r in (0, 3)})) == []


def test_a_node_that_does_not_start_leaves_no_other_running(bench, tmp_path):
    make_keys(tmp_path)
    pipeline = EmulatedPipeline(bench.pair.paths[1], 3, tmp_path)
    (pipeline.cut / "stage-3" / "manifest.json").unlink()
    with pytest.raises(PilotfishError, match="stage-3 is not an artifact"), pipeline:
        pass
    assert len(pipeline.nodes) == 2
    for node in pipeline.nodes:
        with pytest.raises(EdgeLostError, match="not running"):
            _ = node.pid
