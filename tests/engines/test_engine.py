"""Engines: whatever a slot held, a sequence's output is that of a fresh computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pilotfish.engines.artifact import open_stages
from pilotfish.engines.engine import CHUNK, Engine, StageEngine, Work, open_engine
from pilotfish.engines.engine_errors import CapacityError, TreeError
from pilotfish.engines.language_model import Output
from pilotfish.engines.stage import Head, Stage
from pilotfish.export.split import split_artifact
from tests.support.gguf_models import gguf_artifact
from tests.support.tiny import tiny_artifact

SLOTS, CONTEXT, TOLERANCE = 2, 256, 2e-4
TEXT = np.random.default_rng(5).integers(0, 100, CONTEXT)


def opened(folder: Path, kind: str) -> Engine:
    if kind == "llamacpp":
        pytest.importorskip("llama_cpp", reason="needs the extra `llamacpp`")
        return open_engine(gguf_artifact(folder / kind), slots=SLOTS, context=CONTEXT)
    dialect, _, architecture = kind.partition("-")
    artifact = tiny_artifact(
        folder / kind, dialect=dialect, architecture=architecture or "llama", seed=2
    )
    return open_engine(artifact, slots=SLOTS, context=CONTEXT, threads=1)


@pytest.fixture(scope="module", params=["opset17", "contrib", "opset17-gemma2", "llamacpp"])
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return opened(tmp_path_factory.mktemp("engines"), request.param)


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        for slot in range(SLOTS):
            engine.clear(slot)


def random_parents(rng: np.random.Generator, nodes: int) -> np.ndarray:
    return np.array([int(rng.integers(-1, node)) if node else -1 for node in range(nodes)])


def siblings_distinct(rng: np.random.Generator, parents: np.ndarray) -> np.ndarray:
    """Ids of a tree whose siblings differ, as drafters make them."""
    ids = rng.integers(0, 100, len(parents))
    while len({*zip(parents.tolist(), ids.tolist(), strict=True)}) < len(parents):
        ids = rng.integers(0, 100, len(parents))
    return ids


def path_to(parents: np.ndarray, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(parents[node])
    return path


def wanted_rows(fresh: Callable[[np.ndarray], np.ndarray], work: Work) -> np.ndarray:
    """Logits of the work's rows, each computed alone, as the end of a chain."""
    chain = work.tokens[: len(work.tokens) - work.nodes]
    nodes = work.tokens[len(chain) :]
    ends = [chain[: end + 1] for end in range(len(chain))]
    for node in range(work.nodes):
        assert work.parents is not None
        ends.append(np.concatenate([chain, nodes[path_to(work.parents, node)]]))
    rows = [fresh(each) for each in ends[len(ends) - work.rows :]]
    return np.stack(rows) if rows else np.empty((0, 0))


def compare(output: Output, wanted: np.ndarray) -> None:
    assert len(output.logits) == len(wanted)
    if len(wanted):
        np.testing.assert_allclose(output.logits, wanted, atol=TOLERANCE)


class Session:
    """A text that grows by drafts, verdicts, cuts and new turns, as those of real sessions do."""

    def __init__(self, rng: np.random.Generator, *, trees: bool) -> None:
        self.rng, self.trees = rng, trees
        self.text = rng.integers(0, 100, int(rng.integers(1, 40)))

    def next(self, slot: int) -> Work:
        rng = self.rng
        kind = int(rng.integers(0, 4))
        if kind == 0:  # a prompt is read, or a turn that shares a prefix
            cut = int(rng.integers(0, len(self.text) + 1))
            self.text = np.concatenate([self.text[:cut], rng.integers(0, 100, 1 + cut % 9)])
            return Work(slot, self.text, int(rng.integers(0, 2)))
        nodes = int(rng.integers(1, 9))
        if kind == 1 or not self.trees:  # a chain, of which a part is accepted, with a correction
            window = np.concatenate([self.text, rng.integers(0, 100, nodes)])
            taken = int(rng.integers(0, nodes + 1))
            self.text = np.append(window[: len(self.text) + taken], rng.integers(0, 100))
            return Work(slot, window, nodes + 1)
        parents = random_parents(rng, nodes)
        ids = siblings_distinct(rng, parents)
        window = np.concatenate([self.text, ids])
        path = path_to(parents, int(rng.integers(-1, nodes)))
        self.text = np.concatenate([self.text, ids[path], rng.integers(0, 100, 1)])
        return Work(slot, window, nodes + 1, parents)


def sessions(trees: bool, seeds: int = 6, steps: int = 12) -> Iterator[list[Work]]:
    """Works of runs over both slots; the sessions of a slot change without a clear."""
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        pair = [Session(rng, trees=trees) for _ in range(SLOTS)]
        for _ in range(steps):
            busy = [slot for slot in range(SLOTS) if rng.random() < 0.8] or [0]
            works = [pair[slot].next(slot) for slot in busy]
            if all(len(work.tokens) < CONTEXT for work in works):
                yield works


def test_any_session_is_the_fresh_computation(engine: Engine, tmp_path: Path) -> None:
    other = open_engine(engine.model.artifact, slots=1, context=CONTEXT, threads=1)

    def fresh(tokens: np.ndarray) -> np.ndarray:
        other.clear(0)
        return other.run([Work(0, tokens)])[0].logits[0].copy()

    reused = total = 0
    for works in sessions(trees=True):
        held = [engine.cached(work.slot, work.tokens, work.rows) for work in works]
        for work, output in zip(works, engine.run(works), strict=True):
            compare(output, wanted_rows(fresh, work))
        total += sum(len(work.tokens) for work in works)
        reused += sum(held)
    assert reused > 0.6 * total


def test_only_what_a_slot_lacks_is_computed(engine: Engine, monkeypatch: Any) -> None:
    passes: list[list[int]] = []
    forward = engine.model.forward

    def counting(items: Any) -> Any:
        passes.append([len(item.tokens) for item in items])
        return forward(items)

    monkeypatch.setattr(engine.model, "forward", counting)
    parents = np.array([-1, 0, 0, 2])
    tree = np.array([1, 2, 3, 4])
    engine.run([Work(0, TEXT[:20], 0)])
    engine.run([Work(0, np.concatenate([TEXT[:20], tree]), 5, parents)])
    engine.run([Work(0, np.concatenate([TEXT[:20], tree[[0, 2, 3]], [9, 8]]), 2)])
    engine.run([Work(0, np.concatenate([TEXT[:20], tree[[0, 2]], [7, 6]]), 1)])
    engine.run([Work(0, TEXT[:8])])
    engine.clear(0)
    engine.run([Work(0, TEXT[:8])])
    assert passes == [[20], [5], [2], [2], [1], [8]]


def test_a_tree_grows_over_several_runs(engine: Engine, monkeypatch: Any) -> None:
    parents = np.array([-1, -1, 0, 0, 1, 2])
    tree = np.array([1, 2, 3, 4, 5, 6])
    whole = engine.run([Work(1, np.concatenate([TEXT[:30], tree]), 6, parents)])[0].logits.copy()
    engine.run([Work(0, TEXT[:10], 0)])  # the tree's first pass has a lead of 20 tokens
    passes: list[int] = []
    forward = engine.model.forward
    monkeypatch.setattr(
        engine.model,
        "forward",
        lambda items: (passes.append(len(items[0].tokens)), forward(items))[1],
    )
    rows = []
    for start, end in ((0, 2), (2, 5), (5, 6)):
        text = np.concatenate([TEXT[:30], tree[:end]])
        rows.append(engine.run([Work(0, text, end - start, parents[:end])])[0].logits.copy())
    assert passes == [22, 3, 1]
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=TOLERANCE)
    last = engine.run([Work(0, np.concatenate([TEXT[:30], tree[[0, 2, 5]], [9]]))])[0].logits
    engine.clear(1)
    fresh = engine.run([Work(1, np.concatenate([TEXT[:30], tree[[0, 2, 5]], [9]]))])[0].logits
    np.testing.assert_allclose(last, fresh, atol=TOLERANCE)
    assert passes[3:] == [1, 34]


def test_long_texts_take_passes_of_a_chunk(engine: Engine) -> None:
    seen = []
    text = TEXT[: CHUNK + 40]
    (output,) = engine.run([Work(0, text, 12)], before_pass=lambda: seen.append(1))
    assert len(seen) == 2
    assert len(output.logits) == 12
    engine.clear(0)
    for end in range(50, len(text), 50):
        engine.run([Work(0, text[:end], 0)])
    (rest,) = engine.run([Work(0, text, 12)])
    np.testing.assert_allclose(output.logits, rest.logits, atol=TOLERANCE)
    nodes = np.array([1, 2, 3])
    engine.clear(1)
    (tree,) = engine.run(
        [Work(1, np.concatenate([text, nodes]), 4, np.array([-1, -1, 0]))],
        before_pass=lambda: seen.append(1),
    )
    assert len(seen) == 5
    np.testing.assert_allclose(tree.logits[0], output.logits[-1], atol=TOLERANCE)


def test_a_run_that_is_broken_off_keeps_what_it_has_read(engine: Engine) -> None:
    calls = iter([False, True])

    def interrupt() -> None:
        if next(calls):
            raise KeyboardInterrupt

    text = TEXT[: CHUNK + 40]
    with pytest.raises(KeyboardInterrupt):
        engine.run([Work(0, text)], before_pass=interrupt)
    assert engine.cached(0, text) == CHUNK
    rest = engine.run([Work(0, text)])[0].logits.copy()
    engine.clear(0)
    np.testing.assert_allclose(engine.run([Work(0, text)])[0].logits, rest, atol=TOLERANCE)


def test_what_fails_leaves_the_slot_usable(engine: Engine) -> None:
    engine.run([Work(0, TEXT[:20])])
    with pytest.raises(CapacityError):
        engine.run([Work(0, np.concatenate([TEXT[:20], [1] * CONTEXT]), 0)])
    assert engine.cached(0, TEXT[:21]) == 20
    wrong = TEXT[:21].copy()
    wrong[20] = 10**6
    with pytest.raises(ValueError, match="token"):
        engine.run([Work(0, wrong)])
    assert engine.cached(0, TEXT[:21]) == 20
    after = engine.run([Work(0, TEXT[:21])])[0].logits.copy()
    fresh = engine.run([Work(1, TEXT[:21])])[0].logits
    np.testing.assert_allclose(after, fresh, atol=TOLERANCE)


@pytest.mark.parametrize("method", ["rollback", "keep_path", "forward"])
def test_an_interrupt_leaves_no_wrong_record(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The model has changed its slot, but the engine does not get to record it."""
    tree, parents = np.array([1, 2, 3, 4, 5]), np.array([-1, -1, 0, 1, 3])
    engine.run([Work(0, np.concatenate([TEXT[:30], tree]), 6, parents)])
    change = getattr(engine.model, method)

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(engine.model, method, change)
        change(*arguments)
        raise KeyboardInterrupt

    text = np.concatenate([TEXT[:30], tree[[1, 3, 4]], [9]])
    if method == "rollback":
        text = np.concatenate([TEXT[:20], [9]])
    monkeypatch.setattr(engine.model, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run([Work(0, text)])
    for token in (7, 8):
        engine.clear(1)
        got = engine.run([Work(0, text)])[0].logits.copy()
        fresh = engine.run([Work(1, text)])[0].logits
        np.testing.assert_allclose(got, fresh, atol=TOLERANCE)
        text = np.append(text, token)


class Malformed(NamedTuple):
    works: list[Work]
    named: str


@pytest.mark.parametrize(
    "case",
    [
        Malformed([Work(0, TEXT[:3]), Work(0, TEXT[:4])], "one work per run"),
        Malformed([Work(SLOTS, TEXT[:3])], f"no slot {SLOTS}"),
        Malformed([Work(-1, TEXT[:3])], "no slot -1"),
        Malformed([Work(0, TEXT[:0], 0)], "0 tokens"),
        Malformed([Work(0, TEXT[:3], 4)], "4 rows"),
        Malformed([Work(0, TEXT[:3], -1)], "-1 rows"),
        Malformed([Work(0, TEXT[:1], 1, np.array([-1, 0]))], "2 nodes"),
        Malformed([Work(0, TEXT[:2], 1, np.array([-1, 0]))], "2 nodes"),
        Malformed([Work(0, np.array([3, -1]))], "token ids"),
        Malformed([Work(0, np.array([3, 2**32]))], "token ids"),
        Malformed([Work(0, TEXT[:4], 1, np.array([1, 0]))], "parents"),
    ],
    ids=lambda case: f"{case.named} of {len(case.works[0].tokens)}",
)
def test_malformed_work_is_refused_and_changes_nothing(engine: Engine, case: Malformed) -> None:
    engine.run([Work(0, TEXT[:20])])
    with pytest.raises(ValueError, match=case.named):
        engine.run(case.works)
    engine.run([Work(0, TEXT[:20])])


def test_models_with_states_read_chains(tmp_path: Path) -> None:
    engine, other = (opened(tmp_path / str(n), "opset17-lfm2") for n in range(2))

    def fresh(tokens: np.ndarray) -> np.ndarray:
        other.clear(0)
        return other.run([Work(0, tokens)])[0].logits[0].copy()

    for works in sessions(trees=False, seeds=4):
        for work, output in zip(works, engine.run(works), strict=True):
            compare(output, wanted_rows(fresh, work))
    with pytest.raises(TreeError):
        engine.run([Work(0, TEXT[:9], 3, np.array([-1, -1]))])
    assert engine.run([Work(0, TEXT[:9])])[0].logits.shape == (1, engine.model.vocab_size)


def test_stages_keep_the_same(tmp_path: Path) -> None:
    engine = opened(tmp_path, "opset17")
    split_artifact(engine.model.artifact.path, tmp_path / "stages", stages=2)
    folders = open_stages(tmp_path / "stages")
    chain = [StageEngine(Stage(each, slots=SLOTS, context=CONTEXT, threads=1)) for each in folders]
    head = Head(folders[0], threads=1)
    for works in sessions(trees=True, seeds=3):
        outputs = engine.run(works)
        states = None
        for stage in chain:
            states = stage.run(works, states)
        assert states is not None
        rows = np.concatenate([output.logits for output in outputs])
        np.testing.assert_allclose(head.logits(states), rows, atol=TOLERANCE)
