"""Training a decision head: on planted signals, and from end to end with the default pair."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from pilotfish.base.errors import UnsupportedError
from pilotfish.cli import main
from pilotfish.cli.export import default_artifact
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.lab.judge.episodes import MiningRecord
from pilotfish.lab.judge.instances import (
    GOOD,
    POOR,
    InstanceOptions,
    Instances,
    Relabelling,
    instances,
    split,
)
from pilotfish.lab.judge.thresholds import auc
from pilotfish.lab.judge.training import train
from pilotfish.lab.judge.training_settings import TrainingOptions
from pilotfish.speculation.channel import Channel
from tests.support.made_episodes import MINED, D, episodes

pytestmark = pytest.mark.reference

MARGIN = 0.15  # above a coin's AUC, fixed before the first run
OPTIONS = TrainingOptions(width=32, learning_rate=3e-4)


def trained(sampling: InstanceOptions, **change: object) -> tuple[DecisionHead, Instances]:
    whole = instances(MINED, episodes(80, stalling=0.25), sampling)
    options = structs.replace(OPTIONS, **change)
    head = train("made", MINED, whole, sampling, options)
    return head, whole.subset(split(whole.keys, options.validation, options.seed)[1])


def forgiven(head: DecisionHead, held: Instances, channel: Channel) -> float:
    judge = head.judge(channel)
    return 1 - judge(held.drafter, held.target, held.tokens).mean()


def test_a_planted_signal_is_found_on_questions_kept_out(tmp_path: Path) -> None:
    head, held = trained(InstanceOptions())
    assert len(held.keys) == 16
    logits = head.logits(held.drafter, held.target, held.tokens, GOOD)
    assert held.stalling.any()
    assert auc(logits, held.harmful) > 0.8
    assert head.card.training.auc == auc(logits, held.harmful)
    read = DecisionHead.load(str(head.save(tmp_path)))
    assert read.card == head.card
    assert np.array_equal(read.logits(held.drafter, held.target, held.tokens, GOOD), logits)


def test_the_recommended_threshold_keeps_to_the_risk() -> None:
    for risk in (0.02, 0.2):
        head, held = trained(InstanceOptions(), risk=risk)
        judge = head.judge(GOOD)
        harmful = held.harmful
        passed = ~judge(held.drafter[harmful], held.target[harmful], held.tokens[harmful])
        assert passed.mean() <= risk + 1 / harmful.sum()
        assert head.card.threshold in [point.threshold for point in head.card.curve]
    assert head.card.training.options["slack"] == MINED.slack
    assert head.card.training.options["right_only"] is MINED.right_only


def test_a_poor_channel_is_more_permissive_and_by_relabelling() -> None:
    head, held = trained(InstanceOptions(relabelling=Relabelling(floor=0.5)))
    assert forgiven(head, held, POOR) > forgiven(head, held, GOOD) + 0.06
    head, held = trained(InstanceOptions(relabelling=None))
    assert abs(forgiven(head, held, POOR) - forgiven(head, held, GOOD)) < 0.06


def test_a_head_without_the_link_does_not_look_at_it() -> None:
    head, held = trained(InstanceOptions(), link=False)
    assert head.card.link is None
    assert forgiven(head, held, POOR) == forgiven(head, held, GOOD)
    assert head.card.training.auc is not None
    assert head.card.training.auc > 0.8


def test_tokens_alone_can_be_learnt_from() -> None:
    head, held = trained(InstanceOptions(), tokens=True, buckets=64, learning_rate=1e-3)
    assert head.card.features == "tokens"
    shuffled = np.random.default_rng(1).permutation(held.drafter)
    logits = head.logits(shuffled, held.target, held.tokens, GOOD)
    assert auc(logits, held.harmful) > 0.8


def test_a_seed_makes_a_head_and_another_another() -> None:
    item, again, other = (trained(InstanceOptions(), seed=seed, epochs=5)[0] for seed in (3, 3, 4))
    assert all(np.array_equal(item.tensors[name], again.tensors[name]) for name in item.tensors)
    assert not np.array_equal(item.tensors["w2"], other.tensors["w2"])


def test_training_leaves_torch_as_it_was() -> None:
    import torch

    torch.manual_seed(9)
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # which training changes
    trained(InstanceOptions(), epochs=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_labels_that_are_all_alike_teach_nothing() -> None:
    whole = instances(MINED, episodes(6), InstanceOptions())
    harmless = [np.zeros_like(whole.critical), np.zeros_like(whole.rejected)]
    vars(whole).update(critical=harmless[0], rejected=harmless[1])
    with pytest.raises(UnsupportedError, match="have the same label"):
        train("made", MINED, whole, InstanceOptions(), OPTIONS)


# From end to end

THINGS = (
    *("cat", "dog", "river", "stone", "tree", "cloud", "ship", "bridge", "apple", "moon"),
    *("clock", "knife", "chair", "horse", "glass", "bread", "candle", "window", "garden", "mirror"),
    *("piano", "train", "rocket", "kite", "lamp", "bottle", "spoon", "island", "desert", "forest"),
)
# What an answer comes to are its first five words; what it says behind them does not matter.
CHECKER = """
import json, sys
print(*json.loads(sys.stdin.readline())["text"].split()[:5])
"""


def test_mining_and_training_end_to_end_beat_a_coin(tmp_path: Path) -> None:
    """On a task whose mismatches matter at the beginning; the drafter is three layers short.

    The default drafter has too few mismatches to learn from.
    """
    draft, target = default_artifact("int8", 27), default_artifact("fp32")
    wanted = [f"Say in two short sentences what a {thing} is." for thing in THINGS]
    lines = [json.dumps({"question": item, "answer": ""}) for item in wanted]
    (tmp_path / "things.jsonl").write_text("\n".join(lines))
    (tmp_path / "checker.py").write_text(CHECKER)
    pair = ["--draft", draft, "--target", target, "--questions", tmp_path / "things.jsonl"]
    task = ["--task", "command", "--checker", f"{sys.executable} -IS {tmp_path / 'checker.py'}"]
    size = ["--max-tokens", 20, "--context", 128, "--out", tmp_path / "mined"]
    begun_s = time.process_time()
    run("mine", *pair, *task, *size, "--count", 10)
    first = sorted((tmp_path / "mined").iterdir())
    written = [path.stat().st_mtime_ns for path in first]
    run("mine", *pair, *task, *size)
    assert [path.stat().st_mtime_ns for path in first] == written
    assert len(list((tmp_path / "mined").glob("*.safetensors"))) == len(THINGS)
    run("train", tmp_path / "mined", "--out", tmp_path / "heads" / "things", "--validation", 0.33)
    assert time.process_time() - begun_s < 180
    head = DecisionHead.load(str(tmp_path / "heads" / "things"))
    assert head.card.drafter.model == MiningRecord.read(tmp_path / "mined").drafter["model"]
    assert head.card.drafter.hidden > D
    assert head.card.training.auc is not None
    assert head.card.training.auc >= 0.5 + MARGIN


def run(*arguments: object) -> None:
    assert main(["judge", *map(str, arguments)]) == 0
