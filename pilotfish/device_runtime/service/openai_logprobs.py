"""Format log-probabilities: an answer's as OpenAI's two routes do, a prompt's as vLLM does.

In:  the tokens of an answer, each with its `TokenLogprob` or None. Out: bodies; unknown values are
null. For a text there is an entry for every token, so that clients can count from either end.
For a chat, the entries' texts together are the message's content, so control tokens have none.
"""

from collections.abc import Iterator, Sequence

from pilotfish.device_runtime.service.refusal import Body
from pilotfish.engines.tokenizer import TextStream, Tokenizer
from pilotfish.wire.codecs.logprobs import TokenLogprob

TokenLogprobs = Sequence[TokenLogprob | None]


def chat_logprobs(tokens: Sequence[int], logprobs: TokenLogprobs, tokenizer: Tokenizer) -> Body:
    """Format the log-probabilities of a chat's tokens."""

    def entry(token: int, logprob: float | None) -> Body:
        data = tokenizer.token_bytes(token)
        return {"token": _text(token, tokenizer), "logprob": logprob, "bytes": [*data]}

    content = [
        {
            **entry(token, None if its is None else its.logprob),
            "top_logprobs": [] if its is None else [entry(*pair) for pair in its.top],
        }
        for token, its in _plain_tokens(tokens, logprobs, tokenizer)
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """The offsets of a text's tokens, in characters.

    begin: offset of the first token. special: whether the text includes control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int = 0, *, special: bool = False) -> None:
        self._stream = TextStream(tokenizer, special=special)
        self._end = begin

    def next_offset(self, token: int) -> int:
        """Return the offset of the next token of the text."""
        begin = self._end
        self._end += len(self._stream.push([token]))
        return begin


def text_logprobs(
    tokens: Sequence[int], logprobs: TokenLogprobs, tokenizer: Tokenizer, offsets: TextOffsets
) -> Body:
    """Format the log-probabilities of the next tokens of a text."""
    body: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for at, token in enumerate(tokens):
        its = logprobs[at] if at < len(logprobs) else None
        top = () if its is None else its.top
        body["tokens"].append(_text(token, tokenizer))
        body["token_logprobs"].append(None if its is None else its.logprob)
        body["top_logprobs"].append({_text(id, tokenizer): value for id, value in top} or None)
        body["text_offset"].append(offsets.next_offset(token))
    return body


def prompt_logprobs(
    ids: Sequence[int], logprobs: TokenLogprobs, tokenizer: Tokenizer
) -> list[Body | None]:
    """Format the log-probabilities of a prompt's tokens.

    The rank is known only for the likeliest tokens.
    """
    bodies: list[Body | None] = []
    for at, token in enumerate(ids):
        its = logprobs[at] if at < len(logprobs) else None
        if its is None:
            bodies.append(None)
            continue
        ranked: dict[int, tuple[float, int | None]] = {
            id: (value, rank) for rank, (id, value) in enumerate(its.top, start=1)
        }
        ranked.setdefault(token, (its.logprob, None))
        bodies.append(
            {
                str(id): {"logprob": value, "rank": rank, "decoded_token": _text(id, tokenizer)}
                for id, (value, rank) in ranked.items()
            }
        )
    return bodies


def _plain_tokens(
    tokens: Sequence[int], logprobs: TokenLogprobs, tokenizer: Tokenizer
) -> Iterator[tuple[int, TokenLogprob | None]]:
    for at, token in enumerate(tokens):
        if not tokenizer.is_special(token):
            yield token, logprobs[at] if at < len(logprobs) else None


def _text(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text; for a control token its name."""
    if tokenizer.is_special(token):
        return tokenizer.piece(token)
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
