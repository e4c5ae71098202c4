"""Whose drafts ride, and how many: purse, price and trust bound what any source can cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.drafting.ahead import Proposal
from pilotfish.drafting.lookup import TextHints
from pilotfish.edge_runtime.hint_sources import (
    DeviceHints,
    HintSources,
    SourceBudget,
    create_hint_sources,
)
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols import Ahead, Greedy
from pilotfish.wire.protocols.ahead import DEVICE, EDGE, MOST_DRAFTS, TEXT, AheadOptions, HintChain
from tests.support.examples import examples

FIRST, MOST, ALLOWANCE = 4.0, 8.0, 0.01  # tokens of a purse


class Said:
    """A source that says what it is told to say."""

    def __init__(self, odds, ids=None):
        self.odds, self.ids = odds, [1] * len(odds) if ids is None else ids
        self.comparisons = []
        self.requests = 0

    def propose(self, limit):
        self.requests += 1
        return Proposal(self.ids[:limit], self.odds[:limit])

    def record_tokens(self, ids):
        self.comparisons.append(list(ids))


def hints(**sources):
    return HintSources([SourceBudget(source, name) for name, source in sources.items()], None)


def take(under, most, price):
    """Take all that is offered, as a pass does that is alone."""
    return under.attach(len(under.propose(most, price)))


@given(
    st.floats(0.001, 0.9),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 15)), min_size=1, max_size=60),
)
@examples(200)
def test_a_source_never_costs_more_than_its_purse(price, passes):
    """Whatever it claims and whatever comes true of it, in any order."""
    source = Said([])
    under = hints(device=source)
    spent = won = made = 0.0
    for odds, right in passes:
        source.odds, source.ids = [odds] * MOST_DRAFTS, [1] * MOST_DRAFTS
        drafts = take(under, 20, price)
        assert len(drafts) <= MOST_DRAFTS
        accepted = min(right, len(drafts))
        ids = [1] * (accepted + 1)
        spent, won, made = spent + len(drafts) * price, won + accepted, made + len(ids)
        under.record_pass(ids, accepted)
        assert 0.0 <= under.budgets[0].balance <= MOST
        assert spent <= FIRST + won + ALLOWANCE * made + 1e-6


@pytest.mark.parametrize("price", [0.01, 0.05, 0.3, 0.9])
def test_a_liar_costs_a_few_tokens_and_then_a_hundredth(price):
    liar = Said([1.0] * MOST_DRAFTS)
    under = hints(device=liar)
    positions = 0
    for _ in range(2000):
        positions += len(take(under, MOST_DRAFTS, price))
        under.record_pass([0], 0)
    assert positions * price <= FIRST + 2000 * ALLOWANCE


def test_new_generations_of_a_session_refill_no_purse():
    """However short its answers are, and with whatever it begins each of them anew."""
    price, generations, drafts = 0.5, 100, 0
    exchange, under, committed = Ahead(AheadOptions(hints="device")), None, CommittedTokens()
    frames = [bytes(encode_ids(np.full(MOST_DRAFTS, 1, np.uint32), 10)), b"\xff" * MOST_DRAFTS]
    for _ in range(generations):
        under = create_hint_sources(exchange, committed, 64, previous=under)
        assert under.add_device_hint(len(committed), committed.hash, frames, 10)
        drafts += len(take(under, MOST_DRAFTS, price))
        under.record_pass([0], 0)
        committed.extend([0])
    assert 0 < drafts * price <= FIRST + generations * ALLOWANCE


def test_a_source_is_trusted_again_after_better_drafts():
    source = Said([0.9] * 4)
    under = hints(device=source)
    for _ in range(30):
        take(under, MOST_DRAFTS, 0.1)
        under.record_pass([0], 0)
    low = under.budgets[0].reliability
    for _ in range(2000):
        drafts = take(under, MOST_DRAFTS, 0.1)
        under.record_pass([1] * (len(drafts) + 1), len(drafts))
    assert low < 0.75
    assert under.budgets[0].reliability > 0.95
    assert take(under, MOST_DRAFTS, 0.1) == [1] * 4


@pytest.mark.parametrize(
    ("price", "count"), [(0.0, 4), (0.01, 4), (0.2, 3), (0.3, 2), (0.6, 1), (0.95, 0), (2.0, 0)]
)
def test_a_draft_rides_if_the_odds_of_its_path_are_its_price(price, count):
    under = hints(device=Said([0.9, 0.6, 0.5, 0.5]))
    assert len(take(under, MOST_DRAFTS, price)) == count


@pytest.mark.parametrize("most", [-1, 0, 1, 3, 15, 100])
def test_no_more_than_there_is_room_for(most):
    for price in (0.0, 1e-9, 0.01):
        under = hints(device=Said([1.0] * 100))
        assert len(take(under, most, price)) == max(0, min(most, MOST_DRAFTS))


@given(
    st.lists(st.floats(0.0, 1.0), max_size=20),
    st.lists(st.floats(0.0, 1.0), max_size=20),
    st.one_of(st.just(0.0), st.floats(1e-320, 0.9)),
)
@examples(80)
def test_the_source_that_promises_most_goes_first(device, text, price):
    under = hints(device=Said(device), text=Said(text, [2] * len(text)))
    drafts = take(under, MOST_DRAFTS, price)

    def gain(odds):
        paths = np.cumprod(odds[:MOST_DRAFTS])
        worth = [p for at, p in enumerate(paths) if (paths[: at + 1] >= price).all()]
        afford = int(FIRST / price) if MOST_DRAFTS * price > FIRST else MOST_DRAFTS
        return sum(worth[:afford]) - price * len(worth[:afford])

    gains = gain(device), gain(text)
    if drafts and abs(gains[0] - gains[1]) > 1e-9:
        assert drafts[0] == (1 if gains[0] > gains[1] else 2)
    if not drafts:
        assert max(gains) <= 1e-9


def test_promises_are_measured_by_what_they_brought():
    """The device claims more than it keeps: then the text's modest word is worth more."""
    device, text = Said([1.0] * 5), Said([0.6, 0.4], [2, 2])
    under = hints(device=device, text=text)
    seen = []
    for _ in range(300):
        drafts = take(under, MOST_DRAFTS, 0.02)
        source = under.attached.budget.name if under.attached.budget else ""
        seen.append(source)
        accepted = len(drafts) if source == TEXT else 0
        under.record_pass([2] * (accepted + 1), accepted)
        assert device.comparisons == text.comparisons  # all follow the text
    assert seen[0] == DEVICE
    assert seen[-100:].count(TEXT) > 60  # the device's purse lets it try now and then


def test_a_pass_is_settled_once():
    under = hints(device=Said([0.9] * 3))
    take(under, MOST_DRAFTS, 0.1)
    assert under.record_pass([1, 1, 1, 1], 3).ids == [1] * 3
    before = under.budgets[0].balance
    assert under.record_pass([5], 0).budget is None
    assert under.budgets[0].balance == pytest.approx(before + ALLOWANCE)


def test_drafts_taken_for_a_pass_that_was_not_made_cost_nothing():
    under = hints(device=Said([0.9] * 3))
    for _ in range(500):
        take(under, MOST_DRAFTS, 0.9)
    assert under.budgets[0].balance == FIRST


@pytest.mark.parametrize(
    ("source_value", "names"),
    [("all", [DEVICE, TEXT, EDGE]), ("device", [DEVICE]), ("edge", [TEXT, EDGE])],
)
def test_whose_hints_are_used_is_the_generations_choice(source_value, names):
    committed = CommittedTokens()
    committed.extend([1, 2, 1])
    exchange = Ahead(AheadOptions(hints=source_value))
    under = create_hint_sources(exchange, committed, 64, Trailing)
    assert [account.name for account in under.budgets] == names
    frames = [bytes(encode_ids(np.array([2, 1], np.uint32), 10)), b"\xff\xff"]
    assert under.add_device_hint(3, committed.hash, frames, 10) == (DEVICE in names)
    assert EDGE not in [
        account.name for account in create_hint_sources(exchange, committed, 64).budgets
    ]


class Trailing(Said):
    def __init__(self):
        super().__init__([])


def test_a_generation_by_windows_takes_no_hints():
    assert create_hint_sources(None, CommittedTokens(), 64) is None
    assert create_hint_sources(Greedy(), CommittedTokens(), 64) is None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2)))
@examples(150)
def test_what_the_text_repeats_is_offered_and_learnt_without_a_pass(prompt, answer):
    committed = CommittedTokens()
    committed.extend(prompt)
    source = TextHints(committed)
    for id in answer:
        propose = source.propose(5)
        assert len(propose.ids) == len(propose.acceptance) <= 5
        assert all(0.0 <= odds <= 1.0 for odds in propose.acceptance)
        if propose.ids:  # it stood so before
            text = committed.ids.tolist()
            at = [i for i in range(len(text) - 1) if text[i : i + 2] == [text[-1], propose.ids[0]]]
            assert at or text[-1] in text[:-1]
        committed.extend([id])
        source.record_tokens([id])


def test_a_repeat_is_found_soon_however_long_nothing_was_repeated():
    committed = CommittedTokens()
    committed.extend(range(100))
    source = TextHints(committed)
    offered = []
    for id in [*range(1000, 1200), *range(20, 60)]:
        offered.append(list(source.propose(4).ids))
        committed.extend([id])
        source.record_tokens([id])
    assert not any(offered[:200])
    first = next(at for at, ids in enumerate(offered) if ids)
    assert first - 200 <= 5
    for at in range(first, len(offered) - 4):
        assert offered[at] == list(range(20 + at - 200, 24 + at - 200))


def test_the_chain_of_a_device_follows_the_text():
    committed = CommittedTokens()
    committed.extend([1])
    chain = HintChain(committed, 8)
    frames = [bytes(encode_ids(np.array([2, 3, 4], np.uint32), 10)), b"\xff\x80\x40"]
    assert chain.add(1, committed.hash, frames, 10)
    under = HintSources([SourceBudget(DeviceHints(chain), DEVICE)], chain)
    assert take(under, 2, 0.0) == [2, 3]
    committed.extend([2])
    under.record_pass([2], 1)
    assert take(under, 5, 0.0) == [3, 4]
    committed.extend([9])
    under.record_pass([9], 0)
    assert take(under, 5, 0.0) == ()
