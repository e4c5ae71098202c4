"""wisv: seconds of a round that uploads the drafter's hidden states: all (FH) or requested (SH).

In:  window L, number m of requested positions, sizes in bits, the link with its packet error rates
     (PER), FLOPs. Out: seconds of communication, of computing, of a round and of an answer.
From: wisv §IV. The paper's text lacks its formulas; docs/papers.md has them. Equations 14 and 16
     are equation 11 with the FLOPs of 12 and 15. Equation 22 adds up equation 18 or 19 over the
     rounds that equation 21 counts. AAL, the committed tokens per round, includes the correction.
"""

from dataclasses import dataclass

from pilotfish.speculation.latency import Link, communication_s


@dataclass(frozen=True, kw_only=True)
class MessageBits:
    """The sizes of a message's parts, in bits.

    The parts are a token id b_tok, a position b_pos, a hidden state d·b_h (3), and the overheads
    O_up and O_down. In the paper b_tok = ⌈log₂|V|⌉; the paper does not print the overheads.
    """

    token: float
    position: float
    hidden: float
    overhead_up: float = 0.0
    overhead_down: float = 0.0


def eq_3_hidden_bits(dimension: int, element_bits: int) -> float:
    """Compute the bits of one hidden state of the drafter, d·b_h (3)."""
    return float(dimension * element_bits)


def eq_4_feedback_bits(sizes: MessageBits) -> float:
    """Compute the feedback's bits: first rejection, correction, b_pos + b_tok + O_down (4)."""
    return sizes.position + sizes.token + sizes.overhead_down


def eq_5_full_upload_bits(window: int, sizes: MessageBits) -> float:
    """Compute the bits that FH uploads: ids and all states, L(b_tok + d·b_h) + O_up (5)."""
    return window * (sizes.token + sizes.hidden) + sizes.overhead_up


def eq_6_exchange_s(
    up_bits: float, down_bits: float, link: Link, per_up: float = 0.0, per_down: float = 0.0
) -> float:
    """Compute the seconds of one exchange, for FH and the baselines (6).

    T_comm = D_up/(R_up(1 − PER_up)) + D_down/(R_down(1 − PER_down)) + T_rtt. per_up, per_down:
    packet error rates.
    """
    goodput = Link(
        rtt_s=link.rtt_s,
        up_bps=link.up_bps * (1.0 - per_up),
        down_bps=link.down_bps * (1.0 - per_down),
    )
    return communication_s(up_bits / 8.0, down_bits / 8.0, goodput)


def eq_7_first_upload_bits(window: int, sizes: MessageBits) -> float:
    """Compute the bits that SH uploads first: token ids, L·b_tok + O_up (7)."""
    return window * sizes.token + sizes.overhead_up


def eq_8_request_bits(positions: float, sizes: MessageBits) -> float:
    """Compute the bits with which the edge requests m positions, m·b_pos + O_down (8)."""
    return positions * sizes.position + sizes.overhead_down


def eq_9_second_upload_bits(positions: float, sizes: MessageBits) -> float:
    """Compute the bits that SH uploads second: the requested states, m·d·b_h + O_up (9)."""
    return positions * sizes.hidden + sizes.overhead_up


def eq_10_selective_s(
    window: int,
    positions: float,
    sizes: MessageBits,
    link: Link,
    per_up: float = 0.0,
    per_down: float = 0.0,
) -> float:
    """Compute T_comm of SH: ids and feedback, and if m > 0 a second exchange with an RTT (10)."""
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
    """Compute the seconds of computing: FLOPs / (η·peak) (11). utilisation: η."""
    return flops / (utilisation * peak_flops)


@dataclass(frozen=True, kw_only=True)
class DecoderDimensions:
    """The dimensions of a decoder-only model.

    heads: number of query heads. key_heads: number of heads with keys and values.
    """

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    heads: int
    key_heads: int

    def eq_13_token_flops(self, context: int) -> float:
        """Compute the FLOPs of one new token (13); a multiply-add counts as 2.

        The paper's form is n·(a·context·d + b·d² + c·d·d_ff) + 2·d·|V|: attention over the context,
        projections and MLP in each of n layers, then the output layer. Here a = 4,
        b = 4·(1 + key_heads/heads) and c = 6 (a gated MLP).
        """
        d = self.hidden
        attention = 4.0 * context * d
        projections = 4.0 * (1.0 + self.key_heads / self.heads) * d * d
        mlp = 6.0 * d * self.feed_forward
        return self.layers * (attention + projections + mlp) + 2.0 * d * self.vocabulary


def eq_12_draft_flops(drafter: DecoderDimensions, context: int, window: int) -> float:
    """Compute the FLOPs of drafting: L passes over one token, each with a longer context (12)."""
    return sum(drafter.eq_13_token_flops(context + i) for i in range(window))


def eq_15_verify_flops(target: DecoderDimensions, context: int, window: int) -> float:
    """Compute the FLOPs of the target's pass over L drafts: equation 12 for the target (15)."""
    return eq_12_draft_flops(target, context, window)


def eq_17_head_flops(features: int, width: int) -> float:
    """Compute the FLOPs of the decision head at a position: a two-layer MLP, 2·(d_u·h + h) (17)."""
    return 2.0 * (features * width + width)


def eq_18_round_s(draft_s: float, communication_s: float, verify_s: float, head_s: float) -> float:
    """Compute the seconds of a round: its four parts together (18 for FH, 19 for SH)."""
    return draft_s + communication_s + verify_s + head_s


def eq_20_accepted_length(throughput: float, latency_s: float, rounds: float) -> float:
    """Compute AAL, the committed tokens per round: throughput · latency / rounds (20)."""
    return throughput * latency_s / rounds


def eq_22_latency_s(rounds: float, round_s: float) -> float:
    """Compute the seconds of an answer if every round takes ``round_s`` (22)."""
    return rounds * round_s
