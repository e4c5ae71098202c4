"""Bias and penalties token by token, as vLLM's documentation defines them: the reference."""

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from hypothesis import strategies as st

from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.logits_options import LogitsOptions


def shaped(
    row: Floats, prompt: Sequence[int], answer: Sequence[int], options: LogitsOptions
) -> Floats:
    """Return one row of logits [V], changed."""
    reply, row = Counter(answer), row.copy()
    for token in range(len(row)):
        row[token] += np.float32(options.logit_bias.get(token, 0.0))
        if token in reply or token in prompt:
            factor = np.float32(options.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= np.float32(options.frequency_penalty) * reply[token]
        row[token] -= np.float32(options.presence_penalty) * (token in reply)
    return row


def shaped_law(model, sampling: Sampling, options: LogitsOptions, prompt: Sequence[int]):
    """Return a function for p after a prefix of an answer, f32 [V], by a table model."""

    def p(prefix):
        text = (*prompt, *prefix)
        row = shaped(model.logits(text[-2:]), prompt, prefix, options)
        return probabilities(row[None], sampling)[0]

    return cache(p)


def shapings(vocab: int):
    """Any shaping of few tokens; half of them with one part only."""
    tokens = st.integers(0, vocab - 1)
    biases = st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.5, 2.0, 100.0]), max_size=2)
    factors = st.sampled_from([0.5, 1.0, 1.0, 1.3, 4.0])
    penalties = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 1.0, 2.0])
    return st.one_of(
        st.builds(LogitsOptions, logit_bias=biases),
        st.builds(LogitsOptions, repetition_penalty=factors),
        st.builds(LogitsOptions, frequency_penalty=penalties),
        st.builds(LogitsOptions, presence_penalty=penalties),
        st.builds(
            LogitsOptions,
            logit_bias=biases,
            repetition_penalty=factors,
            frequency_penalty=penalties,
            presence_penalty=penalties,
        ),
    )
