"""State spaces in primitive operators: products over all pairs of a run's tokens.

The output of token t is the sum over s ≤ t of decay(s → t) · (q_t · k_s) · v_s, plus the output of
the decayed earlier state. A run of n tokens needs memory for heads · n² numbers. Log decays are
summed in f64, because the decay between two tokens is computed from the difference of two sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pilotfish.export.dialects.operators import Operators
from pilotfish.export.parts import Recurrence

ALL = np.iinfo(np.int64).max


def update_state_by_pairs(
    net: Operators, dims: Recurrence, rows: Sequence[str], missing: str, states: Sequence[str]
) -> str:
    """Write the operators of `Dialect.update_state` for a state space; n = c + T tokens."""
    op, constant = net.graph.op, net.graph.constant
    keys, values = [-1, dims.key_heads, dims.key_dim], [-1, dims.heads, dims.value_dim]
    q, k = (op("Transpose", net.reshape(row, keys), perm=[1, 0, 2]) for row in rows[:2])
    v = op("Transpose", net.reshape(rows[2], values), perm=[1, 0, 2])  # [heads, n, value_dim]
    zero = constant(np.zeros((dims.heads, 1)), "float64")
    logs = net.cast(op("Transpose", rows[3], perm=[1, 0]), "float64")
    after = op("CumSum", logs, constant(1, "int64"))  # [heads, n], cumulative log decay
    sums = op("Concat", zero, after, axis=1)  # [heads, n + 1], from before the first token
    before = net.reshape(states[0], [dims.heads, dims.key_dim, dims.value_dim])

    decay = op("Trilu", _decay_between(net, after, after), upper=0)  # [heads, n, n]
    scores = op("MatMul", q, op("Transpose", k, perm=[0, 2, 1]))  # [key_heads, n, n]
    weights = op("Mul", _repeat_for_heads(net, dims, scores), decay)
    answer = op("MatMul", weights, v)
    read = op("MatMul", _repeat_for_heads(net, dims, q), before)
    past_decay = op("Exp", net.cast(net.unsqueeze(after, 2), "float32"))
    answer = op("Add", answer, op("Mul", read, past_decay))

    count = op("Shape", rows[3], start=0, end=1)
    keys_by_head = op(
        "Transpose", _repeat_for_heads(net, dims, k), perm=[0, 2, 1]
    )  # [heads, key_dim, n]
    for name, end in zip(states[1:], (missing, count), strict=True):
        total = op("Gather", sums, end, axis=1)  # [heads, 1]
        part = _decay_between(net, total, after)  # [heads, 1, n]
        part = op("Where", _is_before(net, count, end), part, constant(0.0, "float32"))
        new = op("MatMul", op("Mul", keys_by_head, part), v)
        past_decay_to_end = op("Exp", net.cast(net.unsqueeze(total, 2), "float32"))
        state = op("Add", op("Mul", before, past_decay_to_end), new)
        op("Unsqueeze", state, constant([0], "int64"), name=name)
    merged = net.reshape(op("Transpose", answer, perm=[1, 0, 2]), [1, -1, dims.values])
    return op("Slice", merged, missing, constant([ALL], "int64"), constant([1], "int64"))


def _decay_between(net: Operators, ends: str, starts: str) -> str:
    """Return the decay from each of `starts` to each of `ends`, f32, at most 1.

    Both are cumulative log decays.
    """
    op = net.graph.op
    between = net.cast(op("Sub", net.unsqueeze(ends, 2), net.unsqueeze(starts, 1)), "float32")
    return op("Exp", op("Min", between, net.graph.constant(0.0, "float32")))


def _repeat_for_heads(net: Operators, dims: Recurrence, x: str) -> str:
    """Repeat x [key_heads, n, m] for the heads; → [heads, n, m]."""
    if dims.heads == dims.key_heads:
        return x
    groups = np.repeat(np.arange(dims.key_heads), dims.heads // dims.key_heads)
    return net.graph.op("Gather", x, net.graph.constant(groups, "int64"), axis=0)


def _is_before(net: Operators, count: str, end: str) -> str:
    """Return a mask of the indices 0 … n − 1 below `end` [1], bool [n]; `count` [1] is n."""
    constant = net.graph.constant
    number = net.graph.op("Squeeze", count, constant([0], "int64"))
    indices = net.graph.op("Range", constant(0, "int64"), number, constant(1, "int64"))
    return net.graph.op("Less", indices, end)
