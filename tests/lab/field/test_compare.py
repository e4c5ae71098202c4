"""`pilotfish field compare`: drafters side by side, whatever happens on the way."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import RunFileError, UnsupportedError
from pilotfish.cli import main
from pilotfish.lab.field.shared_machine import is_this_machine
from pilotfish.lab.field.target_answers import AnswerFile, AnswerHeader, TargetAnswer
from pilotfish.lab.prompts import read_questions
from tests.device_runtime.test_unigram import artifact as unigram_artifact
from tests.support.tiny import tiny_artifact

VOCAB = 64
PROMPTS = ["abc", "bcd ef", "fed", "abab", "zyx w"]


def run(*options):
    """The command's exit code; an RTT of 50 ms alone, unless others are named."""
    return main(["field", "compare", "--threads", "1", "--rtt", "50ms", *map(str, options)])


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    """A file of prompts."""
    path = tmp_path_factory.mktemp("asked") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """Drafters: one with room for little, and one that shares no token with any other."""
    folder = tmp_path_factory.mktemp("strange")
    tiny_artifact(folder / "short", vocab=VOCAB, padded_vocab=72, context=40, seed=1)
    tiny_artifact(folder / "foreign", tokens=["!", "#", "!#"], eos="<stop>", context=256)
    return folder


def test_a_target_served_here(pair, requests, tmp_path, capsys):
    out, info = tmp_path / "out", tmp_path / "told.json"
    options = ["--prompts", requests, "--max-tokens", 30, "--out", out, "--json", info]
    assert run(pair.draft, pair.target, "--target", pair.target, *options, "--rtt", "0,50ms") == 0
    payload = json.loads(info.read_text())
    by_name = {item["name"]: item for item in payload["drafters"]}
    ours = by_name["target"]
    # the target drafts for itself what it says
    assert ours["acceptance"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert ours["survival"]["8"]["value"] == 1.0
    assert ours["tokens"] == 150
    draft = by_name["draft"]
    assert 0.1 < draft["acceptance"]["low"] < draft["acceptance"]["value"] < 1.0
    assert draft["draft_s"] > 0.0
    assert [item["rtt_s"] for item in payload["ship"]] == [0.0, 0.05]
    assert (out / "comparison.png").stat().st_size > 10_000
    assert json.loads((out / "comparison.json").read_text()) == payload
    assert "At RTT" in capsys.readouterr().out


@pytest.mark.parametrize("stated", [[], ["--target-ms", "40"]])
def test_one_machine_for_drafter_and_target_is_warned_of(
    pair, edge, requests, tmp_path, capsys, stated
):
    """With what it falsifies and what to do, wherever the figures go."""
    options = ["--prompts", requests, "--max-tokens", 8, *stated]
    warnings = []
    for number, target in enumerate((pair.target, edge.endpoint)):
        out = tmp_path / str(number)
        assert run(pair.draft, "--target", target, *options, "--out", out) == 0
        warnings.append(json.loads((out / "comparison.json").read_text())["warning"])
        assert f"Warning: {warnings[-1]}" in capsys.readouterr().out
    served, running = warnings
    assert served.startswith("This command served the target on the drafters' machine.")
    assert running.startswith("The target's edge is on the drafters' machine.")
    for warning in warnings:
        assert ("its pass times are this machine's" in warning) is not bool(stated)
        assert ("--target-ms" in warning) is not bool(stated)
        assert "slow each other down" in warning


def test_addresses_of_this_machine_and_of_others():
    host = "127.0.0.1"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses this machine's address
        host = probe.getsockname()[0]
    for address in (f"tcp://{host}:7077", "tcp://127.0.0.1:7077", "tcp://localhost:7077"):
        assert is_this_machine(address)
    for address in ("tcp://192.0.2.1:7077", "tcp://no-such-name.invalid:7077", "tcp://[::1"):
        assert not is_this_machine(address)


def test_rounds_over_the_wire_accept_what_is_told(pair, edge, device, requests, tmp_path):
    """Windows that no run outlasts: each round is a run, and its length tells α at every depth."""
    info = tmp_path / "told.json"
    options = ["--prompts", requests, "--max-tokens", 40, "--json", info]
    assert run(pair.draft, "--target", edge.endpoint, *options) == 0
    (result,) = json.loads(info.read_text())["drafters"]
    right = 0
    for prompt in PROMPTS:
        answer = device.generate(prompt, protocol="greedy", window=40, max_tokens=40)
        right += sum(item.accepted for item in answer.rounds)
    # an answer's last token is never drafted, where its length is what ends it
    assert 0 <= round(result["acceptance"]["value"] * result["tokens"]) - right <= len(PROMPTS)


def test_sampled_answers_are_compared_under_their_own_noise(pair, edge, requests, tmp_path):
    info = tmp_path / "told.json"
    options = ["--prompts", requests, "--max-tokens", 30, "--temperature", 0.9, "--seed", 3]
    options += ["--target-ms", 40]
    assert run(pair.target, "--target", edge.endpoint, *options, "--json", info) == 0
    payload = json.loads(info.read_text())
    assert payload["pass_s"] == [0.04] * 17
    assert payload["drafters"][0]["acceptance"]["value"] == 1.0
    assert {item["protocol"] for item in payload["drafters"][0]["expected"]} <= {"ahead", "coupled"}


def test_a_vocabulary_that_no_edge_hands_out(tmp_path):
    """A drafter of the same one has it."""
    target, draft = unigram_artifact(tmp_path / "a", 1), unigram_artifact(tmp_path / "b", 2)
    wanted, info = tmp_path / "prompts.txt", tmp_path / "told.json"
    wanted.write_text("The quick\nbrown fox\n")
    options = ["--prompts", wanted, "--max-tokens", 10, "--json", info]
    with EdgeServer(target, threads=1) as edge:
        options += ["--target", edge.endpoint]
        assert run("text", *options) == 65
        assert run("text", draft, target, *options) == 0
    by_name = {load["name"]: load for load in json.loads(info.read_text())["drafters"]}
    assert by_name["a"]["acceptance"]["value"] == 1.0


def test_a_drafter_without_room_is_left_out_of_that_prompt(pair, strange, edge, tmp_path):
    wanted, info = tmp_path / "prompts.txt", tmp_path / "told.json"
    wanted.write_text("ab\n" + "abc " * 12 + "\nba\n")
    options = ["--prompts", wanted, "--max-tokens", 20, "--json", info]
    assert run(pair.draft, strange / "short", "--target", edge.endpoint, *options) == 0
    by_name = {load["name"]: load for load in json.loads(info.read_text())["drafters"]}
    assert (by_name["draft"]["prompts"], by_name["draft"]["left_out"]) == (3, 0)
    assert (by_name["short"]["prompts"], by_name["short"]["left_out"]) == (2, 1)


@pytest.mark.parametrize(("prompt", "known"), [("abc " * 12, 0), ("x" * 34, 2)])
def test_a_drafter_with_little_room_is_timed_all_the_same(
    pair, strange, edge, tmp_path, prompt, known
):
    """With none for any prompt, or with just enough for the answers: its drafts fit in, too."""
    wanted, info = tmp_path / "prompts.txt", tmp_path / "told.json"
    wanted.write_text(f"{prompt}\n{prompt}\n")
    options = ["--prompts", wanted, "--max-tokens", 4, "--json", info]
    assert run(pair.draft, strange / "short", "--target", edge.endpoint, *options) == 0
    by_name = {load["name"]: load for load in json.loads(info.read_text())["drafters"]}
    assert by_name["short"]["prompts"] == known
    assert by_name["short"]["draft_s"] > 0.0


# Answers that are kept


def asking(**changes):
    usual = {"target": "t", "digest": "d", "prompts": ["a", "b", "c"], "max_tokens": 4}
    return AnswerHeader(**{**usual, "temperature": 0.0, "seed": 0, **changes})


def test_a_broken_line_is_dropped_and_the_rest_is_kept(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path, asking(), VOCAB, resume=False) as file:
        file.add(TargetAnswer(prompt=0, tokens=[1, 2], pass_s=0.04))
        file.add(TargetAnswer(prompt=1, left_out="too long"))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with AnswerFile(path, asking(), VOCAB, resume=True) as file:
            held = dict(file.answers)
            file.add(TargetAnswer(prompt=2, tokens=[7]))
        assert len(held) == max(0, whole[:cut].count(b"\n") - 1)
        with AnswerFile(path, asking(), VOCAB, resume=True) as file:
            assert file.answers == {**held, 2: TargetAnswer(prompt=2, tokens=[7])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ["a"]}, "other prompts"),
        ({"max_tokens": 5}, "max tokens 4, but now it is 5"),
        ({"digest": "e"}, "digest d, but now it is e"),
        ({"temperature": 1.0}, r"temperature 0\.0, but now it is 1\.0"),
        ({"target": ""}, "target t, but now it is unknown"),
    ],
)
def test_answers_to_something_else_are_refused(tmp_path, changes, message):
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, asking(), VOCAB, resume=False).__exit__(None, None, None)
    with pytest.raises(RunFileError, match=message):
        AnswerFile(path, asking(**changes), VOCAB, resume=True)
    with pytest.raises(RunFileError, match="--resume"):
        AnswerFile(path, asking(), VOCAB, resume=False)


def test_damaged_answers_and_a_second_writer_are_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"no json\nat all\n")
    with pytest.raises(RunFileError, match="damaged"):
        AnswerFile(path, asking(), VOCAB, resume=True)
    path.unlink()
    with (
        AnswerFile(path, asking(), VOCAB, resume=False),
        pytest.raises(RunFileError, match="Another process"),
    ):
        AnswerFile(path, asking(), VOCAB, resume=True)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": 0, "tokens": [-1]},
        {"prompt": 0, "tokens": [VOCAB]},
        {"prompt": 0, "tokens": [1 << 40]},
        {"prompt": -1, "tokens": [1]},
        {"prompt": 0, "tokens": [1], "pass_s": -0.1},
    ],
)
def test_answers_that_cannot_be_are_refused(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path, asking(), VOCAB, resume=False):
        pass
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(RunFileError, match="damaged"):
        AnswerFile(path, asking(), VOCAB, resume=True)


def test_the_damaged_line_is_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path, asking(), VOCAB, resume=False) as file:
        file.add(TargetAnswer(prompt=0, tokens=[1]))
    with path.open("a") as file:
        file.write('{"prompt": 1, "tok\n')
    with pytest.raises(RunFileError, match="is damaged: line 3: "):
        AnswerFile(path, asking(), VOCAB, resume=True)


def test_a_target_that_dies_loses_the_running_answer_only(pair, tmp_path):
    wanted, out = tmp_path / "prompts.txt", tmp_path / "out"
    wanted.write_text("\n".join(f"abc {number}" for number in range(60)))
    command = [sys.executable, "-m", "pilotfish", "field", "compare", pair.draft, "--out", out]
    command += ["--prompts", wanted, "--max-tokens", "60", "--threads", "1", "--target"]
    with EdgeServer(pair.target, threads=1) as first:
        child = subprocess.Popen([*map(str, command), first.endpoint], stderr=subprocess.PIPE)
        answers = out / "answers.jsonl"
        until = time.monotonic() + 60.0
        while not (answers.exists() and answers.read_bytes().count(b"\n") > 3):
            assert child.poll() is None
            assert time.monotonic() < until
            time.sleep(0.005)
    _, reply = child.communicate(timeout=60.0)
    assert child.returncode not in (0, 1)
    assert b"--resume" in reply
    assert b"Traceback" not in reply
    selection = answers.read_bytes().count(b"\n") - 1
    assert 3 <= selection < 60
    with EdgeServer(pair.target, threads=1) as again:
        code = run(pair.draft, "--out", out, "--prompts", wanted, "--max-tokens", 60,
                   "--target", again.endpoint, "--resume")  # fmt: skip
        assert code == 0
        with Device(pair.draft, again.endpoint, threads=1) as device:
            plain = [
                device.generate(f"abc {number}", protocol="stream", max_tokens=60).tokens
                for number in (0, selection, 59)
            ]
    lines = [json.loads(line) for line in answers.read_text().splitlines()[1:]]
    assert [item["prompt"] for item in lines] == list(range(60))
    assert [lines[number]["tokens"] for number in (0, selection, 59)] == plain


def test_a_full_disk_keeps_whole_answers(pair, edge, tmp_path):
    wanted, out = tmp_path / "prompts.txt", tmp_path / "out"
    wanted.write_text("\n".join(f"abc {number}" for number in range(40)))
    options = [pair.draft, "--out", out, "--prompts", wanted, "--max-tokens", 60]
    options += ["--target", edge.endpoint, "--threads", 1]
    command = [sys.executable, "-m", "pilotfish", "field", "compare", *map(str, options)]
    # files of 4 KiB at most stand for a disk that is full
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command]
    child = subprocess.run(limited, check=False, capture_output=True, timeout=60.0)
    assert child.returncode not in (0, 1)
    assert b"Traceback" not in child.stderr
    assert b"too large" in child.stderr
    selection = (out / "answers.jsonl").read_bytes().count(b"\n") - 1
    assert 0 < selection < 40
    assert run(*options, "--resume") == 0
    assert (out / "answers.jsonl").read_bytes().count(b"\n") == 41


def test_figures_are_told_though_the_disk_is_full(pair, edge, requests, tmp_path):
    options = [pair.draft, "--prompts", requests, "--max-tokens", 8, "--threads", 1]
    options += ["--target", edge.endpoint, "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "pilotfish", "field", "compare", *map(str, options)]
    # 4 KiB hold the answers, and not the figures
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command]
    child = subprocess.run(limited, check=False, capture_output=True, timeout=120.0)
    assert child.returncode == 74
    assert b"too large" in child.stderr
    assert b"At RTT" in child.stdout


# What is wrong is said in a sentence


@pytest.mark.parametrize("kind", ["drafter", "target"])
def test_no_such_artifact(pair, tmp_path, capfd, kind):
    names = {"drafter": pair.draft, "target": pair.target, kind: tmp_path / "none"}
    assert run(names["drafter"], "--target", names["target"]) not in (0, 1)
    err = capfd.readouterr().err
    assert "none" in err
    assert "Traceback" not in err


def test_a_target_whose_head_was_cut(pair, tmp_path, capsys):
    cut = tiny_artifact(tmp_path / "cut", head_tokens=[1, 2, 127])
    assert run(pair.draft, "--target", cut.path) == 66
    err = capsys.readouterr().err
    assert "computes logits for only 3 of its tokens" in err
    assert "serving" not in err


@pytest.mark.parametrize("temperature", [1e-9, 1000])
def test_a_temperature_that_is_none(pair, edge, capsys, temperature):
    completed = run(pair.draft, "--target", edge.endpoint, "--temperature", temperature)
    assert completed not in (0, 1)
    assert "temperature" in capsys.readouterr().err


def test_a_drafter_of_no_shared_token(pair, strange, edge, capfd):
    assert run(pair.draft, strange / "foreign", "--target", edge.endpoint) == 76
    assert "no token" in capfd.readouterr().err


def test_no_drafter_and_nothing_to_resume(pair, capsys):
    for options in (["--target", pair.target], [pair.draft, "--target", pair.target, "--resume"]):
        with pytest.raises(SystemExit):
            run(*options)
    assert "name the drafters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"", "has no prompt"),
        (b'{"messages": []}', "no valid messages"),
        (b'{"messages": [{"role": "user"}]}', "no valid messages"),
        (b'{"messages": [{"role": "system", "content": "x"}]}', "no valid messages"),
        (b'{"messages": "x"}', "no valid messages"),
        (b'{"prompt": 3}', "no text"),
        (b'{"prompt": "\\ud800"}', "is not valid text"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "is not valid text"),
        (b'{"prompt": "x"}\n[1]', "not a JSON object"),
        (b'{"prompt": "x"}\n' + b"[" * 100_000, "is not JSON"),
    ],
)
def test_prompts_that_are_none(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line)
    with pytest.raises(UnsupportedError, match=message):
        read_questions(path)


def test_messages_end_with_the_last_users(tmp_path):
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(
        "\n".join(json.dumps(item) for item in [{"messages": talk, "id": 3}, {"question": "c"}])
    )
    assert read_questions(path) == (talk[:1], "c")
