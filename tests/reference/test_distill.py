"""Distilling from end to end on a tiny pair: it learns, survives kills, refuses what it must."""

from __future__ import annotations

import base64
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.export.sources import open_source
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_directory, write_gguf
from tests.support.tiny import tiny_artifact

pytestmark = [pytest.mark.reference, pytest.mark.slow]

CONFIG = {**LLAMA, "num_hidden_layers": 1, "max_position_embeddings": 256}
PATIENCE_S = 240.0


class Made:
    """A drafter's weights, a target, prompts, and the command to distil them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_directory(folder / "drafter", CONFIG)
        # of two answers alone, so that there is something to learn
        tiny_artifact(folder / "target", vocab=128, seed=3, context=256, sharpness=4.0)
        lines = [f"say {a} {b}\n" for a in "abcdef" for b in "xyzuvw"]
        (folder / "prompts.txt").write_text("".join(lines))

    def command(self, out: str, *more: object) -> list[str]:
        options = ["--draft", "drafter", "--target", "target", "--prompts", "prompts.txt"]
        options += ["--built-in", "0", "--out", out, "--tokens", "12", "--sessions", "3"]
        options += ["--epochs", "20", "--batch", "4", "--every", "20", "--rate", "0.01"]
        options += ["--precision", "fp32", "--threads", "1", "--checkpoint-every", "0"]
        options += ["--patience", "0"]
        return [sys.executable, "-m", "pilotfish", "distill", *options, *map(str, more)]

    def run(self, out: str, *more: object, code: int = 0, room: int | None = None) -> str:
        """Run it to its end. room: bytes that a file may have, as if the disk were full then."""

        def limit() -> None:
            if room is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

        done = subprocess.run(
            self.command(out, *more),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=limit,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def kill(self, out: str, when: Callable[[Path], bool]) -> None:
        """Begin, or go on, and kill the process when its run has come so far."""
        process = subprocess.Popen(
            self.command(out),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        end_s = time.monotonic() + PATIENCE_S
        while not when(self.folder / f"{out}-run"):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end_s
            time.sleep(0.01)
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("distilling"))


@pytest.fixture(scope="module")
def whole(made: Made) -> Path:
    """A run that nothing disturbed."""
    assert made.run("whole", "--json", "whole.json").strip() == "whole"
    return made.folder / "whole"


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest(run: Path) -> int:
    return max((int(path.stem[-7:]) for path in run.glob("checkpoint-*.safetensors")), default=0)


def test_the_drafter_learns_what_the_target_says(made: Made, whole: Path) -> None:
    payload = json.loads((made.folder / "whole.json").read_text())
    before, after = payload["before"]["all"], payload["after"]["all"]
    assert after["alpha"] > before["alpha"] + 0.1
    assert after["survival"][3] > before["survival"][3]
    assert payload["learnt"] + payload["held"] == 36
    # the curve is torch's, the figures the artifact's own: in fp32 they say the same
    best = next(
        line for line in payload["curve"] if "alpha" in line and line["step"] == payload["step"]
    )
    assert best["alpha"] == pytest.approx(after["alpha"], abs=0.03)
    run = whole.with_name("whole-run")
    page = (run / "report.html").read_text()
    for picture in ("depths.png", "kinds.png", "learning.png"):
        data = (run / picture).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert base64.b64encode(data).decode() in page
    assert not list(run.glob("checkpoint-*"))


def test_what_is_written_is_the_same_model_with_other_weights(made: Made, whole: Path) -> None:
    before = open_source(str(made.folder / "drafter"))
    folder = whole.with_name("whole-run") / "trained" / "drafter-distilled"
    after = open_source(str(folder))
    assert after.config.layers == before.config.layers
    ours, theirs = after.vocabulary, before.vocabulary
    assert ours.tokenizer_json == theirs.tokenizer_json
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)
    first = Artifact.open(whole.with_name("whole-run") / "before").manifest
    manifest = Artifact.open(whole).manifest
    assert manifest.tokenizer_fingerprint == first.tokenizer_fingerprint
    assert manifest.model == "drafter-distilled"
    assert manifest.dimensions == first.dimensions
    assert manifest.files["model.onnx.data"] != first.files["model.onnx.data"]


def test_a_run_that_is_killed_three_times_comes_to_the_same_end(made: Made, whole: Path) -> None:
    made.kill("killed", lambda run: lines(run / "answers.jsonl") >= 5)
    made.kill("killed", lambda run: newest(run) >= 7)
    made.kill("killed", lambda run: newest(run) >= 45)
    run = made.folder / "killed-run"
    with (run / "learning.jsonl").open("ab") as file:
        file.write(b'{"step": 4')  # as a kill in the middle of a line leaves it
    made.run("killed")
    for name in ("model.onnx.data", "tokenizer.json"):
        assert (made.folder / "killed" / name).read_bytes() == (whole / name).read_bytes()
    curve = (run / "learning.jsonl").read_bytes()
    assert curve == (whole.with_name("whole-run") / "learning.jsonl").read_bytes()


def test_a_full_disk_is_one_sentence_and_costs_nothing(made: Made, whole: Path) -> None:
    model = (whole / "model.onnx.data").stat().st_size
    reply = made.run("full", code=74, room=2 * model).strip().splitlines()  # a checkpoint has three
    assert len([line for line in reply if line.startswith("pilotfish: ")]) == 1
    assert "cannot be written" in reply[-1]
    run = made.folder / "full-run"
    assert lines(run / "answers.jsonl") == 36
    assert not list(run.glob(".*partial"))
    made.run("full")
    assert (made.folder / "full" / "model.onnx.data").read_bytes() == (
        whole / "model.onnx.data"
    ).read_bytes()


def test_other_settings_are_refused_in_one_sentence(made: Made, whole: Path) -> None:
    reply = made.run("whole", "--rate", "0.02", code=65).strip().splitlines()
    assert reply == [
        "pilotfish: The run in whole-run was begun with --rate 0.01, not 0.02: give the former "
        "value, or delete checkpoint-* and trained in that folder to train from the start, or "
        "name another --run-folder."
    ]


def test_another_target_or_other_weights_are_refused(made: Made, whole: Path) -> None:
    tiny_artifact(made.folder / "other", vocab=128, seed=4, context=256, sharpness=4.0)
    reply = made.run("whole", "--target", "other", code=65).strip().splitlines()
    assert len(reply) == 1
    assert "was begun with the target digest" in reply[0]
    made.kill("swapped", lambda run: newest(run) >= 7)
    write_directory(made.folder / "twin" / "drafter", CONFIG, weights=tiny_weights(CONFIG, 2))
    drafter = made.folder / "drafter"
    drafter.rename(made.folder / "kept")
    try:
        (made.folder / "twin" / "drafter").rename(drafter)
        reply = made.run("swapped", code=64).strip().splitlines()
        assert "the weights have changed since the run was begun" in reply[-1]
    finally:
        shutil.rmtree(drafter, ignore_errors=True)
        (made.folder / "kept").rename(drafter)


def test_what_nothing_was_made_by_can_be_put_right(made: Made, whole: Path) -> None:
    made.run("righted", "--draft", "draftre", code=65)
    made.kill("righted", lambda run: lines(run / "answers.jsonl") >= 36)
    completed = made.run("righted", "--rate", "0.02", "--epochs", "1")
    assert completed.strip() == "righted"
    run = made.folder / "righted-run"
    answers = (run / "answers.jsonl").read_bytes().splitlines()
    (run / "answers.jsonl").write_bytes(b"".join(line + b"\n" for line in answers[1:]))
    shutil.rmtree(run / "trained")
    made.run("righted")  # asks what is missing, and trains anew
    assert sorted((run / "answers.jsonl").read_bytes().splitlines()) == sorted(answers)
    name = "model.onnx.data"
    assert (made.folder / "righted" / name).read_bytes() == (whole / name).read_bytes()


def test_a_gguf_file_is_trained_as_well(made: Made) -> None:
    write_gguf(made.folder / "drafter.gguf", CONFIG)
    completed = made.run("of_gguf", "--draft", "drafter.gguf", "--epochs", "1", "--json", "-")
    payload = json.loads(completed)
    assert payload["after"]["all"]["positions"] > 0
    assert Artifact.open(made.folder / "of_gguf").manifest.precision == "fp32"


def test_prompts_without_text_and_a_drafter_without_room_are_one_sentence(made: Made) -> None:
    (made.folder / "picture.txt").write_bytes(b"\x89PNG\xff\x00")
    completed = made.run("none", "--prompts", "picture.txt", code=64)
    assert "picture.txt cannot be read: it is not UTF-8 text" in completed
    completed = made.run("none", "--tokens", "200", code=64).strip().splitlines()
    assert len([line for line in completed if line.startswith("pilotfish: ")]) == 1
    assert "no prompt fits" in completed[-1]
