"""Token trees among the target's work: one pass each, and only the accepted path stays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pilotfish.edge_runtime.scheduler import NARROW, Job, Scheduler
from pilotfish.edge_runtime.targets.local import LocalTarget
from pilotfish.engines.engine import CHUNK, Engine, Work
from pilotfish.engines.onnx_decoder import Decoder, Output, Pass
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.sequences import path_along
from pilotfish.wire.protocols import Decision, Draft
from tests.support.hostile import drafted
from tests.support.passes import run
from tests.support.tiny import tiny_artifact

CONTEXT = 512
SLOTS = 4
NODES = 14  # of ⟨2,2,2⟩ without duplicates


class Watched(Decoder):
    """A decoder that remembers what it was fed: slot and tokens of each pass."""

    def __init__(self, path: Path, slots: int) -> None:
        self.fed: list[tuple[int, list[int]]] = []
        super().__init__(path, slots=slots, threads=1)

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        self.fed += [(item.slot, item.tokens.tolist()) for item in passes]
        return super().forward(passes)


class Desk:
    """A scheduler to which tests submit windows, chains and trees, and which they then run."""

    def __init__(self, decoder: Watched, fresh: Decoder) -> None:
        decoder.fed = []
        self.decoder = decoder
        self._fresh = Engine(fresh)
        self.scheduler = Scheduler(LocalTarget(Engine(decoder)))

    def submit(
        self, slot: int, text: list[int], draft: Draft | None = None, accept: int = 0
    ) -> tuple[Job, list[Floats]]:
        """A draft after this text, or the text alone; the job, and the logits it is decided by."""
        seen: list[Floats] = []

        def rule(logits: Floats, hidden: Floats) -> Decision:
            seen.append(logits.copy())
            if accept < 0:
                raise ValueError("a rule that fails")
            return Decision(accept, 0)

        tokens = np.array([*text, *([] if draft is None else draft.ids)], np.uint32)
        rows = 0 if draft is None else len(draft.ids) + 1
        job = Job(bytes([slot]) * 16, slot, tokens, rows, rule if rows else None, draft)
        self.scheduler.submit(job)
        return job, seen

    def run(self) -> list[Job]:
        done: list[Job] = []
        while self.scheduler.wait_s() is not None:
            done += run(self.scheduler)
        return done

    def held(self, slot: int, tokens: list[int]) -> int:
        """How many of these tokens the slot holds."""
        return self.scheduler.target.cached(slot, np.array([*tokens, 0], np.uint32), 1)

    def take_fed(self) -> list[tuple[int, list[int]]]:
        """What was fed since the last call."""
        fed, self.decoder.fed = self.decoder.fed, []
        return fed

    def by_paths(self, text: list[int], draft: Draft) -> Floats:
        """Logits [n + 1, V] of the root and each node, each read as a chain by a fresh decoder."""
        rows = []
        for node in range(len(draft.ids) + 1):
            self._fresh.clear(0)
            chain = np.array([*text, *path_tokens(draft, node)])
            rows.append(self._fresh.run([Work(0, chain)])[0].logits[0].copy())
        return np.array(rows)

    def agrees(self, seen: list[Floats], text: list[int], draft: Draft) -> None:
        """The job was decided once, by the logits that it should have been."""
        assert len(seen) == 1
        np.testing.assert_allclose(seen[0], self.by_paths(text, draft), atol=1e-4)


def path_tokens(draft: Draft, node: int) -> list[int]:
    return [int(draft.ids[place - 1]) for place in draft.path(node)]


def text(seed: int, length: int) -> list[int]:
    values: list[int] = np.random.default_rng(seed).integers(0, 60, length).tolist()
    return values


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Decoder]:
    path = tmp_path_factory.mktemp("trees") / "target"
    tiny_artifact(path, vocab=64, context=CONTEXT, seed=3)
    return Watched(path, SLOTS), Decoder(path, slots=1, threads=1)


@pytest.fixture
def desk(decoders: tuple[Watched, Decoder]) -> Desk:
    return Desk(*decoders)


@pytest.fixture
def tree() -> Draft:
    """⟨2,2,2⟩ in which some candidates are equal."""
    for seed in range(100):
        result = drafted("tree", (2, 2, 2), seed)
        if 10 <= len(result.ids) < NODES:
            return result
    pytest.fail("no tree with duplicates")


def test_a_tree_shares_a_pass_with_chains(desk: Desk, tree: Draft) -> None:
    texts = [text(slot, 10 + 7 * slot) for slot in range(3)]
    drafts = [tree, drafted("coupled", (1, 1, 1), 1), drafted("coupled", (1,) * 5, 2)]
    for slot in range(3):
        desk.submit(slot, texts[slot][:-1])
    desk.run()
    before = desk.scheduler.passes
    seen = [desk.submit(slot, texts[slot], drafts[slot])[1] for slot in range(3)]
    assert len(desk.run()) == 3
    assert desk.scheduler.passes == before + 1
    for slot in range(3):
        desk.agrees(seen[slot], texts[slot], drafts[slot])


@pytest.mark.parametrize("accept", range(11))
def test_after_a_tree_the_slot_holds_the_accepted_path(
    desk: Desk, tree: Draft, accept: int
) -> None:
    """Nothing that was accepted is read again, and nothing else has stayed."""
    prompt = text(1, 20)
    desk.submit(1, prompt[:-1])
    _, seen = desk.submit(1, prompt, tree, accept)
    desk.run()
    desk.agrees(seen, prompt, tree)
    committed = [*prompt, *path_tokens(tree, accept)]
    assert desk.held(1, committed) == len(committed)
    desk.take_fed()
    following = drafted("tree", (2, 2), 5)
    _, seen = desk.submit(1, [*committed, 9], following)
    desk.run()
    assert desk.take_fed() == [(1, [9, *following.ids.tolist()])]
    desk.agrees(seen, [*committed, 9], following)


def test_many_trees_one_after_another(desk: Desk) -> None:
    random = np.random.default_rng(0)
    committed = text(2, 30)
    desk.submit(0, committed[:-1])
    desk.run()
    for turn in range(12):
        chain = turn % 4 == 3
        shape = [(2, 2, 1), (3,), (1, 2, 2), (1, 1, 1)][turn % 4]
        draft = drafted("coupled" if chain else "tree", shape, turn)
        accept = int(random.integers(0, len(draft.ids) + 1))
        desk.take_fed()
        _, seen = desk.submit(0, committed, draft, accept)
        desk.run()
        assert desk.take_fed() == [(0, [committed[-1], *draft.ids.tolist()])]
        desk.agrees(seen, committed, draft)
        committed += [*path_tokens(draft, accept), turn]


def test_a_window_without_tokens_is_a_tree_too(desk: Desk) -> None:
    empty = drafted("tree", ())
    prompt = text(3, 12)
    _, seen = desk.submit(2, prompt, empty)
    desk.run()
    desk.agrees(seen, prompt, empty)
    assert desk.held(2, prompt) == desk.decoder.length(2) == len(prompt)


def test_a_tree_whose_text_is_not_read_yet_comes_in_the_same_pass(desk: Desk, tree: Draft) -> None:
    prompt = text(4, 17)
    _, seen = desk.submit(0, prompt, tree, accept=3)
    desk.run()
    assert desk.take_fed() == [(0, [*prompt, *tree.ids.tolist()])]
    desk.agrees(seen, prompt, tree)
    committed = [*prompt, *path_tokens(tree, 3)]
    assert desk.held(0, committed) == len(committed)
    _, seen = desk.submit(0, [*committed, 5], tree)
    desk.run()
    assert desk.take_fed() == [(0, [5, *tree.ids.tolist()])]
    desk.agrees(seen, [*committed, 5], tree)


@pytest.mark.parametrize("length", [CHUNK - 8, CHUNK, 2 * CHUNK - 5, 2 * CHUNK + 40])
@pytest.mark.parametrize("read_before", [True, False])
def test_a_tree_after_a_long_prompt(
    desk: Desk, tree: Draft, length: int, read_before: bool
) -> None:
    prompt = text(5, length)
    if read_before:  # as the edge does while the device drafts
        desk.submit(0, prompt[:-1])
    _, seen = desk.submit(0, prompt, tree, accept=2)
    desk.run()
    fed = desk.take_fed()
    assert [token for _, tokens in fed for token in tokens] == [*prompt, *tree.ids.tolist()]
    assert max(len(tokens) for _, tokens in fed) <= CHUNK
    desk.agrees(seen, prompt, tree)
    committed = [*prompt, *path_tokens(tree, 2)]
    _, seen = desk.submit(0, [*committed, 5], tree)
    desk.run()
    assert desk.take_fed() == [(0, [5, *tree.ids.tolist()])]
    desk.agrees(seen, [*committed, 5], tree)


def test_a_tree_whose_rule_fails_is_read_again(
    desk: Desk, tree: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="pilotfish.edge")
    prompt, neighbour = text(6, 20), text(7, 15)
    failing, _ = desk.submit(0, prompt, tree, accept=-1)
    other, other_seen = desk.submit(1, neighbour, tree, accept=1)
    assert set(desk.run()) == {failing, other}
    assert isinstance(failing.error, ValueError)
    assert failing.decision is None
    assert other.error is None
    desk.agrees(other_seen, neighbour, tree)
    desk.take_fed()
    _, seen = desk.submit(0, prompt, tree, accept=1)
    desk.run()
    assert desk.take_fed() == [(0, [prompt[-1], *tree.ids.tolist()])]
    desk.agrees(seen, prompt, tree)


def test_a_text_that_goes_on_like_a_tree_whose_rule_failed_follows_one_path(
    desk: Desk, tree: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    """The slot has the nodes as a tree, in whatever order the next text has their tokens."""
    caplog.set_level(logging.CRITICAL, logger="pilotfish.edge")
    prompt = text(6, 20)
    desk.submit(0, prompt, tree, accept=-1)
    desk.run()
    desk.take_fed()
    longer = [*prompt, *tree.ids.tolist(), 5]
    assert tree.parents is not None
    path = path_along(tree.ids, tree.ids, tree.parents)
    assert 0 < len(path) < len(tree.ids)
    following = drafted("coupled", (1, 1), 1)
    job, seen = desk.submit(0, longer, following)
    assert desk.run() == [job]
    assert job.error is None
    rest = tree.ids[len(path) :].tolist()
    assert desk.take_fed() == [(0, [*rest, 5, *following.ids.tolist()])]
    desk.agrees(seen, longer, following)


def test_a_tree_that_does_not_fit_the_context_fails_alone(
    desk: Desk, tree: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="pilotfish.edge")
    prompt = text(8, CONTEXT - 5)
    desk.submit(0, prompt[:-1])
    desk.run()
    too_long, seen = desk.submit(0, prompt, tree)
    assert desk.run() == [too_long]
    assert too_long.error is not None
    assert seen == []
    short = drafted("tree", (2, 2), 3)
    _, seen = desk.submit(0, prompt[:-10], short)
    desk.run()
    desk.agrees(seen, prompt[:-10], short)


def test_cancelled_trees_leave_nothing_behind(desk: Desk, tree: Draft) -> None:
    prompt = text(9, 20)
    desk.submit(0, prompt[:-1])
    desk.run()
    desk.take_fed()
    never_begun, seen = desk.submit(0, prompt, tree, accept=4)
    never_begun.cancelled = True
    assert desk.run() == []
    assert desk.take_fed() == []
    assert seen == []
    too_late, _ = desk.submit(0, prompt, tree, accept=4)
    desk.run()
    too_late.cancelled = True  # its pass was under way: the path has stayed, and is not committed
    other = drafted("tree", (2, 2), 7)
    _, seen = desk.submit(0, [*prompt[:-3], 1, 2, 3], other)
    desk.run()
    desk.agrees(seen, [*prompt[:-3], 1, 2, 3], other)


def test_another_session_on_the_slot_shares_nothing_with_the_tree_before(
    desk: Desk, tree: Draft
) -> None:
    prompt = text(10, 20)
    desk.submit(0, prompt, tree, accept=5)
    desk.run()
    desk.take_fed()
    job, seen = desk.submit(0, [*prompt, *path_tokens(tree, 5), 9], tree)
    job.session = b"another session!"
    desk.run()
    assert desk.take_fed()[0][1][: len(prompt)] == prompt
    desk.agrees(seen, [*prompt, *path_tokens(tree, 5), 9], tree)


def test_wide_trees_and_windows_take_turns(desk: Desk) -> None:
    """A tree too wide to share a pass with windows neither starves nor lets them starve."""
    wide = drafted("dssd", (1,) * 2)
    for seed in range(50):
        wide = drafted("tree", (6, 6, 1), seed)
        if NARROW < len(wide.ids) <= 64:
            break
    prompt = text(11, 20)
    jobs = {}
    for slot in range(SLOTS):
        desk.submit(slot, prompt[:-1])
    desk.run()
    for slot in range(SLOTS):
        draft = wide if slot % 2 else drafted("coupled", (1, 1), slot)
        jobs[slot] = (*desk.submit(slot, prompt, draft, accept=1), draft)
    before = desk.scheduler.passes
    assert len(desk.run()) == SLOTS
    assert desk.scheduler.passes <= before + 3
    for _, seen, draft in jobs.values():
        desk.agrees(seen, prompt, draft)
