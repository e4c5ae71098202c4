"""Random draws of a window: the drafter's candidates, the edge's coins, and the token that follows.

The key of a draw is the generation's seed, the draw's purpose, and its place in the text and in the
window (`speculation.randomness`). A repeated round therefore draws the same values again.
"""

from collections.abc import Callable, Sequence

from pilotfish.speculation.distributions import Floats, probabilities
from pilotfish.speculation.randomness import Purpose, noise, sample, uniforms
from pilotfish.speculation.rows import Row
from pilotfish.speculation.tree import Walk, verify
from pilotfish.wire.protocols.protocol import Decision, Draft, DrawKey, SamplingParams


def sample_candidates(row: Row, params: SamplingParams, key: DrawKey) -> list[int]:
    """Draw independent samples of q, one for each candidate."""
    return [
        row.token(
            sample(
                row.weights,
                noise(
                    len(row.weights),
                    params.seed,
                    Purpose.DRAFT,
                    key.position,
                    round_start=key.round_start,
                    candidate=candidate,
                ),
            )
        )
        for candidate in key.candidates
    ]


def coins(count: int, params: SamplingParams, round_start: int) -> Callable[[int, float], bool]:
    """Return a function that draws whether a window's candidate i is accepted, by probability."""
    draws = uniforms(
        count, params.seed, Purpose.ACCEPT, round_start, round_start=round_start
    ).tolist()
    return lambda candidate, probability: bool(draws[candidate] < probability)


def sample_next(walk: Walk, params: SamplingParams, key: DrawKey) -> int:
    """Sample the token after the accepted path, from residual or bonus; key: its draw's key."""
    return sample(
        walk.weights,
        noise(
            len(walk.weights),
            params.seed,
            Purpose.RESIDUAL if walk.rejected else Purpose.BONUS,
            key.position,
            round_start=key.round_start,
        ),
    )


def verify_window(
    draft: Draft,
    candidates: Sequence[tuple[int, ...]],
    q: Callable[[int], Row],
    logits: Floats,
    params: SamplingParams,
    *,
    round_start: int,
) -> Decision:
    """Decide with a known q: accept a path, then sample the residual or the bonus.

    candidates: the candidates of each inner node. q: returns an inner node's distribution. logits:
    [n + 1, V]; only the rows of the path are used.
    """
    walk = verify(
        candidates,
        draft.ids,
        q,
        lambda node: probabilities(logits[node : node + 1], params.sampling)[0],
        coins(sum(map(len, candidates)), params, round_start),
    )
    key = DrawKey(round_start, len(draft.path(walk.node)))
    return Decision(walk.node, sample_next(walk, params, key))
