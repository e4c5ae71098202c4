"""Report the overlap of a drafter's and a target's vocabularies, and whether it suffices.

The report has two values, measured on a text. *Coverage* is the share of the text's target tokens
that are shared, and that the drafter's head has if it was cut. Only these tokens can be drafted,
and a draft is accepted with probability Σ min(p, q) ≤ p(shared); so coverage limits the acceptance
α on texts of this kind, for any drafter. *Mass* is the average probability that the drafter's own
distribution gives to shared tokens. Mass is no limit, since q is renormalised. But q differs from
the drafter's own distribution by 1 − mass (total variation), and a distribution that has lost most
of its mass is seldom close to the target's.

The product of both values decides. If α is below 0.2, a round of any length commits fewer than 1/(1
− α) = 1.25 tokens on average. Without drafting and upload, the edge alone commits 1 token per pass,
so the pair is hopeless. The report compares vocabularies, not models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.bridge.shared import SharedTokens
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Engine, Work, open_engine
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Sampling, probabilities

Progress: TypeAlias = Callable[[str, int, "int | None"], None]
Ids = NDArray[np.int64]

HOPELESS = 0.2  # a pair with coverage · mass below this is hopeless
MOST_POSITIONS = 4096  # maximum number of positions that the drafter reads
_CONTEXT = 1024
_LABEL = "running the drafter"
_CHUNK = 64  # rows of logits per pass: 64 · 152k · 4 bytes are 39 MB

# A text with prose, chat, code, sums, another language and data.
SAMPLE = """\
The lighthouse keeper climbed the stairs at dusk, as he had done every evening for thirty-one \
years. From the gallery he could see the fishing boats coming home, one behind the other, and \
beyond them a bank of fog that had not moved since morning. He trimmed the wick, wound the \
clockwork, and waited. Nobody had told him yet that the light would be automated in the spring.

User: Can you explain why the sky is blue? My daughter asked me and I wasn't sure what to say.
Assistant: Sure! Sunlight contains all colors. When it passes through the air, molecules scatter \
short wavelengths (blue) much more strongly than long ones (red), so blue light reaches your eyes \
from every direction. At sunset the light travels farther, and most of the blue has been lost on \
the way. Would you like a simpler version for a five-year-old?

def moving_average(values: list[float], window: int = 3) -> list[float]:
    \"\"\"Average of each run of `window` neighbours.\"\"\"
    if window <= 0:
        raise ValueError(f"window must be positive, not {window}")
    sums = []
    for i in range(len(values) - window + 1):
        sums.append(sum(values[i : i + window]) / window)
    return sums  # O(n * window)

Natalia sold 48 clips in April and half as many in May: 48 / 2 = 24, so 48 + 24 = 72 altogether. \
At $1.25 each that makes 72 × 1.25 = $90.00; after a discount of 15% it is $76.50. The invoice, \
no. 2024-0317, is due on 3/31/2025.

Die Universität wurde 1386 gegründet und ist damit die älteste in Deutschland. Heute studieren \
dort über 28.000 junge Menschen; viele von ihnen kommen aus dem Ausland. Wer die Stadt besucht, \
sollte das Schloss und die Brücke über den Fluss nicht verpassen.

{"name": "sensor-7", "unit": "°C", "readings": [21.5, 21.7, null], "ok": true}
"""


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """The overlap of a pair's vocabularies.

    shared: number of shared tokens. specials: the shared special tokens as strings, the target's →
    the drafter's. turn_end: the target's token that ends a turn; it is drafted only if it is in
    `specials`. target_tokens: length of the text in target tokens. coverage, mass: see the module.
    positions: number of positions over which the mass was averaged.
    """

    drafter: str
    target: str
    own_size: int
    target_size: int
    shared: int
    specials: dict[str, str]
    turn_end: str | None
    target_tokens: int
    coverage: float
    positions: int
    mass: float

    @property
    def hopeless(self) -> bool:
        """Whether drafting cannot be expected to save time."""
        return self.coverage * self.mass < HOPELESS


def compare_vocabularies(
    drafter: Artifact,
    target: Artifact,
    text: str,
    *,
    provider: str = "auto",
    threads: int | None = None,
    progress: Progress = lambda label, done, total: None,
) -> PairReport:
    """Compare two vocabularies, and run the drafter on a text of at least one token.

    Raises `ArtifactError` if a device would refuse the target's tokenizer, `PairMismatchError` if
    no token is shared, and `UnsupportedError` if the text has no tokens in one of the vocabularies.
    """
    drafter_vocabulary, unchecked = (
        Vocabulary.from_artifact(drafter),
        Vocabulary.from_artifact(target),
    )
    # decoding runs the checks that a device runs
    target_vocabulary = Vocabulary.decode(unchecked.encode(), unchecked.model)
    shared = SharedTokens.find(drafter_vocabulary, target_vocabulary)
    ids = target_vocabulary.tokenizer.encode(text)
    drafter_tokens = [
        *drafter_vocabulary.tokenizer.beginning,
        *drafter_vocabulary.tokenizer.encode(text),
    ]
    if not ids or not drafter_tokens:
        raise UnsupportedError("The text has no tokens: give another text.")
    own_ids = np.array(drafter_tokens[:MOST_POSITIONS], np.int64)
    progress(_LABEL, 0, len(own_ids))
    engine = open_engine(drafter, context=_CONTEXT, threads=threads, provider=provider, drafts=True)
    places = shared.to_target_ids(drafter.head_tokens)  # target ids [V_d], or [N] for a cut head
    sayable = places < shared.target_size
    masses = []
    for logits in _logits(engine, own_ids):
        q = probabilities(logits, Sampling(temperature=1.0))
        masses += q[:, sayable].sum(axis=1, dtype=np.float64).tolist()
        progress(_LABEL, len(masses), len(own_ids))
    piece, own_piece = target_vocabulary.tokenizer.piece, drafter_vocabulary.tokenizer.piece
    end = target_vocabulary.turn_end
    return PairReport(
        drafter=drafter_vocabulary.model,
        target=target_vocabulary.model,
        own_size=drafter_vocabulary.vocab_size,
        target_size=target_vocabulary.vocab_size,
        shared=len(shared),
        specials={piece(id): own_piece(its) for id, its in shared.specials.items()},
        turn_end=None if end is None else piece(end),
        target_tokens=len(ids),
        coverage=float(np.mean(np.isin(ids, places))),
        positions=len(masses),
        mass=float(np.mean(masses)),
    )


def _logits(engine: Engine, ids: Ids) -> Iterator[NDArray[Any]]:
    """Yield the logits [≤ _CHUNK, V] after each token; restart when the context is full."""
    context = engine.model.context
    for start in range(0, len(ids), context):
        part = ids[start : start + context]
        for at in range(0, len(part), _CHUNK):
            end = min(at + _CHUNK, len(part))
            yield engine.run([Work(0, part[:end], end - at)])[0].logits
