"""``pilotfish export model … --precision auto``: drafters on trial, what is written and refused."""

import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from pilotfish.base.errors import PairMismatchError
from pilotfish.device_runtime.drafter_trial import LONGEST, SIZES, fastest_window, try_drafters
from pilotfish.engines.artifact import Artifact
from pilotfish.export.model import export_model
from pilotfish.speculation.theory import tokens_per_round
from tests.support.ring import HEADS, ring_artifact, ring_pair
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_gguf
from tests.support.tiny import tiny_artifact

CONFIG = LLAMA | {"hidden_size": 64, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    calm = {
        name: value / 8 if value.ndim == 2 else 1 + value / 10
        for name, value in tiny_weights(CONFIG).items()
    }
    return write_gguf(
        folder / "tiny.gguf", CONFIG, kind=gguf.GGMLQuantizationType.Q4_1, weights=calm
    )


@pytest.fixture(scope="module")
def target(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(str(source), tmp_path_factory.mktemp("target") / "fp32").path


def export(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pilotfish", "export", "model", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_fastest_is_written_and_nothing_else(
    source: Path, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    done = export(source, "--out", out, "--precision", "auto", "--target", target, "--rtt", "50ms")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert "RTT 50 ms" in done.stderr
    taken = re.search(r"^(\w+) is taken", done.stderr, re.MULTILINE)
    assert taken is not None
    made = Artifact.open(out)
    made.verify()
    assert made.manifest.precision == taken[1]
    assert {path.name for path in out.iterdir()} == {*made.manifest.files, "manifest.json"}
    assert list(tmp_path.iterdir()) == [out]
    # a line each: α of fp32 for itself is 1, of the others below
    alpha = dict(re.findall(r"(int4|int8|fp32) │ +\d+ │ (\d\.\d+) │", done.stderr))
    assert set(alpha) == {"int4", "int8", "fp32"}
    assert float(alpha["fp32"]) == 1.0 > max(float(alpha["int4"]), float(alpha["int8"])) > 0.9


def test_against_a_slow_target_acceptance_decides(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    done = export(source, "--out", out, "--precision", "auto", "--target-ms", 10_000)
    assert done.returncode == 0, done.stderr
    assert "the same model in fp32" in " ".join(done.stderr.split())
    assert (
        Artifact.open(out).manifest.precision == "fp32"
    )  # accepted always, as passes cost nothing


def test_without_a_target_it_takes_int8_and_says_so(source: Path, tmp_path: Path) -> None:
    done = export(source, "--out", tmp_path / "drafter", "--precision", "auto")
    assert done.returncode == 0, done.stderr
    assert "chose int8" in done.stderr
    assert Artifact.open(tmp_path / "drafter").manifest.precision == "int8"


def test_what_cannot_be_is_left_out_by_name(tmp_path: Path) -> None:
    narrow = CONFIG | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    source = write_gguf(tmp_path / "tiny.gguf", narrow)
    done = export(source, "--out", tmp_path / "drafter", "--precision", "auto", "--target-ms", 20)
    assert done.returncode == 0, done.stderr
    assert "int4 is not tried" in done.stderr
    assert "int8 is not tried" in done.stderr
    assert Artifact.open(tmp_path / "drafter").manifest.precision == "fp32"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "x"), "--target goes with --precision auto"),
        (("--precision", "int8", "--target-ms", "20"), "--target-ms goes with --precision auto"),
        (("--rtt", "20ms"), "--rtt goes with --precision auto"),
        (
            ("--precision", "auto", "--rtt", "20ms"),
            "--rtt needs a target with which the drafters are tried: --target DIR or --target-ms T",
        ),
        (("--precision", "auto", "--target-ms", "0"), "is not above 0"),
        (("--precision", "auto", "--target-ms", "5", "--rtt", "20"), "write it as 50ms"),
    ],
)
def test_what_does_not_go_together_is_refused(
    source: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    done = export(source, "--out", tmp_path / "drafter", *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "drafter").exists()


def test_a_target_that_is_none_is_refused_before_anything_is_exported(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    done = export(source, "--out", out, "--precision", "auto", "--target", tmp_path / "nothing")
    assert done.returncode == 66
    assert "weights" not in done.stderr
    assert not out.exists()


def test_a_target_of_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    other = tiny_artifact(tmp_path / "other")
    with pytest.raises(PairMismatchError, match="--target-ms"):
        try_drafters(
            {"fp32": Artifact.open(target)},
            other,
            ["abc"],
            rtt_s=0.0,
            target_s=None,
            progress=lambda *_: None,
        )


@pytest.mark.parametrize(
    ("acceptance", "draft_s", "verify_s", "rtt_s"),
    [(0.7, 0.005, 0.02, 0.0), (0.97, 0.006, 0.02, 0.05), (0.5, 0.02, 0.02, 0.0), (1.0, 0.0, 1, 1)],
)
def test_the_best_window_is_the_best_of_all(
    acceptance: float, draft_s: float, verify_s: float, rtt_s: float
) -> None:
    best = fastest_window([acceptance], {1: draft_s}, [verify_s] * len(SIZES), rtt_s)
    rates = [
        tokens_per_round(acceptance, length) / (length * draft_s + rtt_s + verify_s)
        for length in range(1, LONGEST + 1)
    ]
    assert best.tokens_per_s == pytest.approx(max(rates))
    assert best.passes == [1] * (1 + int(np.argmax(rates)))
    assert best.draft_s == pytest.approx(draft_s, abs=1e-9)


def test_a_drafter_of_several_drafts_a_pass_is_tried_as_it_will_draft(tmp_path: Path) -> None:
    """Its weights without the mask token have the α of the first place, and draft one by one."""
    draft, target = (Artifact.open(path) for path in ring_pair(tmp_path))
    alone = ring_artifact(tmp_path / "alone", 4.0 * 0.5 ** np.arange(HEADS))
    trials = try_drafters(
        {"masked": draft, "alone": alone},
        target,
        ["a", "bc"],
        rtt_s=0.05,
        target_s=0.02,
        progress=lambda *_: None,
    )
    masked, single = trials["masked"], trials["alone"]
    assert single.passes == [1] * single.window
    assert sum(masked.passes) == masked.window
    if max(masked.passes) > 1:  # unless wide passes are very slow on this machine
        assert masked.acceptance < single.acceptance


@pytest.mark.parametrize(("wide_s", "several"), [(0.0, True), (1.0, False)])
def test_a_pass_makes_several_drafts_if_they_cost_little(wide_s: float, several: bool) -> None:
    times = {1: 0.01, 15: 0.01 + wide_s}
    best = fastest_window([0.8, 0.7, 0.6, 0.5], times, [0.02] * len(SIZES), 0.05)
    assert (max(best.passes) > 1) == several
    if several:
        assert best.draft_s == pytest.approx(0.01 * len(best.passes) / sum(best.passes))
