"""wisv: seconds of a round that uploads drafter hidden states, all (FH) or requested ones (SH).

In:  window L, requested positions m, sizes in bits, the link with its packet error rates, FLOPs.
Out: seconds of communication, computing, a round and an answer.
From: wisv §IV. The paper's text lacks its formulas; docs/papers.md has them. (14) and (16) are (11)
     with (12) and (15); (22) is the sum of (18) or (19) over the rounds that (21) counts. AAL, the
     committed tokens a round, includes the correction.
"""

from dataclasses import dataclass

from pilotfish.speculation.latency import Link, communication_s


@dataclass(frozen=True, kw_only=True)
class MessageBits:
    """Bits of a token b_tok, a position b_pos, a hidden state d·b_h (3), overheads O_up, O_down.

    In the paper b_tok = ⌈log₂|V|⌉; the overheads are not printed.
    """

    token: float
    position: float
    hidden: float
    overhead_up: float = 0.0
    overhead_down: float = 0.0


def eq_3_hidden_bits(dimension: int, element_bits: int) -> float:
    """One drafter hidden vector, d·b_h (3)."""
    return float(dimension * element_bits)


def eq_4_feedback_bits(sizes: MessageBits) -> float:
    """Position of the first rejection and the corrected token, b_pos + b_tok + O_down (4)."""
    return sizes.position + sizes.token + sizes.overhead_down


def eq_5_full_upload_bits(window: int, sizes: MessageBits) -> float:
    """FH: ids and all hidden states, L(b_tok + d·b_h) + O_up (5)."""
    return window * (sizes.token + sizes.hidden) + sizes.overhead_up


def eq_6_exchange_s(
    up_bits: float, down_bits: float, link: Link, per_up: float = 0.0, per_down: float = 0.0
) -> float:
    """D_up/(R_up(1 − PER_up)) + D_down/(R_down(1 − PER_down)) + T_rtt (6), FH and baselines."""
    goodput = Link(
        rtt_s=link.rtt_s,
        up_bps=link.up_bps * (1.0 - per_up),
        down_bps=link.down_bps * (1.0 - per_down),
    )
    return communication_s(up_bits / 8.0, down_bits / 8.0, goodput)


def eq_7_first_upload_bits(window: int, sizes: MessageBits) -> float:
    """SH: token ids, L·b_tok + O_up (7)."""
    return window * sizes.token + sizes.overhead_up


def eq_8_request_bits(positions: float, sizes: MessageBits) -> float:
    """SH: the positions that the edge requests, m·b_pos + O_down (8)."""
    return positions * sizes.position + sizes.overhead_down


def eq_9_second_upload_bits(positions: float, sizes: MessageBits) -> float:
    """SH: their hidden states, m·d·b_h + O_up (9)."""
    return positions * sizes.hidden + sizes.overhead_up


def eq_10_selective_s(
    window: int,
    positions: float,
    sizes: MessageBits,
    link: Link,
    per_up: float = 0.0,
    per_down: float = 0.0,
) -> float:
    """T_comm of SH (10): ids and feedback, and if m > 0 a second exchange with its own T_rtt."""
    first = eq_7_first_upload_bits(window, sizes)
    seconds = eq_6_exchange_s(first, eq_4_feedback_bits(sizes), link, per_up, per_down)
    if positions > 0:
        request, reply = (
            eq_8_request_bits(positions, sizes),
            eq_9_second_upload_bits(positions, sizes),
        )
        seconds += eq_6_exchange_s(reply, request, link, per_up, per_down)
    return seconds


def eq_11_compute_s(flops: float, utilisation: float, peak_flops: float) -> float:
    """FLOPs / (η·peak) (11)."""
    return flops / (utilisation * peak_flops)


@dataclass(frozen=True, kw_only=True)
class DecoderDimensions:
    """Dimensions of a decoder-only model: ``key_heads`` of ``heads`` have keys and values (GQA)."""

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    heads: int
    key_heads: int

    def eq_13_token_flops(self, context: int) -> float:
        """FLOPs of one new token: attention over the context, projections, MLP, output head (13).

        The paper's form is n·(a·context·d + b·d² + c·d·d_ff) + 2·d·|V|. Here a = 4,
        b = 4·(1 + key heads/heads) and c = 6 (a gated MLP); a multiply-add is 2 FLOPs.
        """
        d = self.hidden
        attention = 4.0 * context * d
        projections = 4.0 * (1.0 + self.key_heads / self.heads) * d * d
        mlp = 6.0 * d * self.feed_forward
        return self.layers * (attention + projections + mlp) + 2.0 * d * self.vocabulary


def eq_12_draft_flops(drafter: DecoderDimensions, context: int, window: int) -> float:
    """L single-token passes, each with a context one token longer (12)."""
    return sum(drafter.eq_13_token_flops(context + i) for i in range(window))


def eq_15_verify_flops(target: DecoderDimensions, context: int, window: int) -> float:
    """One pass of the target over the L draft tokens: the same sum, its dimensions (15)."""
    return eq_12_draft_flops(target, context, window)


def eq_17_head_flops(features: int, width: int) -> float:
    """Decision head at one position: a two-layer MLP, 2·(d_u·h + h) (17)."""
    return 2.0 * (features * width + width)


def eq_18_round_s(draft_s: float, communication_s: float, verify_s: float, head_s: float) -> float:
    """T of a round (18) with T_comm of (6) for FH, (19) with that of (10) for SH."""
    return draft_s + communication_s + verify_s + head_s


def eq_20_accepted_length(throughput: float, latency_s: float, rounds: float) -> float:
    """AAL, committed tokens a round (20): throughput × latency / rounds."""
    return throughput * latency_s / rounds


def eq_22_latency_s(rounds: float, round_s: float) -> float:
    """T of an answer whose rounds all take round_s (22)."""
    return rounds * round_s
