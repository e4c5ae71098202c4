"""Change logits before sampling: bias, penalties, grammar constraint.

In:  logits [n, V] and, for each row, the text that the row continues. Out: the same rows, changed.

Each end processes its own logits: the edge's logits define the output's law, and the device's
drafts agree more often if its logits are processed in the same way. Together with
`speculation.distributions` the order is: bias, penalties, constraint, temperature, min-p, top-k,
top-p (docs/protocols.md). A `Constraint` applies a grammar, for which it needs the tokens' texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.masks import Masks
from pilotfish.speculation.penalties import Penalties

Ids = NDArray[np.uint32]

MOST_BIASED = 512  # upper limit of tokens in logit_bias
MOST_BIAS = 100.0  # bound of |logit_bias| of a token
MOST_PENALTY = 2.0  # bound of |frequency_penalty| and |presence_penalty|
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3  # bounds of repetition_penalty


class Grammar(NamedTuple):
    """Grammar that answers must match.

    kind: "json" (``text`` is a JSON schema), "regex", "lark", or "turn" (an assistant's turn with
    thoughts and tool calls, docs/wire.md).
    """

    kind: str
    text: str

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """Create the grammar of the JSON that fits a schema (an object, or JSON text)."""
        return cls("json", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def from_choices(cls, texts: Sequence[str]) -> "Grammar":
        """Create a grammar that allows exactly these texts."""
        return cls("lark", "start: " + " | ".join(json.dumps(text) for text in texts))

    def expect_unicode(self) -> None:
        """Raise `ValueError` for a text that has no UTF-8 form, as the wire needs it."""
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The grammar is not valid Unicode: its character {error.start} is "
                f"{self.text[error.start]!a}, half of a pair or a byte that is not UTF-8"
            ) from error


class Constraint(Protocol):
    """Forbids tokens of one generation; the implementation knows the grammar."""

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        """Set the logits of forbidden tokens to −∞, in place; return the dead ends.

        Row i of ``logits`` [n, V] continues the answer u32 [m] and ``paths[i]``. A dead end is a
        row that no token may continue.
        """

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> Sequence[int]:
        """Return the tokens that must follow answer and path; empty if there is a choice."""


@dataclass(frozen=True, kw_only=True)
class LogitsOptions:
    """Changes of the logits, as vLLM defines them; the defaults change nothing.

    logit_bias: token → number to add to its logit, −100 to 100; at most `MOST_BIASED` tokens.
    repetition_penalty: factor for the tokens of prompt and answer, 10⁻³ to 10³; a logit above 0 is
    divided by it, any other multiplied. frequency_penalty, presence_penalty: numbers to subtract
    from the logits of the answer's tokens, −2 to 2; the frequency penalty is subtracted once for
    each occurrence. grammar: the grammar that the answer must match.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if len(self.logit_bias) > MOST_BIASED:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MOST_BIASED} are allowed"
            )
        for token, bias in self.logit_bias.items():
            if token < 0:
                raise ValueError(f"logit_bias names token {token}, but token ids begin at 0")
            _expect(f"logit_bias of token {token}", bias, -MOST_BIAS, MOST_BIAS)
        _expect("repetition_penalty", self.repetition_penalty, LEAST_FACTOR, MOST_FACTOR)
        for name in ("frequency_penalty", "presence_penalty"):
            _expect(name, getattr(self, name), -MOST_PENALTY, MOST_PENALTY)
        if self.grammar is not None:
            self.grammar.expect_unicode()

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

    prompt_length: number of tokens before the answer. constraint: the compiled grammar of the
    options; None forbids no token, for a drafter that cannot use a grammar. The rows may have any
    order, and the text may change between calls.
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
        """Change the rows of ``logits`` [n, V] in place; return the dead ends.

        text: prompt and answer, which all rows continue, u32 [m]. paths: for each row, the tokens
        after the text. A dead end is a row that no token may continue; it stays unconstrained.
        """
        logits[:, self._biased] += self._bias
        if self._options.has_penalties:
            self._penalties.apply(logits, text, paths)
        if self._constraint is None:
            return ()
        return self._constraint.forbid(logits, text[self._prompt_length :], paths)

    def state(
        self, text: Ids, paths: Sequence[Sequence[int]], vocab: int
    ) -> "tuple[RowOptions, Sequence[int]]":
        """Return what `process` would do to rows over ``vocab`` tokens, and the dead ends."""
        masks = None
        dead: Sequence[int] = ()
        if self._constraint is not None:
            rows = np.zeros((len(paths), vocab), np.float32)
            dead = self._constraint.forbid(rows, text[self._prompt_length :], paths)
            masks = Masks.pack(rows == 0.0)
        options = replace(self._options, grammar=None)
        return RowOptions(options, self._prompt_length, masks), dead

    def forced_token(self, text: Ids, path: Sequence[int]) -> int | None:
        """Return the only token that may follow text and path; None if there is a choice."""
        if self._constraint is None:
            return None
        tokens = self._constraint.forced(text[self._prompt_length :], path)
        return tokens[0] if len(tokens) else None


class RowOptions(NamedTuple):
    """Changes of the logits of certain rows, in a form that another process can apply.

    options: bias and penalties, without a grammar. prompt_length: number of tokens before the
    answer. masks: the tokens that the grammar allows in each row; None: all.
    """

    options: LogitsOptions
    prompt_length: int
    masks: Masks | None

    def process(
        self,
        logits: Floats,
        tokens: NDArray[np.integer[Any]],
        parents: Sequence[int] | NDArray[np.int64] | None,
    ) -> None:
        """Change the rows of ``logits`` [n, V] in place.

        tokens: integers [m], the whole sequence; the rows are those of its last n tokens. parents:
        as in `node_paths`, if the last n − 1 tokens are a tree.
        """
        length = len(tokens) - len(logits) + 1
        paths = node_paths(tokens[length:].tolist(), parents)
        processor = LogitsProcessor(self.options, self.prompt_length, self.masks)
        processor.process(logits, tokens[:length].astype(np.uint32), paths)


def node_paths(
    ids: Sequence[int], parents: Sequence[int] | NDArray[np.int64] | None
) -> list[list[int]]:
    """Return the path of each row of a window: the root's path, then each node's.

    A path is the tokens after the text. The root's path is empty; a node's path ends with the
    node's token. ids: the nodes' tokens. parents: index of each node's parent, −1 for the root;
    None: the nodes form a chain.
    """
    paths: list[list[int]] = [[]]
    for at, token in enumerate(ids):
        parent = at if parents is None else parents[at] + 1
        paths.append([*paths[parent], token])
    return paths
