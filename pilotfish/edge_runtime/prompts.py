"""Jobs that read a prompt: they fill the caches, and compute its log-probabilities if requested.

In:  a session and its running generation. Out: jobs for the scheduler, without replies; the
     log-probabilities are sent with the generation's first result.
"""

from pilotfish.edge_runtime.generation import Generation
from pilotfish.edge_runtime.sessions import Session
from pilotfish.speculation.distributions import Floats

# Rows of a pass that scores a prompt: more than `NARROW`, so that the scheduler treats the pass as
# a prompt's, not as a window's.
_SCORED_ROWS = 48


def read_prompt(session: Session, generation: Generation) -> None:
    """Queue a job that reads the committed tokens except the last, while the device drafts."""
    tokens = session.committed.ids[:-1].copy()  # a copy, since the committed tokens may change
    session.queue_job(generation, tokens, 0, None)


def score_prompt_rest(session: Session, generation: Generation) -> None:
    """Queue jobs for the prompt's requested log-probabilities that no job computes.

    Parts of the prompt that an earlier pass has computed are skipped. After the first tokens of the
    answer there is nothing to do, since the log-probabilities were sent with them.
    """
    prompt = generation.prompt_logprobs
    if prompt is None or generation.jobs or prompt.start != len(session.committed):
        return
    tokens = prompt.ids[:-1]
    for begin in range(0, len(tokens), _SCORED_ROWS):
        part = tokens[: begin + _SCORED_ROWS]
        if prompt.covers(begin, len(part)):
            continue

        def verify(logits: Floats, _: Floats, end: int = len(part)) -> None:
            prompt.record(end, logits)

        session.queue_job(generation, part, len(part) - begin, verify)
