"""wisv's rule, both halves with bytes between them, on made-up logits and states (wisv §III-A)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.edge_runtime.head_file import ModelIdentity
from pilotfish.lab.field.papers import wisv
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS, hidden_bytes
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols import (
    PROTOCOL_REGISTRY,
    BoundDecisionHead,
    Decision,
    Draft,
    SamplingParams,
    StatesNeeded,
)
from pilotfish.wire.protocols.decision_head import JudgedDraft, JudgedProtocol
from pilotfish.wire.protocols.protocol import PairSizes
from tests.support.examples import examples
from tests.support.judging import random_head

PROTOCOLS = ("wisv-full", "wisv-selective")
VOCAB = 6
D, T = 5, 7  # widths of the drafter's and the target's states
LAW = SamplingParams(sampling=Sampling(), seed=0)
NO_IDS = np.empty(0, np.uint32)
ENDS = [
    ModelIdentity(model=name, origin=digit * 16, hidden=width, precision="fp32")
    for name, digit, width in (("drafter", "a", D), ("target", "b", T))
]
HEADS = [random_head(*ENDS, seed=seed) for seed in range(4)]


@dataclass(frozen=True, eq=False)
class Case:
    """A fixed draft and what the target makes of it: u32 [γ], [γ+1, V], states [γ, D], [γ+1, T]."""

    ids: NDArray[np.uint32]
    logits: Floats
    drafter: Floats
    target: Floats

    @property
    def wrong(self) -> list[int]:
        """The mismatches, one by one."""
        return [i for i, token in enumerate(self.ids) if token != self.logits[i].argmax()]


@st.composite
def cases(draw: Any) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    window, alike = draw(st.integers(0, 16)), draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    logits = random.standard_normal((window + 1, VOCAB)).astype(np.float32)
    guesses = random.integers(VOCAB, size=window)
    ids = np.where(random.random(window) < alike, logits[:-1].argmax(1), guesses)
    states = [random.standard_normal(s).astype(np.float32) for s in ((window, D), (window + 1, T))]
    return Case(ids.astype(np.uint32), logits, *states)


def judges() -> st.SearchStrategy[BoundDecisionHead]:
    """A head bound to some link, at any threshold."""
    at = st.floats(0.0, 1.0)
    known = st.none() | st.floats(1e-4, 1.0)
    rates = st.none() | st.floats(1e5, 1e9)
    links = st.builds(Channel, rtt_s=known, up_bps=rates, down_bps=rates, loss=known)
    return st.builds(lambda head, c, t: head.judge(c, t), st.sampled_from(HEADS), links, at)


def drafted(case: Case, exchange: JudgedProtocol) -> JudgedDraft:
    return exchange.attach_states(JudgedDraft(case.ids), case.drafter.__getitem__)


def played(
    protocol: str,
    case: Case,
    judge: BoundDecisionHead,
    form: str = "int8",
    threshold: float | None = None,
) -> tuple[Decision, list[list[Buffer]]]:
    """A round; the decision, and the frames of each message but the verdict.

    threshold: the one that the request names, which the device knows.
    """
    device = PROTOCOL_REGISTRY[protocol]
    assert isinstance(device, JudgedProtocol)
    named = {} if threshold is None else {"threshold": threshold}
    device = device.with_options(device.read_options({"hidden": form, **named}))
    edge = device.with_resource(judge)
    draft = drafted(case, device)
    messages = [device.encode_draft(draft, NO_IDS, VOCAB)]
    admitted = edge.decode_draft([bytes(frame) for frame in messages[0]], VOCAB)
    ruling = edge.verify(admitted, case.logits, LAW, round_start=3, hidden=case.target)
    if isinstance(ruling, StatesNeeded):
        messages.append(list(ruling.frames))
        messages.append(device.encode_states(draft, messages[-1]))
        ruling = edge.verify_with_states(admitted, ruling, messages[-1])
    assert device.finish_round(draft, ruling, LAW, round_start=3, vocab_size=VOCAB) == ruling.token
    return ruling, messages


def message_of(ruling: Decision) -> tuple[int, int | None, int]:
    assert not ruling.frames
    return ruling.accepted, ruling.token, (*ruling.notes, 0)[0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(cases(), st.sampled_from(HEADS), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6))
def test_a_higher_threshold_forgives_no_less(
    protocol: str, case: Case, head: Any, thresholds: list[float]
) -> None:
    result = [played(protocol, case, head.judge(Channel(), t))[0] for t in sorted(thresholds)]
    for lower, higher in pairwise(result):
        assert lower.notes <= higher.notes
        assert lower.accepted <= higher.accepted


def test_there_is_something_in_between() -> None:
    """Else the tests above would hold for heads that are all or nothing."""
    random = np.random.default_rng(1)
    names = set()
    for head in HEADS:
        states = (random.standard_normal((n, d)).astype(np.float32) for n, d in ((16, D), (17, T)))
        wrong = np.eye(VOCAB, dtype=np.float32)[np.ones(17, np.int64)]
        case = Case(np.zeros(16, np.uint32), wrong, *states)
        for threshold in np.linspace(0.0, 1.0, 21):
            judge = head.judge(Channel(), threshold)
            names.update(played("wisv-full", case, judge)[0].notes)
    assert len(names) > 5, names


@given(cases(), judges(), st.sampled_from(HIDDEN_FORMATS))
@examples(200)
def test_both_protocols_decide_alike(case: Case, judge: BoundDecisionHead, form: str) -> None:
    full, selective = (played(protocol, case, judge, form)[0] for protocol in PROTOCOLS)
    assert message_of(full) == message_of(selective)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(cases(), judges())
def test_what_was_forgiven_is_counted(protocol: str, case: Case, judge: BoundDecisionHead) -> None:
    ruling, _ = played(protocol, case, judge)
    assert ruling.notes == (sum(at < ruling.accepted for at in case.wrong),)
    # what ended the window is a mismatch, and the target's own word takes its place
    assert ruling.accepted == len(case.ids) or ruling.accepted in case.wrong
    assert ruling.token == case.logits[ruling.accepted].argmax()


class Scripted:
    """Rejects the mismatches that a script says, and remembers what it was shown."""

    width = D
    outcome = None

    def __init__(self, rejected: list[bool]) -> None:
        self.rejected = rejected
        self.states_seen: list[tuple[Floats, Floats, NDArray[np.int64]]] = []

    def __call__(
        self, drafter: Floats, target: Floats, tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        self.states_seen.append((drafter, target, tokens))
        return np.array(self.rejected[: len(tokens)])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(cases(), st.lists(st.booleans(), min_size=16, max_size=16))
def test_the_judge_sees_both_states_at_the_mismatched_token(
    protocol: str, case: Case, script: list[bool]
) -> None:
    """All mismatches, though one before them was forgiven or rejected: one pass finds them."""
    judge = Scripted(script)
    ruling, _ = played(protocol, case, judge, "fp16")
    if not case.wrong:
        assert not judge.states_seen
        return
    ((drafter, target, tokens),) = judge.states_seen
    np.testing.assert_array_equal(drafter, case.drafter[case.wrong].astype(np.float16))
    np.testing.assert_array_equal(target, case.target[np.array(case.wrong) + 1])
    assert tokens.tolist() == [[case.ids[at], case.logits[at].argmax()] for at in case.wrong]
    ended = [at for at, no in zip(case.wrong, script, strict=False) if no]
    assert ruling.accepted == (ended[0] if ended else len(case.ids))


@given(cases(), judges(), st.sampled_from(HIDDEN_FORMATS))
def test_frames_are_as_long_as_the_paper_says(
    case: Case, judge: BoundDecisionHead, form: str
) -> None:
    """(5), (7)-(9) with an id in two bytes, a position in one, and d·b_h the codec's."""
    window, wrong = len(case.ids), len(case.wrong)
    sizes = wisv.MessageBits(token=16, position=8, hidden=8 * hidden_bytes(D, form))
    _, full = played("wisv-full", case, judge, form)
    assert [bits(frames) for frames in full] == [wisv.eq_5_full_upload_bits(window, sizes)]
    _, selective = played("wisv-selective", case, judge, form)
    wanted = [wisv.eq_7_first_upload_bits(window, sizes)]
    if wrong and judge.outcome is None:
        wanted.append(wisv.eq_8_request_bits(wrong, sizes))
        wanted.append(wisv.eq_9_second_upload_bits(wrong, sizes))
    assert [bits(frames) for frames in selective] == wanted


@pytest.mark.parametrize("threshold", [0.0, 1.0])
@given(cases(), st.sampled_from(HEADS))
@examples(40)
def test_at_thresholds_0_and_1_no_states_are_sent(threshold: float, case: Case, head: Any) -> None:
    """The decision is that with the states, which an edge accepts, too."""
    judge = head.judge(Channel(), threshold)
    results = []
    for protocol in PROTOCOLS:
        with_states = played(protocol, case, judge)[0]
        decision, messages = played(protocol, case, judge, threshold=threshold)
        assert message_of(decision) == message_of(with_states)
        assert [bits(frames) for frames in messages] == [16 * len(case.ids)]
        results.append(message_of(decision))
    assert results[0] == results[1]
    chosen = case.logits.argmax(1)
    first = min(case.wrong, default=len(case.ids)) if threshold == 0.0 else len(case.ids)
    assert results[0][:2] == (first, chosen[first])


def test_missing_states_are_accepted_at_thresholds_0_and_1_alone() -> None:
    exchange = PROTOCOL_REGISTRY["wisv-full"]
    ids = np.zeros(3, np.uint32)
    states = np.ones((3, D), np.float32)
    full = exchange.encode_draft(JudgedDraft(ids, states=states), NO_IDS, VOCAB)
    for threshold in (0.0, 1e-9, 0.5, 1 - 1e-9, 1.0):
        edge = exchange.with_resource(HEADS[0].judge(Channel(), threshold))
        assert edge.decode_draft(full, VOCAB).states is not None
        if threshold in (0.0, 1.0):
            assert edge.decode_draft([full[0], b""], VOCAB).states is None
        else:
            with pytest.raises(MalformedError, match="A frame of 0 bytes"):
                edge.decode_draft([full[0], b""], VOCAB)
        for wrong in (full[1][:-1], b"\0"):
            with pytest.raises(MalformedError, match="does not hold 3 hidden states"):
                edge.decode_draft([full[0], wrong], VOCAB)


def test_estimates_at_thresholds_0_and_1_are_those_of_greedy() -> None:
    sizes, expansion = PairSizes(VOCAB, D), (1,) * 6
    greedy = PROTOCOL_REGISTRY["greedy"].estimate_bytes(expansion, Sampling(), 0.5, sizes)
    for name in PROTOCOLS:
        exchange = PROTOCOL_REGISTRY[name]
        for threshold in (None, 0.0, 0.5, 1.0):
            options = exchange.read_options({} if threshold is None else {"threshold": threshold})
            bound = exchange.with_options(options)
            certain = threshold in (0.0, 1.0)
            estimated = bound.estimate_bytes(expansion, Sampling(), 0.5, sizes)
            assert (estimated == greedy) == certain
            assert bound.reads_last_token == (name == "wisv-full" and not certain)
            assert bound.requests_states == (name == "wisv-selective" and not certain)


def bits(frames: list[Buffer]) -> int:
    return 8 * sum(map(len, frames))


def test_only_judged_protocols_judge_and_inquire() -> None:
    for name, exchange in PROTOCOL_REGISTRY.items():
        assert bool(exchange.requires) == exchange.decides_by_link == (name in PROTOCOLS)
        assert exchange.lossless != any(counter.is_lossy_gain for counter in exchange.counters)
        if name != "wisv-selective":
            with pytest.raises(MalformedError):
                exchange.encode_states(Draft(NO_IDS), [b"\0"])
            with pytest.raises(MalformedError):
                exchange.verify_with_states(Draft(NO_IDS), WANTED, [b"\0"])


WANTED = StatesNeeded(
    np.array([0]), np.array([0, 0]), np.zeros((1, T), np.float32), np.zeros(1, np.bool_)
)
ASKED = {
    "nothing": [b""],
    "no frame": [],
    "two frames": [b"\0", b"\1"],
    "a token too many": [b"\3"],
    "all tokens and one more": [b"\0\1\2\3"],
    "a token twice": [b"\1\1"],
    "not in order": [b"\2\0"],
    "far behind": [b"\xff"],
    "more than there are": [bytes(range(200))],
    "all of them, and again": [b"\0\1\2\0\1\2"],
}


@pytest.mark.parametrize("items", ASKED.values(), ids=ASKED.keys())
def test_inquiries_that_cannot_be(items: list[bytes]) -> None:
    exchange = PROTOCOL_REGISTRY["wisv-selective"]
    case = Case(
        *(np.zeros(s, t) for s, t in ((3, np.uint32), ((4, 6), "f4"), ((3, D), "f4"))), None
    )
    draft = drafted(case, exchange)
    with pytest.raises(MalformedError):
        exchange.encode_states(draft, items)
    assert len(exchange.encode_states(draft, [b"\0\2"])[0]) == 2 * hidden_bytes(D, "int8")
