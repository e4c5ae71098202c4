"""The speed of answers, with one meaning in `field measure`, `report`, `replay` and `compare`.

In: an answer's rounds, or seconds per token. Out: seconds per token and tokens/s.

Both describe an answer *after its first round*. The first round reads the prompt, and under
`stream` and `ahead` it takes the one RTT that an answer waits for. So its time is that of the first
token, and no tokens/s contains it: neither the prompt nor this RTT, which a longer answer would
spread over more tokens.
"""

from collections.abc import Sequence

from pilotfish.device_runtime.record import Round
from pilotfish.lab.field.answer import Answer


def steady_rounds(answer: Answer) -> list[Round]:
    """Return the rounds after the first round, which reads the prompt."""
    return answer.rounds[1:]


def steady_token_s(answer: Answer) -> float | None:
    """Compute the seconds per committed token of an answer's steady rounds; None if it has none."""
    rounds = steady_rounds(answer)
    tokens = committed_tokens(rounds)
    return sum(round_.timings.total for round_ in rounds) / tokens if tokens else None


def tokens_per_s(token_s: float | None) -> float | None:
    """Return the tokens/s of these seconds per token; None if they are unknown or 0."""
    return 1.0 / token_s if token_s else None


def committed_tokens(rounds: Sequence[Round]) -> int:
    """Return the number of tokens that these rounds committed."""
    return sum(len(round_.tokens) for round_ in rounds)
