"""Bias, penalties and grammars over a federation: each worker processes its own logits.

The expected outputs come from local models whose logits were processed, cut and averaged here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish import Device
from pilotfish.base.errors import BadGrammarError, UnsupportedError
from pilotfish.engines.engine import Work
from pilotfish.engines.language_model import Output
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.ensemble import TopRows, aggregate, as_logits, restrict, top_rows
from pilotfish.speculation.logits_options import (
    Grammar,
    LogitsOptions,
    LogitsProcessor,
    RowOptions,
)
from pilotfish.speculation.masks import Masks
from pilotfish.wire.codecs.topk import decode_topk, encode_topk
from pilotfish.wire.protocols import SamplingParams
from tests.conftest import VOCAB, Pair
from tests.support.averaging import opened_and_expected, tokens_of
from tests.support.enumeration import p_value
from tests.support.federating import (
    Cast,
    Ensemble,
    Frames,
    Said,
    WorkerThread,
    cast_in,
    federation,
    opened,
    write_list,
)
from tests.support.writing import OBJECT, writers
from tests.system.test_lossless import ANSWERS, PROMPT, THRESHOLD, frequencies, law_after

assert writers  # a fixture

SHAPE = LogitsOptions(
    logit_bias={3: 4.0, 9: -100.0, 17: 2.5},
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=-0.3,
)


def masks_of(seed: int, rows: int, share: float) -> Masks:
    rng = np.random.default_rng(seed)
    allowed = rng.random((rows, VOCAB)) < share
    allowed[np.arange(rows), rng.integers(VOCAB, size=rows)] = True
    return Masks.pack(allowed)


def journey(target: Any) -> Iterator[NDArray[np.float32]]:
    """Chains and trees, several slots at once, with and without options; few and many allowed."""

    def run(number: int, *works: Work) -> list[NDArray[np.float32]]:
        answers = target.run(number, works)
        return [each.logits if isinstance(each, Output) else each for each in answers]

    first, second = tokens_of(1, 40), tokens_of(2, 40)
    plain = LogitsOptions()
    yield from run(1, Work(0, first[:20], 0))
    yield from run(2, Work(0, first[:25], 5, options=RowOptions(SHAPE, 12, None)))
    yield from run(
        3,
        Work(0, first[:30], 6, temperature=0.5, options=RowOptions(SHAPE, 20, masks_of(1, 6, 0.3))),
        Work(1, second[:9], 3),
    )
    parents = np.array([-1, -1, 0, 0, 1, 2], np.int64)
    yield from run(
        4,
        Work(1, second[:16], 7, parents, 1.5, RowOptions(plain, 4, masks_of(2, 7, 0.05))),
        Work(0, first[:31], 1),
    )
    yield from run(
        5,
        Work(0, first[:33], 2, options=RowOptions(plain, 3, masks_of(3, 2, 0.9))),
        Work(2, second[:12], 7, parents, 1.0, RowOptions(SHAPE, 5, masks_of(4, 7, 0.0))),
        Work(1, second[:20], 1, options=RowOptions(LogitsOptions(frequency_penalty=1.5), 2, None)),
    )


@pytest.mark.parametrize(
    ("names", "weights", "settings"),
    [
        ("ab", (1.0, 3.0), {"kept": VOCAB, "values": "fp32"}),
        ("ab", (2.0, 1.0), {"kept": 16}),
        ("ab", (2.0, 1.0), {"kept": 16, "reconstruction": "spread"}),
        ("abc", (1.0, 1.0, 1.0), {"kept": 5, "values": "levels"}),
        ("ab", (1.0, 2.0), {"kept": "auto", "rho": 0.9, "values": "fp32"}),
        ("ab", (1.0, 2.0), {"kept": "auto", "rho": 0.8, "reconstruction": "spread"}),
    ],
)
def test_the_output_is_the_average_of_processed_workers(
    cast: Cast, tmp_path: Path, names: str, weights: tuple[float, ...], settings: dict[str, Any]
) -> None:
    """In every bit; with K = V in fp32 that is Σ w p of the processed distributions."""
    with opened_and_expected(cast, tmp_path / "w.toml", names, weights, settings) as (held, wanted):
        legs = list(zip(journey(held.target), journey(wanted), strict=True))
        assert sum(len(got) for got, _ in legs) > 30
        for got, expected in legs:
            np.testing.assert_array_equal(got, expected)
        assert held.metrics.node_events.total() == 0
        if settings["kept"] == "auto":  # ρ is one of the masked distributions
            rows = held.metrics.ensemble_rows
            assert held.metrics.ensemble_omitted / rows <= 1.0 - settings["rho"] + 1e-6


# Workers that lie


def altered(alter: Any) -> Any:
    """Replace a worker's rows of one work at K = 16 in fp32."""

    def spoil(message: msgspec.Struct, frames: Frames) -> list[Said]:
        if type(message).__name__ != "Scored" or not frames[0]:
            return [(message, frames)]
        rows = alter(decode_topk(frames[0], 2, 16, VOCAB))
        return [(message, [encode_topk(rows, VOCAB, "fp32")])]

    return spoil


def test_a_forbidden_token_gets_nothing_from_a_liar(cast: Cast, tmp_path: Path) -> None:
    """A worker with mass on forbidden tokens is not believed; with little, it loses that."""
    allowed = np.zeros((2, VOCAB), bool)
    allowed[:, 40:60] = True
    work = Work(0, tokens_of(1, 9), 2, options=RowOptions(SHAPE, 4, Masks.pack(allowed)))
    with WorkerThread(cast.a) as honest, WorkerThread(cast.b) as liar:
        named = [("a", honest.endpoint), ("b", liar.endpoint)]
        path = write_list(
            tmp_path / "w.toml", named, kept=16, values="fp32", late="drop", late_s=5.0
        )
        with opened(path, cast.a) as held:
            first = held.target.run(1, [work])[0].logits
            assert np.isneginf(first[~allowed]).all()
            assert np.isfinite(first[allowed]).any()

            def forge(rows: TopRows) -> TopRows:
                values = np.zeros((2, 16), np.float32)
                values[:, 0] = 1.0
                return TopRows(np.tile(np.arange(16, dtype=np.uint32), (2, 1)), values)

            liar.lies(altered(forge))
            got = held.target.run(2, [work._replace(slot=1)])[0].logits
            assert np.isneginf(got[~allowed]).all()
            assert held.events("b")["lied"] == 1


# Answers


class Processed(Ensemble):
    """The ensemble of models that process their logits; ``prompt``: tokens before the answer."""

    def __init__(self, models: Sequence[Path], *arguments: Any, **settings: Any) -> None:
        super().__init__(models, *arguments, **settings)
        self._artifact = self._engines[0].model.artifact
        self.prompt, self.options = 0, LogitsOptions()

    def begin(self, prompt: Sequence[int], options: LogitsOptions) -> None:
        grammars = Vocabulary.from_artifact(self._artifact).grammars
        grammar = options.grammar
        constraint = None if grammar is None else grammars.constraint(grammar)
        self.processor = LogitsProcessor(options, len(prompt), constraint)

    def logits(self, tokens: Sequence[int], temperature: float) -> NDArray[Any]:
        text, answers = np.array(tokens, np.uint32), []
        stated, _ = self.processor.state(text, [()], self.vocab)
        for row in self.models_logits(tokens):
            stated.process(row, text, None)
            rows = top_rows(row, temperature, self._top_k)
            frame = encode_topk(rows, self.vocab, self._values)
            rows = decode_topk(frame, 1, self._top_k, self.vocab)
            answers.append(rows if stated.masks is None else restrict(rows, stated.masks))
        total = aggregate(self._weights, answers, self.vocab, self._scheme, stated.masks)
        return as_logits(total, temperature)


SETTINGS: dict[str, Any] = {"kept": 4, "reconstruction": "renormalise"}
SCHEMA = Grammar.from_schema(OBJECT)
WISHES: dict[str, LogitsOptions] = {
    "schema": LogitsOptions(grammar=SCHEMA),
    "all": LogitsOptions(
        grammar=Grammar("regex", "(ab|c{2,4})[0-9]{3,9}"),
        logit_bias={24: 3.0, 30: -2.0},
        frequency_penalty=0.7,
        repetition_penalty=1.2,
    ),
    "penalties": LogitsOptions(presence_penalty=1.5, frequency_penalty=0.5),
}


@pytest.fixture(scope="module")
def writing(
    writers: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Device, Processed, Device]]:
    """Devices of two federations of two writers: under `renormalise`, and under `spread`."""
    models, weights = [writers.target, writers.draft], (0.7, 0.3)
    with ExitStack() as stack:
        devices = []
        for scheme in ("renormalise", "spread"):
            folder = tmp_path_factory.mktemp(scheme)
            running = stack.enter_context(
                federation(folder, models, weights, kept=4, reconstruction=scheme)
            )
            devices.append(stack.enter_context(Device(writers.draft, running.endpoint, threads=1)))
        yield devices[0], Processed(models, weights, kept=4), devices[1]


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize(
    ("protocol", "temperature"),
    [("greedy", 0.0), ("stream", 1.0), ("coupled", 1.3), ("ahead", 0.7)],
)
def test_the_text_is_that_of_the_processed_average(
    writing: tuple[Device, Processed, Device], wish: str, protocol: str, temperature: float
) -> None:
    """Token for token, with only four tokens of each worker's distribution."""
    device, ensemble, _ = writing
    options, prompt = WISHES[wish], [3, 1, 4]
    law = SamplingParams(sampling=Sampling(temperature=temperature), seed=5)
    ensemble.begin(prompt, options)
    wanted = ensemble.decode(prompt, 40, law)
    fields = {name: getattr(options, name) for name in LogitsOptions.__dataclass_fields__}
    got = device.generate(
        prompt, protocol=protocol, max_tokens=40, temperature=temperature, seed=5, **fields
    )
    assert got.tokens == wanted


@pytest.mark.parametrize("scheme", ["renormalise", "spread"])
@pytest.mark.parametrize(
    ("protocol", "options"),
    [("stream", {}), ("dsd", {}), ("tree", {"expansion": (2, 2)}), ("dssd", {}), ("adaptive", {})],
)
def test_an_answer_over_a_federation_parses(
    writing: tuple[Device, Processed, Device], scheme: str, protocol: str, options: dict[str, Any]
) -> None:
    """A token that the grammar forbids is never sampled, not even of what is spread."""
    device = writing[0] if scheme == "renormalise" else writing[2]
    for seed in range(3):
        shape = {"temperature": 1.0, "seed": seed, "max_tokens": 120, **options}
        answer = device.generate([3, 1, 4], protocol=protocol, schema=OBJECT, **shape)
        assert answer.finish_reason == "stop"
        assert 0 <= json.loads(answer.text)["ab"] <= 99
        regex = device.generate(
            [3, 1, 4], protocol=protocol, grammar=Grammar("regex", "(ab|c)[0-9]{3}"), **shape
        )
        assert re.fullmatch("(ab|c)[0-9]{3}", regex.text)


def test_a_grammar_that_fails_harms_no_other_answer(
    writing: tuple[Device, Processed, Device],
) -> None:
    device = writing[0]
    with pytest.raises(BadGrammarError):
        device.generate([3, 1, 4], protocol="stream", grammar=Grammar("regex", "("), max_tokens=9)
    with pytest.raises(UnsupportedError, match="log-probabilities of a prompt"):
        device.generate([3, 1, 4], protocol="stream", prompt_logprobs=1, max_tokens=9)
    assert device.generate([3, 1, 4], protocol="stream", max_tokens=9).tokens


@pytest.mark.slow
def test_sampled_answers_follow_the_processed_averages_law(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """χ² of the first tokens; two of six tokens travel."""
    folder = tmp_path_factory.mktemp("lawful")
    cast = cast_in(folder, sharper=2.5, vocab=6, padded_vocab=6, context=64)
    options = {"rate": 1e6, "context": 64}
    ensemble = Processed([cast.a, cast.b], (2.0, 1.0), kept=2)
    wish = LogitsOptions(logit_bias={1: 1.5}, frequency_penalty=1.0, presence_penalty=0.5)
    ensemble.begin(PROMPT, wish)
    with (
        federation(folder, [cast.a, cast.b], (2.0, 1.0), options=options, kept=2) as running,
        Device(cast.c, running.endpoint, threads=1) as device,
    ):
        sampling = Sampling(temperature=1.0)

        def law(each: Ensemble) -> dict[tuple[int, ...], float]:
            return law_after(
                lambda answer: each.logits([*PROMPT, *answer], 1.0), sampling, each.ends[0]
            )

        outcomes = law(ensemble)
        fields = {name: getattr(wish, name) for name in LogitsOptions.__dataclass_fields__}
        counts = frequencies(device, outcomes, protocol="tslt", temperature=1.0, window=2, **fields)
    expected = np.array(list(outcomes.values())) * ANSWERS
    assert p_value(counts, expected) > THRESHOLD
    others = law(Ensemble([cast.a, cast.b], (2.0, 1.0), kept=2))  # without bias and penalties
    wrong = np.array([others.get(ids, 0.0) for ids in outcomes]) * ANSWERS
    assert p_value(counts, np.maximum(wrong, 1e-9)) < 1e-6
