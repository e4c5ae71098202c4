"""A federated target returns the average of its workers, bit by bit, whatever they forgot."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets import federated
from pilotfish.edge_runtime.targets.target import Target, time_pass
from pilotfish.engines.engine import CHUNK, Work
from pilotfish.engines.onnx_decoder import Output
from pilotfish.speculation.ensemble import TopRows, acceptance_bound, top_rows
from pilotfish.wire.codecs.topk import decode_topk_each, encode_topk_each
from pilotfish.wire.nodes import Scored
from tests.conftest import VOCAB
from tests.support.averaging import Averaged, opened_and_expected, tokens_of
from tests.support.federating import (
    SESSIONS,
    Cast,
    Frames,
    Said,
    WorkerThread,
    await_,
    opened,
    write_list,
)
from tests.support.relay import Relay


def journey(target: Target | Averaged) -> Iterator[NDArray[np.float32]]:
    """Chains, several slots at once, trees of which a path is kept, a prompt of several chunks."""

    def run(number: int, *works: Work) -> list[NDArray[np.float32]]:
        answers = target.run(number, works)
        return [each.logits if isinstance(each, Output) else each for each in answers]

    item, two, three = tokens_of(1, 40), tokens_of(2, 40), tokens_of(3, 230)
    yield from run(1, Work(0, item[:20], 0))
    yield from run(2, Work(0, item[:25], 5))
    yield from run(3, Work(0, item[:30], 6, temperature=0.5), Work(1, two[:9], 3))
    yield from run(4, Work(5, three[:128], 0))
    yield from run(5, Work(5, three[:200], 0))
    parents = np.array([-1, -1, 0, 0, 1, 2], np.int64)
    yield from run(6, Work(1, two[:16], 7, parents, 1.5), Work(0, item[:31], 1))
    # the next text follows nodes 0 and 2 of the tree
    two = np.concatenate([two[:10], two[[10, 12]], two[20:]])
    yield from run(7, Work(1, two[:15], 3), Work(5, three[:205], 5, temperature=1.0))
    yield from run(8, Work(1, two[:15], 1), Work(2, two[:3], 3), Work(0, item[:33], 2))
    yield from run(9, Work(2, two[:12], 7, parents))
    yield from run(10, Work(2, two[:14], 2, temperature=0.7))
    yield from run(11, Work(5, three[:212], 7, parents))
    # nodes 1 and 4
    three = np.concatenate([three[:206], three[[207, 210]], three[220:]])
    yield from run(12, Work(5, three[:212], 4))


@pytest.mark.parametrize(
    ("names", "weights", "settings"),
    [
        ("ab", (1.0, 1.0), {"kept": VOCAB, "values": "fp32"}),
        ("abc", (0.5, 3.0, 0.2), {"kept": 999, "values": "fp32", "reconstruction": "renormalise"}),
        ("ab", (2.0, 1.0), {"kept": 16}),
        ("ab", (2.0, 1.0), {"kept": 16, "reconstruction": "spread"}),
        ("abc", (1.0, 1.0, 1.0), {"kept": 5, "values": "levels", "reconstruction": "renormalise"}),
        ("ba", (0.1, 0.9), {"kept": 1, "values": "fp32", "reconstruction": "spread"}),
        ("ab", (1.0, 1.0), {"kept": VOCAB, "values": "levels"}),
        ("a", (7.0,), {"kept": VOCAB, "values": "fp16"}),
        ("ab", (2.0, 1.0), {"kept": "auto", "rho": 0.8, "values": "fp32"}),
        ("ab", (2.0, 1.0), {"kept": "auto", "rho": 0.9, "kept_limit": 20, "values": "levels"}),
        ("abc", (1.0, 2.0, 3.0), {"kept": "auto", "rho": 0.6, "reconstruction": "spread"}),
    ],
)  # fmt: skip
def test_the_output_is_the_average_bit_by_bit(
    cast: Cast, tmp_path: Path, names: str, weights: tuple[float, ...], settings: dict[str, Any]
) -> None:
    """With K = V in fp32 that is Σ w p of the models as they are."""
    with opened_and_expected(cast, tmp_path / "w.toml", names, weights, settings) as (held, wanted):
        legs = list(zip(journey(held.target), journey(wanted), strict=True))
        assert sum(len(got) for got, _ in legs) > 40
        for got, expected in legs:
            np.testing.assert_array_equal(got, expected)
        assert held.metrics.node_events.total() == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_forgot_everything_is_told_again(
    cast: Cast, tmp_path: Path, seed: int
) -> None:
    """Its connection is cut between some passes; the average is the same, but for rounding."""
    rng, cuts = random.Random(seed), 0
    wanted = [*journey(Averaged([cast.a, cast.b], (1.0, 1.0)))]
    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        relay = Relay(two.endpoint)
        listed = [("a", worker_thread.endpoint), ("b", relay.endpoint)]
        path = write_list(tmp_path / "w.toml", listed, kept=VOCAB, values="fp32")
        with opened(path, cast.a) as held:
            for got, expected in zip(journey(held.target), wanted, strict=True):
                np.testing.assert_allclose(got, expected, atol=2e-5)
                if rng.random() < (0.4, 0.4, 1.0)[seed]:
                    cuts += 1
                    relay.cut()
            assert 3 <= held.events("b")["gone"] <= cuts
            assert set(held.events("b")) == {"gone"}
            assert held.events("a") == {}
        relay.close()


def test_a_worker_that_was_late_is_told_what_it_missed(cast: Cast, tmp_path: Path) -> None:
    """Under `drop`: the others went on, and back, over what it still holds."""
    item, other = tokens_of(1, 60), tokens_of(2, 60)
    again = np.concatenate([item[:21], other[:39]])
    works = [
        Work(0, item[:20], 1),
        Work(0, item[:26], 6),  # it is late with this one
        Work(0, again[:27], 6),  # this worker does not get this work
        Work(0, again[:31], 4),
        Work(0, again[:36], 5),
    ]
    models = [cast.a, cast.b]
    both, first = (Averaged(models[:n], [1.0] * n) for n in (2, 1))
    wanted = [(both.run(n, [work]), first.run(n, [work])) for n, work in enumerate(works)]
    settings = {"kept": VOCAB, "values": "fp32", "late": "drop", "late_s": 0.3}
    with WorkerThread(cast.a) as prompt, WorkerThread(cast.b) as slow:
        path = write_list(
            tmp_path / "w.toml", [("a", prompt.endpoint), ("b", slow.endpoint)], **settings
        )
        with opened(path, cast.a) as held:
            for number, (work, (all_, alone)) in enumerate(zip(works, wanted, strict=True)):
                if number == 1:
                    slow.hold(1.5)
                elif number == 4:
                    await_(lambda: held.target.problem == "", turn=held.target.collect_scores)
                (got,) = held.target.run(number, [work])
                (expected,) = all_ if number in (0, 4) else alone
                np.testing.assert_allclose(got.logits, expected, atol=2e-5)
                if number == 1:
                    assert held.target.problem == "b: late"
            assert held.events("b") == {"late": 1, "dropped": 3}


def test_one_that_is_back_reads_what_it_missed_while_the_others_go_on(
    cast: Cast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under `drop`: a long session does not wait until a worker has read it all again."""
    caplog.set_level(logging.INFO, "pilotfish.edge")
    text = tokens_of(4, 205)
    models = [cast.a, cast.b]
    both, first = (Averaged(models[:n], [1.0] * n) for n in (2, 1))
    settings = {"kept": VOCAB, "values": "fp32", "late": "drop", "late_s": 20.0}

    def slowly(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Scored):
            time.sleep(1.0)
        yield message, frames

    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        relay = Relay(two.endpoint)
        listed = [("a", worker_thread.endpoint), ("b", relay.endpoint)]
        with opened(write_list(tmp_path / "w.toml", listed, **settings), cast.a) as held:
            target = held.target
            target.run(0, [Work(0, text[:200], 1)])
            relay.cut()
            await_(lambda: target.problem != "", turn=target.collect_scores)
            two.lies(slowly)
            await_(lambda: target.problem == "", turn=target.collect_scores)
            alone = Work(0, text, 5)
            begun_s = time.monotonic()
            (got,) = target.run(1, [alone])
            assert time.monotonic() - begun_s < 0.7
            np.testing.assert_allclose(got.logits, first.run(1, [alone])[0], atol=2e-5)
            two.is_honest()
            for number in count(2):
                time.sleep(0.1)
                dropped = held.events("b")["dropped"]
                (got,) = target.run(number, [alone])
                if held.events("b")["dropped"] == dropped:
                    break
                assert number < 40
            np.testing.assert_allclose(got.logits, both.run(1, [alone])[0], atol=2e-5)
            assert not {"late", "lied"} & held.events("b").keys()
        relay.close()
    info = [each.getMessage() for each in caplog.records]
    assert "b: catching up; passes continue with the other workers' weights" in info
    assert info[-1] == "b takes part again"


def test_many_short_sessions_do_not_keep_a_returned_worker_out(cast: Cast, tmp_path: Path) -> None:
    """Under `drop`: together they go on by more, while it reads, than it may lack of one."""
    texts = [tokens_of(slot, 60) for slot in range(SESSIONS)]
    works = [Work(slot, text[:55], 5) for slot, text in enumerate(texts)]
    settings = {"kept": VOCAB, "values": "fp32", "late": "drop", "late_s": 20.0}
    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        relay = Relay(two.endpoint)
        listed = [("a", worker_thread.endpoint), ("b", relay.endpoint)]
        with opened(write_list(tmp_path / "w.toml", listed, **settings), cast.a) as held:
            held.target.run(0, [work._replace(tokens=work.tokens[:50], rows=0) for work in works])
            relay.cut()
            await_(lambda: held.target.problem != "", turn=held.target.collect_scores)
            await_(lambda: held.target.problem == "", turn=held.target.collect_scores)
            assert sum(len(work.tokens) - work.rows for work in works) > CHUNK
            got = held.target.run(1, works)
            assert "dropped" not in held.events("b")
        relay.close()
    wanted = Averaged([cast.a, cast.b], (1.0, 1.0)).run(1, works)
    for each, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(each.logits, expected, atol=2e-5)


def test_an_average_that_fails_costs_that_pass_only(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    work, all_scores = Work(0, tokens_of(1, 20), 5), []
    with WorkerThread(cast.a) as worker_thread, ExitStack() as stack:
        path = write_list(tmp_path / "w.toml", [("a", worker_thread.endpoint)])
        target = stack.enter_context(opened(path, cast.a)).target
        with monkeypatch.context() as patch:
            patch.setattr(federated, "aggregate", fails)
            target.start(1, [work])
            await_(
                lambda: bool(all_scores), turn=lambda: all_scores.extend(target.collect_scores())
            )
        assert isinstance(all_scores[0].error, MemoryError)
        assert len(target.run(2, [work])[0].logits) == 5


def test_sent_and_received_bytes_are_counted(cast: Cast, tmp_path: Path) -> None:
    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        path = write_list(
            tmp_path / "w.toml", [("a", worker_thread.endpoint), ("b", two.endpoint)], kept=8
        )
        with opened(path, cast.a) as held:
            held.target.run(1, [Work(0, tokens_of(1, 20), 5)])
            assert held.metrics.node_bytes["a", "from"] > 4 + 5 * (4 + 2 * 8)
            assert held.metrics.node_bytes["a", "to"] > 4 * 20
            assert held.metrics.node_compute_s["a"] > 0.0
            assert held.metrics.node_events.total() == 0
            assert held.target.nodes == {"a": True, "b": True}
            assert held.target.problem == ""


def test_retained_mass_and_its_bound_are_counted(cast: Cast, tmp_path: Path) -> None:
    """Each pass's output has bound (19) of its rows; trial passes are not counted."""
    tokens, weights = tokens_of(1, 20), (3.0, 1.0)
    works = [Work(0, tokens, 5), Work(1, tokens[:9], 2, temperature=1.5), Work(2, tokens[:4], 0)]
    models = [Averaged([model], [1.0]) for model in (cast.a, cast.b)]
    masses = np.stack(
        [
            np.concatenate(
                [
                    top_rows(output.logits, work.temperature, 8).retained_mass
                    for work, output in zip(works, model.targets[0].run(1, works), strict=True)
                    if work.rows
                ]
            )
            for model in models
        ]
    )
    bounds = acceptance_bound(weights, masses)
    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        listed = [("a", worker_thread.endpoint), ("b", two.endpoint)]
        path = write_list(tmp_path / "w.toml", listed, weights, kept=8)
        with opened(path, cast.a) as held:
            time_pass(held.target, 4)
            assert (held.metrics.ensemble_rows, held.target.status) == (0, "")
            outputs = held.target.run(1, works)
            each = [output.omitted for output in outputs if output.omitted is not None]
            np.testing.assert_allclose(np.concatenate(each), bounds, atol=1e-6)
            assert outputs[2].omitted is None
            metrics = held.metrics
            assert (metrics.ensemble_rows, metrics.node_rows) == (7, {"a": 7, "b": 7})
            assert metrics.ensemble_omitted == pytest.approx(bounds.sum(), abs=1e-5)
            for name, mass in zip("ab", masses, strict=True):
                assert metrics.node_mass[name] == pytest.approx(mass.sum(), abs=1e-5)
            assert held.target.status == f"ρ {1.0 - bounds.mean():.3f}"


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({}, False), ({"reconstruction": "spread"}, True), ({"kept": VOCAB}, False)],
)
def test_spread_warns_of_its_arbitrary_tokens(
    cast: Cast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    warned: bool,
) -> None:
    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        listed = [("a", worker_thread.endpoint), ("b", two.endpoint)]
        options = {"kept": 8, "reconstruction": "spread" if "kept" in settings else "renormalise"}
        path = write_list(tmp_path / "w.toml", listed, **options | settings)
        with opened(path, cast.a):
            pass
    warnings = [record.message for record in caplog.records if "arbitrary" in record.message]
    assert len(warnings) == warned
    if warned:
        share = re.search(r"about ([0-9.]+) % of the tokens", warnings[0])
        assert share is not None
        assert 1.0 < float(share[1]) < 99.0


def test_auto_holds_the_wanted_mass(cast: Cast, tmp_path: Path) -> None:
    """With fewer bytes than the K of the flattest row takes for all rows."""
    work = Work(0, tokens_of(1, 40), 30)
    used = {}
    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        listed = [("a", worker_thread.endpoint), ("b", two.endpoint)]
        for top_k in ("auto", VOCAB - 1):
            settings = {"rho": 0.9} if top_k == "auto" else {}
            with opened(
                write_list(tmp_path / "w.toml", listed, kept=top_k, **settings), cast.a
            ) as held:
                (output,) = held.target.run(1, [work])
                metrics = held.metrics
                used[top_k] = metrics.node_bytes["a", "from"]
                for name in "ab":
                    assert metrics.node_mass[name] / metrics.node_rows[name] >= 0.9 - 1e-4
                assert output.omitted is not None
                assert output.omitted.max() <= 0.1 + 1e-4
    assert used["auto"] < 0.9 * used[VOCAB - 1]


def anew(change: Callable[[list[TopRows]], list[TopRows]]) -> Callable[[bytes], bytes]:
    """Change the rows of an answer to five rows."""

    def spoil(frame: bytes) -> bytes:
        return encode_topk_each(change(decode_topk_each(frame, 5, 30, VOCAB)), VOCAB, "fp16")

    return spoil


def row(k: int, mass: float) -> TopRows:
    return TopRows(np.arange(k, dtype=np.uint32)[None], np.full((1, k), mass / k, np.float32))


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "a row less": anew(lambda rows: rows[:-1]),
    "a row more": anew(lambda rows: [*rows, rows[0]]),
    "too little mass": anew(lambda rows: [row(1, 0.4), *rows[1:]]),
    "too many tokens": anew(lambda rows: [row(31, 1.0), *rows[1:]]),
    "empty": lambda frame: b"",
    "cut": lambda frame: frame[:-1],
    "longer": lambda frame: frame + b"0",
    "no head": lambda frame: bytes(20),
}


@pytest.mark.parametrize("name", SPOILED)
def test_answers_without_the_wanted_mass_are_false(cast: Cast, tmp_path: Path, name: str) -> None:
    def lies(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        yield (
            message,
            [SPOILED[name](frames[0])] if isinstance(message, Scored) else frames,
        )

    settings = {"kept": "auto", "rho": 0.9, "kept_limit": 30, "late": "drop", "late_s": 20.0}
    work = Work(0, tokens_of(1, 20), 5)
    with WorkerThread(cast.a) as worker_thread, WorkerThread(cast.b) as two:
        listed = [("a", worker_thread.endpoint), ("b", two.endpoint)]
        with opened(write_list(tmp_path / "w.toml", listed, **settings), cast.a) as held:
            two.lies(lies)
            (got,) = held.target.run(1, [work])
            assert held.events("b")["lied"] == 1
    alone = Averaged([cast.a], [1.0], 30, mass=0.9).run(1, [work])[0]
    np.testing.assert_array_equal(got.logits, alone)
