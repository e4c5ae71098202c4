"""A worker that an edge cannot use: another vocabulary, model, version, a stage, no room."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.targets import node_client as peer
from tests.conftest import VOCAB
from tests.support.federating import (
    SESSIONS,
    Cast,
    WorkerThread,
    await_,
    opened,
    write_list,
)
from tests.support.lying import KEPT, greeting, logits_of, same_logits, wanted_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused worker is asked again soon."""
    monkeypatch.setattr(peer, "_RETRY_S", (0.02, 0.5))


UNFIT = {
    "another vocabulary": ({"tokenizer": "ab" * 32}, "must have the same vocabulary"),
    "a longer vocabulary": ({"vocab_size": VOCAB + 1}, "must have the same vocabulary"),
    "an older version": ({"version": 1}, "upgrade the node, so that both have the same Pilotfish"),
    "a newer version": ({"version": 99}, "upgrade this edge, so that both have the same Pilotfish"),
    "a stage": ({"stage": 1, "stages": 2}, "needs whole models"),
    "too few slots": ({"slots": SESSIONS - 1}, f"--sessions {SESSIONS}"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_worker_that_does_not_suit_takes_no_part(cast: Cast, tmp_path: Path, what: str) -> None:
    """And the edge says why, and what to do."""
    changes, advice = UNFIT[what]
    with WorkerThread(cast.a) as honest, WorkerThread(cast.b) as liar:
        listed = [("a", honest.endpoint), ("b", liar.endpoint)]
        liar.lies(greeting(**changes))
        settings = {"late": "drop", "late_s": 2.0, "give_up_s": 2.0, "kept": KEPT}
        with opened(write_list(tmp_path / "w.toml", listed, **settings), cast.a) as held:
            assert held.target.problem.startswith("b: ")
            assert advice in held.target.problem
            assert held.events("b") == {"refused": 1}  # it says the same whenever it is asked
            same_logits(logits_of(held), wanted_of([cast.a], "fp16"))
            liar.is_honest()
            await_(lambda: held.target.problem == "", turn=held.target.collect_scores)
            wanted = wanted_of([cast.a, cast.b], "fp16")
            same_logits(logits_of(held, 8), wanted)


def test_another_model_after_a_restart_takes_no_part(cast: Cast, tmp_path: Path) -> None:
    with ExitStack() as stack:
        honest = stack.enter_context(WorkerThread(cast.a))
        with WorkerThread(cast.b) as first:
            endpoint = first.endpoint
            listed = [("a", honest.endpoint), ("b", endpoint)]
            path = write_list(tmp_path / "w.toml", listed, kept=KEPT, late="drop")
            held = stack.enter_context(opened(path, cast.a))
            digest = held.target.digest
        with WorkerThread(cast.c, endpoint):
            await_(lambda: "with digest" in held.target.problem, turn=held.target.collect_scores)
            assert "restart this edge" in held.target.problem
            same_logits(logits_of(held), wanted_of([cast.a], "fp16"))
        with WorkerThread(cast.b, endpoint):
            await_(lambda: held.target.problem == "", turn=held.target.collect_scores)
            wanted = wanted_of([cast.a, cast.b], "fp16")
            same_logits(logits_of(held, 8), wanted)
        assert held.target.digest == digest


def test_a_model_that_the_list_does_not_name_takes_no_part(cast: Cast, tmp_path: Path) -> None:
    with WorkerThread(cast.a) as worker_thread:
        path = write_list(tmp_path / "w.toml", [("a", worker_thread.endpoint)], kept=KEPT)
        path.write_text(f'late = "drop"\nlate_s = 0.1\ngive_up_s = 0.5\n{path.read_text()}')
        path.write_text(path.read_text() + 'digest = "0123456789abcdef"\n')
        with pytest.raises(TargetLostError, match=r"digest .*, not 0123456789abcdef"):
            opened(path, cast.a).__enter__()
