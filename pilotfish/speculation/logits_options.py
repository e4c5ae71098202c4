"""What is done to logits before the distribution is made of them: bias, penalties, constraint.

In:  logits [n, V] and, of each row, the text that it continues. Out: the same rows, changed.

Both ends do it to their own logits, each row by its own path: the edge's make the law, the device's
make drafts that agree with it. With `distributions` this is the whole order: bias, penalties,
constraint, temperature, min-p, top-k, top-p (docs/protocols.md). What a grammar allows is told by a
`Constraint`, which needs the tokens' texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.penalties import Penalties

Ids = NDArray[np.uint32]

MOST_BIASED = 512  # tokens
MOST_BIAS = 100.0
MOST_PENALTY = 2.0
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3  # of repetition


class Grammar(NamedTuple):
    """What an answer must be: kind "json" (text: a schema), "regex", "lark" or "turn".

    The latter is an assistant's turn, with its thoughts and calls (docs/wire.md).
    """

    kind: str
    text: str

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that fits a JSON schema, given as such or as its text."""
        return cls("json", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def from_choices(cls, texts: Sequence[str]) -> "Grammar":
        """One of these texts."""
        return cls("lark", "start: " + " | ".join(json.dumps(text) for text in texts))


class Constraint(Protocol):
    """Forbids tokens, row by row, in one generation."""

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        """Set to −∞ what must not follow answer and path, in place; returns the dead ends."""

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> Sequence[int]:
        """Return the tokens that alone may follow, the next one first."""


@dataclass(frozen=True, kw_only=True)
class LogitsOptions:
    """How logits are changed; the defaults change nothing. As vLLM defines them:

    logit_bias: what is added to a token's logit, −100 to 100, of at most `MOST_BIASED` tokens.
    repetition_penalty: divides the logits > 0, and multiplies the others, of tokens that occur in
    prompt or answer; 10⁻³ to 10³. frequency_penalty, presence_penalty: are taken off the logits of
    tokens that occur in the answer, the former once for each time; −2 to 2. grammar: what the
    answer must be.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if len(self.logit_bias) > MOST_BIASED:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} tokens; {MOST_BIASED} is the most"
            )
        for token, bias in self.logit_bias.items():
            if token < 0:
                raise ValueError(f"logit_bias names token {token}; ids begin at 0")
            _expect(f"logit_bias of token {token}", bias, -MOST_BIAS, MOST_BIAS)
        _expect("repetition_penalty", self.repetition_penalty, LEAST_FACTOR, MOST_FACTOR)
        for name in ("frequency_penalty", "presence_penalty"):
            _expect(name, getattr(self, name), -MOST_PENALTY, MOST_PENALTY)

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes anything."""
        return self.repetition_penalty != 1.0 or bool(
            self.frequency_penalty or self.presence_penalty
        )

    @property
    def is_identity(self) -> bool:
        """Whether nothing is changed."""
        return not (self.logit_bias or self.has_penalties or self.grammar)


def _expect(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least:g} and {most:g}, not {value}")


NO_LOGITS_OPTIONS = LogitsOptions()


class LogitsProcessor:
    """Shapes the logits of one generation. since: the tokens of its prompt; the answer follows.

    Rows may be asked for in any order, and the text may change between calls; one thread at a time.
    constraint: by the shaping's grammar; without one nothing is forbidden, as by a drafter that
    cannot read it.
    """

    def __init__(
        self, options: LogitsOptions, prompt_length: int, constraint: Constraint | None = None
    ) -> None:
        self._options = options
        self._prompt_length = prompt_length
        self._constraint = constraint
        self._biased = np.fromiter(options.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(options.logit_bias.values(), np.float32)
        self._penalties = Penalties(
            repetition=options.repetition_penalty,
            frequency=options.frequency_penalty,
            presence=options.presence_penalty,
            prompt_length=prompt_length,
        )

    def process(self, logits: Floats, text: Ids, paths: Sequence[Sequence[int]]) -> Sequence[int]:
        """Change the rows of ``logits`` [n, V] in place; returns those that nothing may follow.

        text: u32 [m], prompt and answer, which all rows continue. paths: of each row, the tokens
        behind that. A row that nothing may follow is not constrained: its p is of no use.
        """
        logits[:, self._biased] += self._bias
        if self._options.has_penalties:
            self._penalties.apply(logits, text, paths)
        if self._constraint is None:
            return ()
        return self._constraint.forbid(logits, text[self._prompt_length :], paths)

    def forced_token(self, text: Ids, path: Sequence[int]) -> int | None:
        """Return the only token that may follow text and path; None where there may be several."""
        if self._constraint is None:
            return None
        tokens = self._constraint.forced(text[self._prompt_length :], path)
        return tokens[0] if len(tokens) else None


def node_paths(
    ids: Sequence[int], parents: Sequence[int] | NDArray[np.int64] | None
) -> list[list[int]]:
    """Return the path of each row of a window: the root's, then each node's with its own token.

    ids: of the nodes. parents: of each the index of its parent, −1 for the root; None: a chain.
    """
    paths: list[list[int]] = [[]]
    for at, token in enumerate(ids):
        parent = at if parents is None else parents[at] + 1
        paths.append([*paths[parent], token])
    return paths
