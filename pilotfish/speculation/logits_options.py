"""Change logits before sampling: bias, penalties, grammar constraint.

In:  logits [n, V] and, for each row, the text that it continues. Out: the same rows, changed.

Both ends process their own logits, each row by its own path: the edge's define the output's law,
the device's make drafts agree with it. With `distributions` the whole order is: bias, penalties,
constraint, temperature, min-p, top-k, top-p (docs/protocols.md). A `Constraint` knows what a
grammar allows, for which it needs the tokens' texts.
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
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3  # bounds of repetition_penalty


class Grammar(NamedTuple):
    """A grammar that answers must match. kind: "json" (text is a schema), "regex", "lark", "turn".

    "turn" is an assistant's turn, with its thoughts and calls (docs/wire.md).
    """

    kind: str
    text: str

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """Create a grammar of JSON that fits a JSON schema, given as an object or as text."""
        return cls("json", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def from_choices(cls, texts: Sequence[str]) -> "Grammar":
        """Create a grammar that allows exactly these texts."""
        return cls("lark", "start: " + " | ".join(json.dumps(text) for text in texts))


class Constraint(Protocol):
    """Forbids tokens in the rows of one generation."""

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        """Set tokens that must not follow answer and path to −∞, in place; returns dead ends."""

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> Sequence[int]:
        """Return the only tokens that may follow, in order; empty if there is a choice."""


@dataclass(frozen=True, kw_only=True)
class LogitsOptions:
    """How logits are changed; the defaults change nothing. As vLLM defines them:

    logit_bias: added to a token's logit, −100 to 100, for at most `MOST_BIASED` tokens.
    repetition_penalty: for tokens of prompt or answer, divides logits > 0 and multiplies others;
    10⁻³ to 10³. frequency_penalty, presence_penalty: subtracted from the logits of the answer's
    tokens, the former once for each occurrence; −2 to 2. grammar: what the answer must match.
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
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or bool(
            self.frequency_penalty or self.presence_penalty
        )

    @property
    def is_identity(self) -> bool:
        """Whether nothing changes the logits."""
        return not (self.logit_bias or self.has_penalties or self.grammar)


def _expect(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least:g} and {most:g}, not {value}")


NO_LOGITS_OPTIONS = LogitsOptions()


class LogitsProcessor:
    """Processes the logits of one generation. Not thread-safe.

    prompt_length: tokens before the answer. constraint: the options' grammar, compiled; None
    forbids nothing, for a drafter that cannot use it. Rows may come in any order, and the text may
    change between calls.
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
        """Change the rows of ``logits`` [n, V] in place; returns the dead ends among them.

        text: u32 [m], prompt and answer, which all rows continue. paths: for each row, the tokens
        after the text. A dead end, which no token may follow, is left unconstrained.
        """
        logits[:, self._biased] += self._bias
        if self._options.has_penalties:
            self._penalties.apply(logits, text, paths)
        if self._constraint is None:
            return ()
        return self._constraint.forbid(logits, text[self._prompt_length :], paths)

    def forced_token(self, text: Ids, path: Sequence[int]) -> int | None:
        """Return the only token that may follow text and path; None if there is a choice."""
        if self._constraint is None:
            return None
        tokens = self._constraint.forced(text[self._prompt_length :], path)
        return tokens[0] if len(tokens) else None


def node_paths(
    ids: Sequence[int], parents: Sequence[int] | NDArray[np.int64] | None
) -> list[list[int]]:
    """Return the path of each row of a window: the root's, then each node's with its own token.

    ids: the nodes' tokens. parents: index of each node's parent, −1 for the root; None: a chain.
    """
    paths: list[list[int]] = [[]]
    for at, token in enumerate(ids):
        parent = at if parents is None else parents[at] + 1
        paths.append([*paths[parent], token])
    return paths
