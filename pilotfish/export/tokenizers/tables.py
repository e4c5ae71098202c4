"""Read or derive merges: the pairs of tokens that a BPE joins."""

from __future__ import annotations

from collections.abc import Mapping


def pair(merge: str) -> tuple[str, str]:
    """Split a line of merges at its first space; a space as the first character does not count."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")


def merges_by_score(score: Mapping[str, float]) -> list[tuple[str, str]]:
    """List all pairs of tokens that together form a token, the best score of that token first.

    SentencePiece and tiktoken join the neighbours that form the token with the best score. Of
    several pairs for one token, the pair with the longest left part is first, as in transformers'
    conversion.
    """
    merges = [
        (token[:cut], token[cut:])
        for token in score
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    merges.sort(key=lambda pair: (-score[pair[0] + pair[1]], -len(pair[0])))
    return merges
