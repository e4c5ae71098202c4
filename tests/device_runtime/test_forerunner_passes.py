"""How many drafts a pass makes under `ahead`, on a device: by the target's interval and the RTT."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pilotfish.bridge import TrivialBridge
from pilotfish.device_runtime import forerunner
from pilotfish.device_runtime.forerunner import Forerunner
from pilotfish.drafting.ahead import PassAcceptance
from pilotfish.drafting.window import Level
from tests.support.plans import plan

VOCAB = 64
PROMPT = np.array([1, 2, 3], np.uint32)


class MaskedDrafter:
    """A drafter of 8 tokens per pass of a second; it notes how many each pass was to predict."""

    drafts_per_pass, pass_times = 8, {1: 1.0, 15: 1.0}
    bridge = TrivialBridge(VOCAB)

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def remaining_context(self, committed: Any) -> int:
        return 1000

    def catch_up(self, committed: Any, drafts: Any) -> bool:
        return False

    def predict_next(self, committed: Any, drafts: Any, most: int) -> Level:
        self.wanted.append(most)
        return Level(np.zeros((most, VOCAB), np.float32))


def runner_of(token_s: float, rtt_s: float) -> tuple[Forerunner, MaskedDrafter]:
    """A forerunner that has learnt that the second draft of a pass is wrong."""
    limits = SimpleNamespace(window=64)
    edge = SimpleNamespace(incarnation=1, limits=limits, token_s=token_s, hint=lambda *_: 1)
    acceptance, drafter = PassAcceptance(), MaskedDrafter()
    for _ in range(60):
        acceptance.count(0, agreed=True)
        acceptance.count(1, agreed=False)
    runner = Forerunner(
        cast(Any, drafter), cast(Any, edge), plan(protocol="ahead", temperature=0.0), acceptance,
        PROMPT, None, last=500, ends=(), rtt_s=rtt_s,
    )  # fmt: skip
    return runner, drafter


@pytest.mark.parametrize(
    ("token_s", "rtt_s", "single"),
    [(10.0, 0.0, True), (2.0, 20.0, True), (0.25, 0.0, False), (0.0, 0.0, True)],
)
def test_the_edges_own_time_counts_before_tokens_come(
    token_s: float, rtt_s: float, single: bool
) -> None:
    runner, drafter = runner_of(token_s, rtt_s)
    runner.step()
    assert (drafter.wanted[0] == 1) == single


def test_the_interval_between_tokens_counts_as_soon_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target alone takes 10 s, but tokens come every 0.25 s, and later every 10 s."""
    runner, drafter = runner_of(10.0, 0.0)
    now_s = 100.0
    monkeypatch.setattr(forerunner.time, "monotonic", lambda: now_s)
    for _ in range(3):
        runner.record_tokens([60], "", 0.1)
        now_s += 0.25
    runner.step()
    assert drafter.wanted[-1] > 1
    for _ in range(60):
        now_s += 10.0
        runner.record_tokens([60], "", 0.1)
    runner.step()
    assert drafter.wanted[-1] == 1
