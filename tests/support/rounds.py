"""Play whole rounds of a protocol in one process: both halves and the bytes between, no models.

The logits are fixed functions of the last two tokens (`tests.support.enumeration.Model`), or those
of real models (`tests.support.in_process`).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pilotfish.engines.grammar import Grammars
from pilotfish.speculation.acceptance import predicted_acceptance
from pilotfish.speculation.adaptive import Relaxation
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import NO_LOGITS_OPTIONS, LogitsOptions, node_paths
from pilotfish.speculation.tree import Tree
from pilotfish.wire.protocols import (
    PROTOCOL_REGISTRY,
    DrawKey,
    SamplingParams,
    SpeculationProtocol,
)
from pilotfish.wire.protocols.adaptive import Adaptive, RelaxationOptions
from pilotfish.wire.protocols.dsd import Dsd, DsdOptions
from tests.support.enumeration import Model, law_of, target_law
from tests.support.registered import LOSSLESS, serves

LENGTH = 3  # tokens of a generation
VOCAB = 5
ONE = Sampling(temperature=1.0)
PROMPT = (1, 3)
STRICT = Relaxation(tau=0.0, lambda1=1e6, lambda2=1.0, lambda3=0.0)  # no token is key, yet
# Protocols with other options than the defaults, by any name. With these options the output must
# follow the target's law; the tests of the laws take each entry like a protocol of its own.
VARIANTS: dict[str, SpeculationProtocol[Any]] = {
    "adaptive": Adaptive(RelaxationOptions.from_relaxation(STRICT)),
    "dsd fp32": Dsd(DsdOptions(format="fp32")),
}
# Every protocol by rounds whose output follows the target's law.
EXACT = {name: PROTOCOL_REGISTRY[name] for name in LOSSLESS} | VARIANTS
# Those of EXACT that serve temperature 0.
COLD = [name for name, exchange in EXACT.items() if serves(exchange, 0.0)]
# Those of EXACT that serve temperature 1.
WARM = [name for name, exchange in EXACT.items() if serves(exchange, 1.0)]
# Those of WARM whose text depends on how the drafts were drawn.
SAMPLED = [name for name in WARM if not EXACT[name].deterministic]
# Those of WARM whose text is the target's own seeded sample.
DETERMINISTIC = [name for name in WARM if EXACT[name].deterministic]


@dataclass(frozen=True)
class Setting:
    """The settings of a generation with two synthetic models."""

    exchange: str
    expansion: tuple[int, ...] = (1, 1)
    sampling: Sampling = ONE
    drafting: Sampling = ONE
    enough: float = 0.0  # window="auto" ends windows below this
    seed: int = 4  # of the models
    vocab: int = VOCAB
    kind: str = "random"
    shaping: LogitsOptions = NO_LOGITS_OPTIONS
    grammars: Grammars | None = None  # of the vocabulary, where the shaping has a grammar
    prompt: tuple[int, ...] = PROMPT

    @property
    def models(self):
        return tuple(Model(self.vocab, self.seed, side, self.kind) for side in (0, 1))


@cache
def logits(model, tokens):
    """Compute logits f32 [V], which depend on as many of the last tokens as the model remembers."""
    return model.logits(tokens[-model.memory :])


def generate(setting, seed, *, exchange=None, length=LENGTH):
    """Generate the first tokens after the prompt, by as many rounds as needed."""
    exchange = exchange or EXACT[setting.exchange]
    committed, at_edge = setting.prompt, len(setting.prompt)
    while len(committed) < len(setting.prompt) + length:
        committed, at_edge = play_round(setting, exchange, seed, committed, at_edge)
    return committed[len(setting.prompt) : len(setting.prompt) + length]


def play_round(setting, exchange, seed, committed, at_edge, drafter=None):
    """Play one round as `device_runtime` and `edge_runtime` do; commits tokens on both ends."""
    target, _ = setting.models
    law, drafting = (
        SamplingParams(sampling=each, seed=seed, logits_options=setting.shaping)
        for each in (setting.sampling, setting.drafting)
    )
    start = len(committed)
    draft = (drafter or draft_window)(setting, exchange, drafting, committed)
    pending = np.array(committed[at_edge:], dtype=np.uint32)
    frames = [bytes(part) for part in exchange.encode_draft(draft, pending, setting.vocab)]

    admitted = exchange.decode_draft(frames, setting.vocab)
    known = (*committed[:at_edge], *admitted.pending.tolist())
    paths = node_paths(admitted.ids.tolist(), admitted.parents)
    rows = np.stack([logits(target, (*known, *path)) for path in paths])
    if (shaper := shaper_of(setting, law)) is not None:
        shaper.process(rows, np.array(known, np.uint32), paths)
    ruling = exchange.verify(admitted, rows, law, round_start=start)

    ruling, _ = exchange.take_key_tokens(draft, ruling)
    token = exchange.finish_round(draft, ruling, law, round_start=start, vocab_size=setting.vocab)
    path = [int(draft.ids[at - 1]) for at in draft.path(ruling.accepted)]
    committed = (*committed, *path, token)
    return committed, len(committed) - (ruling.token is None)


def shaper_of(setting, law):
    """Make what shapes one end's logits, as both ends do."""
    grammar = law.logits_options.grammar
    constraint = setting.grammars.constraint(grammar) if grammar is not None else None
    return law.logits_processor(len(setting.prompt), constraint)


def draft_window(setting, exchange, law, committed, after=None):
    """Draft as `Drafter.draft`, with a table for a model.

    after: computes the logits f32 [V] after the committed tokens and a path; None: the drafter's.
    """
    _, drafter = setting.models
    after = after or (lambda path: logits(drafter, (*committed, *path)))
    shaper = shaper_of(setting, law)
    tree, rows, hopes = Tree(), [], [1.0]
    for depth, count in enumerate(setting.expansion):
        drawn = []
        for at, node in enumerate(tree.level):
            path = tree.tokens(tree.path(node))
            row = after(tuple(path))
            if shaper is not None:
                row = row.copy()
                shaper.process(row[None], np.array(committed, np.uint32), [path])
            place = DrawKey(len(committed), depth, range(at * count, (at + 1) * count))
            tokens, q = exchange.draw(row, law, place)
            drawn.append(tokens)
            rows.append(q)
            hopes[at] *= predicted_acceptance(row, count)
        tree.grow(drawn)
        if max(hopes) < setting.enough:
            break
        hopes = [hopes[at] for at, tokens in enumerate(drawn) for _ in set(tokens)]
    return exchange.make_draft(tree, rows)


def exact_law(model, sampling, length=LENGTH):
    """Compute the law of the first tokens after the prompt, f64 [V^length]."""
    p = law_of(model, sampling)
    return target_law(lambda prefix: p((*PROMPT, *prefix)[-2:]), length).ravel()


def frequencies(setting, seeds, *, exchange=None, length=LENGTH):
    """Count how often each beginning was generated, i64 [V^length]."""
    counts = np.zeros((VOCAB,) * length, dtype=np.int64)
    for seed in range(seeds):
        counts[generate(setting, seed, exchange=exchange, length=length)] += 1
    return counts.ravel()
