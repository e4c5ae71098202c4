"""`pilotfish field load`: real devices at a real edge, killed, resumed and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import RunFileError
from pilotfish.cli import main
from pilotfish.cli.field.load import link_text
from pilotfish.emulation.emulator import Conditions
from pilotfish.lab.field.load.edge_cpu import cpu_s, edge_process
from pilotfish.lab.field.load.record import Record
from pilotfish.lab.field.load.recorded_drafter import RecordedSource
from pilotfish.lab.field.load.results import Results
from tests.lab.field.load.answering import ANSWER, answering
from tests.support.serving import serving

PROMPTS = ["abc", "bcd ef", "fed", "abab", "zyx w"]
QUICK = ["--think", "5ms", "--for", "200ms", "--warm-up", "50ms", "--max-tokens", 16]
QUICK += ["--threads", 1, "--processes", 2]


def arguments(*options):
    return ["field", "load", *map(str, (*QUICK, *options))]


def load(*options):
    return main(arguments(*options))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("asked") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture(scope="module")
def measured(pair, edge, prompts, tmp_path_factory):
    """The folder of a load of three methods, and its figures."""
    out = tmp_path_factory.mktemp("load") / "out"
    info = out.with_name("figures.json")
    options = ["--edge", edge.endpoint, "--draft", pair.draft, "--prompts", prompts, "--at", "2s"]
    options += ["--protocols", "stream,greedy:4,ahead", "--devices", "1,2,4", "--draft-ms", 0]
    assert load(*options, "--out", out, "--json", info) == 0
    return out, json.loads(info.read_text())


def test_every_method_with_one_two_and_four_devices(measured):
    out, rows = measured
    assert [(row["method"], row["devices"]) for row in rows] == [
        (method, count) for method in ("stream", "greedy:4", "ahead") for count in (1, 2, 4)
    ]
    for row in rows:
        assert row["n"] >= 20
        assert row["failed"] == row["different"] == 0
        assert 0.0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p90"]
        assert row["tokens_per_s"] > 0.0
        assert row["edge_ms"] > 0.0
        assert row["edge_cpu_ms"] > 0.0
    rounds = {row["method"]: row["tokens_per_round"] for row in rows}
    assert rounds["stream"] == 1.0
    assert rounds["greedy:4"] > 1.3
    assert (out / "load.png").stat().st_size > 10_000
    assert (out / "load.json").stat().st_mode & 0o077 == 0


def test_the_devices_share_the_questions(measured):
    out, _ = measured
    point = next(each for each in Results.read(out / "load.json").points if each.devices == 4)
    # on a busy machine, twenty answers need not be of all four
    askers = {answer.device for answer in point.answers}
    assert askers <= {0, 1, 2, 3}
    assert len(askers) > 1
    assert {answer.prompt for answer in point.answers} == set(range(len(PROMPTS)))
    assert all(0.0 <= answer.asked_s < point.took_s for answer in point.answers)


def test_recorded_drafts_are_accepted_like_real_ones(pair, edge, measured):
    """Round by round, in windows of two lengths."""
    out, _ = measured
    record = Record.load(out / "drafts.npz")
    assert [len(answer.prompt) for answer in record.answers]
    with (
        Device(pair.draft, edge.endpoint, threads=1) as real,
        Device(RecordedSource.of(record), edge.endpoint) as replayed,
    ):
        for answer in record.answers:
            for window in (2, 5):
                options = {"protocol": "greedy", "window": window, "temperature": 0.0}
                options["max_tokens"] = len(answer.answer)
                prompt = answer.prompt.tolist()
                ours, theirs = (d.generate(prompt, **options) for d in (replayed, real))
                assert ours.tokens == theirs.tokens == answer.answer.tolist()
                assert [(r.accepted, r.tokens) for r in ours.rounds[:-1]] == [
                    (r.accepted, r.tokens) for r in theirs.rounds[:-1]
                ]


def test_a_recorded_draft_takes_the_recorded_time(measured, edge):
    out, _ = measured
    answers = Record.load(out / "drafts.npz").answers
    slow = Record(answers, "slow", draft_s=0.02)
    with Device(RecordedSource.of(slow), edge.endpoint) as device:
        answer = device.generate(
            answers[0].prompt.tolist(), protocol="greedy", window=2, max_tokens=8, temperature=0.0
        )
    for each in answer.rounds[:-1]:
        assert 0.02 * each.window <= each.timings.draft < 0.02 * each.window + 0.5


def test_a_record_that_is_saved_is_the_same(measured, tmp_path):
    record = Record.load(measured[0] / "drafts.npz")
    record.save(tmp_path / "again.npz")
    again = Record.load(tmp_path / "again.npz")
    assert (again.drafter, again.draft_s) == (record.drafter, record.draft_s)
    for ours, theirs in zip(again.answers, record.answers, strict=True):
        np.testing.assert_array_equal(ours.log_probabilities, theirs.log_probabilities)
        assert (np.diff(ours.log_probabilities, axis=1) <= 0.0).all()


@pytest.mark.parametrize("keep", [0, 20, 2000, -3, -600])
def test_a_damaged_record(measured, tmp_path, keep):
    whole = (measured[0] / "drafts.npz").read_bytes()
    path = tmp_path / "drafts.npz"
    path.write_bytes(whole[:keep])
    with pytest.raises(RunFileError, match=r"drafts.npz is not a record: it has "):
        Record.load(path)
    path.write_bytes(whole[:200] + bytes(each ^ 255 for each in whole[200:400]) + whole[400:])
    with pytest.raises(RunFileError, match=r"is not a record: it has "):
        Record.load(path)


def test_a_limit_that_nothing_holds(pair, edge, prompts, tmp_path, capsys):
    options = ["--edge", edge.endpoint, "--prompts", prompts, "--out", tmp_path / "out"]
    assert load(*options, "--protocols", "stream", "--devices", "2,4", "--at", "1us") == 0
    output = capsys.readouterr().out
    results = Results.read(tmp_path / "out" / "load.json")
    assert [point.devices for point in results.points] == [2, 1]  # bisected, and not 4
    assert "devices at 0.001 ms a token" in output


def test_few_answers_are_not_drawn(edge, prompts, tmp_path, capsys):
    options = ["--edge", edge.endpoint, "--prompts", prompts, "--out", tmp_path / "out"]
    options += ["--protocols", "stream", "--devices", 1, "--answers", 3, "--for", "10ms"]
    assert load(*options, "--rate", 600) == 0  # open: ten a second
    assert "No picture" in capsys.readouterr().err
    assert not (tmp_path / "out" / "load.png").exists()


def test_an_emulated_link_shows_in_the_first_token(edge, prompts, tmp_path):
    info = tmp_path / "figures.json"
    options = ["--edge", edge.endpoint, "--prompts", prompts, "--out", tmp_path / "out"]
    options += ["--protocols", "stream", "--devices", 2, "--rtt", "60ms", "--json", info]
    assert load(*options) == 0
    (row,) = json.loads(info.read_text())
    assert row["first_token_ms"]["p50"] > 60.0
    assert Results.read(tmp_path / "out" / "load.json").load.link == {"rtt_s": 0.06}


def test_killed_and_resumed(pair, edge, prompts, tmp_path):
    out = tmp_path / "out"
    options = ["--edge", edge.endpoint, "--draft", pair.draft, "--prompts", prompts, "--at", "2s"]
    options += ["--protocols", "stream,greedy:2", "--devices", "1,2", "--out", out]
    command = [sys.executable, "-m", "pilotfish", *arguments(*options)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    path = out / "load.json"
    children = ()
    while not path.exists() or not children:
        assert process.poll() is None
        children = descendants(process.pid)
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = Results.read(path).points
    assert 1 <= len(before) < 4
    record = (out / "drafts.npz").read_bytes()
    assert load(*options) == 65  # never overwritten
    assert load(*options, "--think", "6ms", "--resume") == 65
    assert load(*options, "--resume") == 0
    after = Results.read(path).points
    assert after[: len(before)] == before
    assert [(each.method, each.devices) for each in after] == [
        ("stream", 1),
        ("stream", 2),
        ("greedy:2", 1),
        ("greedy:2", 2),
    ]
    assert (out / "drafts.npz").read_bytes() == record
    assert not any(Path(f"/proc/{child}").exists() for child in children)  # ended with their parent


def descendants(process):
    """The processes of a load's devices, while there are any."""
    with suppress(OSError):
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
        return tuple(map(int, text.split()))
    return ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--protocols", "greedy:4"], "--draft"),
        (["--protocols", "local"], "names no protocol"),
        (["--protocols", "wisv"], "names no protocol"),
        (["--protocols", "wisv-full:4", "--draft", "x"], "hidden states"),
        (["--protocols", "greedy:many", "--draft", "x"], "no window"),
        (["--protocols", "stream:4"], "no window"),
        (["--protocols", "tree:4", "--draft", "x"], "trees"),
        (["--protocols", "ahead:nobody", "--draft", "x"], "hints must be"),
        (["--protocols", "ahead", "--draft", "text"], "cannot be recorded"),
        (["--protocols", "stream", "--devices", "1,500"], "--sessions-per-client 500"),
    ],
)
def test_refusals(edge, tmp_path, capsys, options, words):
    assert load("--edge", edge.endpoint, "--out", tmp_path / "out", *options) == 64
    assert words in capsys.readouterr().err


def test_a_file_without_prompts(edge, tmp_path, capsys):
    (tmp_path / "none.txt").write_text("\n")
    options = ["--prompts", tmp_path / "none.txt", "--protocols", "stream"]
    assert load("--edge", edge.endpoint, "--out", tmp_path / "out", *options) == 64
    assert "has no prompt" in capsys.readouterr().err


def test_either_an_edge_or_services(tmp_path):
    with pytest.raises(SystemExit):
        load("--out", tmp_path / "out")


def test_the_edge_of_an_address(pair):
    with EdgeServer(pair.target, threads=1) as edge:
        process = edge_process(edge.endpoint)
        assert process == edge.pid
        before = cpu_s(process)
        with Device(pair.draft, edge.endpoint, threads=1) as device:
            while cpu_s(process) <= before:
                device.generate("abc", protocol="stream", max_tokens=40)
    assert edge_process(edge.endpoint) is None
    assert edge_process("tcp://192.0.2.1:7077") is None
    assert cpu_s(None) is None


def test_services_are_asked_as_their_clients_ask(pair, edge, prompts, tmp_path):
    info = tmp_path / "figures.json"
    flags = ("--lanes", 2, "--protocol", "stream")
    with serving(pair.draft, edge.endpoint, *flags) as started:
        options = ["--service", started.url, "--prompts", prompts, "--out", tmp_path / "out"]
        assert load(*options, "--devices", "1,2", "--at", "2s", "--json", info) == 0
    rows = json.loads(info.read_text())
    assert [(row["method"], row["devices"]) for row in rows] == [("service", 1), ("service", 2)]
    assert all(row["failed"] == 0 and row["n"] >= 20 for row in rows)


def test_a_service_that_is_not_there_ends_the_load(prompts, tmp_path, capsys):
    options = ["--service", "http://127.0.0.1:9", "--prompts", prompts, "--answers", 1]
    options += ["--devices", 10, "--for", "1s", "--out", tmp_path / "out"]
    assert load(*options) == 69
    assert "refused" in capsys.readouterr().err
    assert not (tmp_path / "out" / "load.json").exists()


def test_warm_up_errors_are_told(prompts, tmp_path, capsys):
    with answering(ANSWER, refuse_s=3.0) as url:
        options = ["--service", url, "--prompts", prompts, "--out", tmp_path / "out"]
        options += ["--devices", 4, "--warm-up", "5s", "--at", "2s"]
        assert load(*options) == 0
    error = capsys.readouterr().err
    assert "answers failed in the warm-up; the first: " in error
    assert "503" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices", "0"], "numbers of devices"),
        (["--devices", "1,1e3"], "numbers of devices"),
        (["--devices", "10000"], "too many"),
        (["--at", "0"], "above 0"),
        (["--at", "nan"], "is not a time"),
        (["--think=-1s"], "is not a time"),
        (["--for", "99999999s"], "longer than a day"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "inf"], "--rate"),
        (["--draft-ms", "inf"], "--draft-ms"),
    ],
)
def test_impossible_numbers_are_refused(edge, tmp_path, capsys, options, words):
    with pytest.raises(SystemExit):
        load("--edge", edge.endpoint, "--out", tmp_path / "out", *options)
    assert words in capsys.readouterr().err


def test_a_drafter_that_is_missing_is_noticed_before_the_target_answers(edge, tmp_path):
    out = tmp_path / "out"
    missing = ["--draft", tmp_path / "nothing", "--protocols", "greedy:4"]
    assert load("--edge", edge.endpoint, "--out", out, *missing) != 0
    assert not (out / "answers.jsonl").exists()


def test_the_title_says_which_link_was_measured():
    assert link_text(Conditions()) == "the link as it is"
    assert link_text(Conditions(rtt_s=0.05)) == "emulated link: RTT 50 ms"
    assert link_text(Conditions(loss=0.01)) == "emulated link: RTT 0 ms and more"
