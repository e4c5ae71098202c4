"""Generate answers of real models by their protocol alone: no link, no service, no scheduler.

Draws are named by seed and position, so a device and an edge must give the same tokens
(`expect_the_same`). That the protocols' own answers follow the target's law is enumerated in
`tests/speculation` and `tests/wire`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.acceptance import ENOUGH
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols import choose
from tests.support.plans import plan
from tests.support.rounds import Setting, logits, play_round, shaper_of

SEEDS = 25
TOKENS = 16


class Reader:
    """The logits of an artifact after any tokens, each read anew from the first on."""

    memory = 1 << 20

    def __init__(self, artifact):
        self._decoder = Decoder(artifact, threads=1)

    def logits(self, tokens):
        """Read the tokens and return the logits f32 [V] after the last."""
        self._decoder.rollback(0, 0)
        passed = Pass(slot=0, tokens=np.array(tokens), rows=1)
        return self._decoder.forward([passed])[0].logits[0].copy()


class RealDrafter:
    """Drafts windows by the device's own drafter, across a bridge or with a cut head.

    pair: its vocabulary and the target's.
    """

    def __init__(self, artifact, pair):
        self._pair = pair
        self._drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)
        self._drafter.set_bridge(pair.bridge())

    def __call__(self, setting, exchange, law, committed):
        if len(committed) == len(setting.prompt):
            self._drafter.start(self._pair.prompt(list(committed)))
        return self._drafter.draft(
            np.array(committed, np.uint32),
            setting.expansion,
            exchange,
            law,
            self._pair.target.eos_ids,
            logits_processor=shaper_of(setting, law),
            auto=setting.enough > 0,
        )


@dataclass(frozen=True)
class Generation(Setting):
    """The settings of a generation with two real models, target and drafter."""

    two: tuple[Any, Any] = (None, None)

    @property
    def models(self):
        return self.two


def answer(models, prompt, end, *, drafter=None, **options):
    """Generate the answer's tokens; options: those of `Device.generate`.

    models: Readers of target and drafter. end: the end token. drafter: drafts instead of the
    second of these.
    """
    chosen = plan(**options)
    setting = Generation(
        exchange=chosen.protocol,
        sampling=chosen.sampling.sampling,
        drafting=chosen.drafting.sampling,
        enough=ENOUGH if chosen.auto else 0.0,
        shaping=chosen.sampling.logits_options,
        prompt=tuple(prompt),
        vocab=len(logits(models[0], tuple(prompt))),
        two=tuple(models),
    )
    most = len(prompt) + chosen.max_tokens
    committed, at_edge = setting.prompt, len(prompt)
    while len(committed) < most and end not in committed[len(prompt) :]:
        if chosen.streams:
            committed = (*committed, drawn_alone(setting, chosen.sampling, committed))
            continue
        levels = max(0, most - len(committed) - 1)
        item = replace(setting, expansion=tuple(chosen.expansion[:levels]))
        committed, at_edge = play_round(
            item, chosen.exchange, chosen.sampling.seed, committed, at_edge, drafter
        )
    tokens = list(committed[len(prompt) :])
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def drawn_alone(setting, law, committed):
    """Draw the target's own next token, as under `stream`."""
    row = logits(setting.models[0], committed).copy()
    if (shaper := shaper_of(setting, law)) is not None:
        shaper.process(row[None], np.array(committed, np.uint32), [()])
    return choose(row, law, len(committed), Purpose.TARGET)


def expect_the_same(device, models, prompt, end, *, drafter=None, seeds=SEEDS, **options):
    """Assert that a device gives, token for token, what its protocol gives without a link.

    Drafts must have been accepted and refused, unless the target streams.
    """
    options = {"max_tokens": TOKENS, **options}
    drafted = accepted = 0
    for seed in range(seeds):
        got = device.generate(prompt, seed=seed, **options)
        assert got.tokens == answer(models, prompt, end, drafter=drafter, seed=seed, **options), (
            seed
        )
        drafted += sum(item.window for item in got.rounds)
        accepted += sum(item.accepted for item in got.rounds)
    assert 0 < accepted < drafted or plan(**options).streams
