"""Pairs of tokens to merge."""

from __future__ import annotations

from collections.abc import Mapping


def pair(merge: str) -> tuple[str, str]:
    """Split a line of merges at its space; the first character is never the one meant."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")


def merges_by_score(score: Mapping[str, float]) -> list[tuple[str, str]]:
    """List all ways to join two tokens into a third, the best-scoring third first.

    SentencePiece and tiktoken join the neighbours whose union is best. Among splits of one union
    the longer left part goes first, as in transformers' conversion.
    """
    merges = [
        (token[:cut], token[cut:])
        for token in score
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    merges.sort(key=lambda pair: (-score[pair[0] + pair[1]], -len(pair[0])))
    return merges
