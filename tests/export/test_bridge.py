"""``pilotfish export bridge``: its figures, its verdicts, and how it ends."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pilotfish.bridge import pair_report as module
from pilotfish.bridge.pair_report import HOPELESS, SAMPLE, compare_vocabularies
from pilotfish.cli import export_bridge, main
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.tokenizer import Tokenizer
from tests.support.tiny import tiny_artifact

LETTERS = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
DIGITS = [str(digit) for digit in range(10)]
OWN = [*LETTERS, "Ġ", *DIGITS, "th", "Ġth", "in", "ing", "é"]
TARGET = ["é", "Ġ", *LETTERS, *"ABC", "in", "Ġt", "he", "er"]
TEXT = "the thing in there 12 then ABBA the engineer "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("drafter") / "drafter"
    return tiny_artifact(path, tokens=OWN, eos="[end]", context=48, padded_vocab=80)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("target") / "target"
    return tiny_artifact(path, tokens=TARGET, eos="</s>", architecture="qwen2", seed=1)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A target that shares the letter "e" alone."""
    path = tmp_path_factory.mktemp("foreign") / "foreign"
    return tiny_artifact(path, tokens=["e", *"ABCDEFGH"])


def run(*arguments: object) -> int:
    """Its exit code."""
    try:
        return main(["export", "bridge", *map(str, arguments)])
    except SystemExit as ended:  # as argparse ends help and wrong usage
        return int(ended.code or 0)


def naive_mass(drafter: Artifact, text: str, window: int, shared: Sequence[int]) -> float:
    """Token by token, in float64."""
    ids = Tokenizer(drafter).encode(text)
    decoder = Decoder(drafter)
    masses = []
    for at, id in enumerate(ids):
        if at % window == 0:
            decoder.rollback(0, 0)
        logits = decoder.forward([Pass(0, np.array([id]))])[0].logits[0].astype(np.float64)
        weights = np.exp(logits - logits.max())
        masses.append(weights[list(shared)].sum() / weights.sum())
    return float(np.mean(masses))


def test_of_a_cut_head_only_what_it_can_say_is_covered(target: Artifact, tmp_path: Path) -> None:
    selection = [OWN.index(letter) for letter in "aeh"]
    cut = tiny_artifact(tmp_path / "cut", tokens=OWN, eos="[end]", head_tokens=sorted(selection))
    vocabularies = compare_vocabularies(cut, target, TEXT)
    pieces = [Tokenizer(target).piece(id) for id in Tokenizer(target).encode(TEXT)]
    assert vocabularies.coverage == pytest.approx(
        sum(piece in "aeh" for piece in pieces) / len(pieces)
    )
    assert vocabularies.mass == pytest.approx(1.0)


@pytest.mark.parametrize("text", [TEXT, TEXT * 9])  # the latter is longer than the context
def test_the_figures_are_what_they_are_called(
    drafter: Artifact, target: Artifact, text: str
) -> None:
    vocabularies = compare_vocabularies(drafter, target, text)
    common = {*LETTERS, "Ġ", "in", "é"}
    assert vocabularies.shared == len(common) + 1
    assert (vocabularies.own_size, vocabularies.target_size) == (len(OWN) + 1, len(TARGET) + 1)
    assert vocabularies.specials == {"</s>": "[end]"}
    assert vocabularies.turn_end == "</s>"
    pieces = [Tokenizer(target).piece(id) for id in Tokenizer(target).encode(text)]
    assert vocabularies.target_tokens == len(pieces)
    assert vocabularies.coverage == pytest.approx(
        sum(piece in common for piece in pieces) / len(pieces)
    )
    assert 0.3 < vocabularies.coverage < 0.9
    shared = [id for id, piece in enumerate([*OWN, "</s>"]) if piece in common or piece == "</s>"]
    assert vocabularies.positions == len(Tokenizer(drafter).encode(text))
    assert vocabularies.mass == pytest.approx(naive_mass(drafter, text, 48, shared), abs=1e-5)


def test_a_long_text_is_cut_and_progress_is_told(
    drafter: Artifact, target: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_POSITIONS", 100)
    messages: list[tuple[int, int | None]] = []
    long = compare_vocabularies(
        drafter,
        target,
        TEXT * 20,
        progress=lambda label, done, total: messages.append((done, total)),
    )
    assert long.positions == 100
    assert messages[0] == (0, 100)
    assert messages[-1] == (100, 100)
    assert long.target_tokens == len(Tokenizer(target).encode(TEXT * 20))


def test_the_sample_has_something_of_everything() -> None:
    assert 250 <= len(SAMPLE.split()) <= 350
    for sign in ("\n    ", "Assistant:", "ü", "72", "{", "×"):
        assert sign in SAMPLE


def test_the_table_says_what_the_figures_mean(
    drafter: Artifact, target: Artifact, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    assert run(drafter.path, target.path, "--text", text) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    vocabularies = compare_vocabularies(drafter, target, TEXT)
    for part in (
        f"shared {vocabularies.shared} tokens",
        "</s>",
        "[end] is drafted for it",  # no markup
        f"coverage {vocabularies.coverage:.1%}",
        f"mass {vocabularies.mass:.1%}",
        "Worth trying",
    ):
        assert part in words


def test_json(
    drafter: Artifact, target: Artifact, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(drafter.path, target.path, "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    vocabularies = compare_vocabularies(drafter, target, SAMPLE)
    assert figures["coverage"] == vocabularies.coverage
    assert figures["mass"] == pytest.approx(vocabularies.mass)
    assert figures["specials"] == {"</s>": "[end]"}
    assert (figures["trivial"], figures["hopeless"]) == (False, False)
    assert run(drafter.path, target.path, "--json", tmp_path / "figures.json") == 0
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert "Worth trying" in capsys.readouterr().out


def test_a_hopeless_pair_is_told_and_ends_with_1(
    drafter: Artifact, foreign: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabularies = compare_vocabularies(drafter, foreign, SAMPLE)
    assert vocabularies.coverage * vocabularies.mass < HOPELESS
    assert run(drafter.path, foreign.path) == 1
    assert "Hopeless" in capsys.readouterr().out
    assert run(drafter.path, foreign.path, "--json", "-") == 1
    assert json.loads(capsys.readouterr().out)["hopeless"] is True


def test_the_same_vocabulary_needs_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    item = tiny_artifact(tmp_path / "one", vocab=100, padded_vocab=104)
    other = tiny_artifact(tmp_path / "other", vocab=100, padded_vocab=128, architecture="opt")
    for artifact in (item, other):
        artifact.graph_path.write_text("nothing runs this")
    assert run(item.path, other.path) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "trivial" in out
    assert "104 and 128" in out
    assert run(item.path, item.path, "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {"trivial": True, "hopeless": False, "shared": 100}


def test_of_a_cut_head_it_says_what_can_be_drafted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tiny_artifact(tmp_path / "cut", vocab=100, head_tokens=[1, 2, 99])
    whole = tiny_artifact(tmp_path / "whole", vocab=100)
    assert run(cut.path, whole.path) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "only the 3 tokens in the drafter's head can be drafted" in out


def test_the_text_may_come_from_a_pipe(drafter: Artifact, target: Artifact) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pilotfish", "export", "bridge"),
            *(str(drafter.path), str(target.path), "--text", "-", "--json", "-"),
        ],
        input=TEXT.encode(),
        capture_output=True,
        check=True,
        env=os.environ,
    )
    figures = json.loads(done.stdout)
    assert figures["target_tokens"] == len(Tokenizer(target).encode(TEXT))
    assert b"running the drafter" in done.stderr


def test_a_character_that_is_cut_is_left_out(
    drafter: Artifact,
    target: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = ("in" * 10 + "日").encode()
    monkeypatch.setattr(export_bridge, "_MOST_BYTES", len(data) - 1)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run(drafter.path, target.path, "--text", "-", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["target_tokens"] == 10


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 74, "no-such"),
        (b"\xff\xfe", 2, "not UTF-8"),
        (b"abc\xe6", 2, "not UTF-8"),
        (b"", 64, "no tokens"),
        ("日本".encode(), 64, "no tokens"),  # to these two vocabularies
    ],
)
def test_a_text_that_is_none_is_refused_in_one_line(
    drafter: Artifact,
    target: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    code: int,
    words: str,
) -> None:
    text = tmp_path / "no-such"
    if content is not None:
        text.write_bytes(content)
    assert run(drafter.path, target.path, "--text", text) == code
    output = capsys.readouterr()
    assert words in output.err.splitlines()[-1]
    assert output.out == ""


def test_no_artifact_and_nothing_in_common(
    drafter: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(drafter.path, tmp_path / "nothing") == 66
    tiny_artifact(tmp_path / "other", tokens=["X", "Y"], eos="[end]")
    assert run(drafter.path, tmp_path / "other") == 76
    assert "cannot draft" in capsys.readouterr().err.splitlines()[-1]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for part in ("coverage", "mass", "hopeless", "pilotfish export bridge drafter target", "76"):
        assert part in out
