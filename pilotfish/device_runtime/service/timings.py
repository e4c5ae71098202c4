"""The times and counts of answers, as llama.cpp's server names them."""

from collections.abc import Sequence

from pilotfish.device_runtime.record import Generation
from pilotfish.device_runtime.service.refusal import Body


def timings(generations: Sequence[Generation]) -> Body:
    """Return llama.cpp's ``timings``, summed over all generations.

    The prompt's time ends with the first token. A draft token counts if the target verified its
    window; in a tree, a level counts once.
    """
    cached = sum(generation.cached_tokens for generation in generations)
    prompt = sum(generation.prompt_tokens for generation in generations) - cached
    predicted = sum(len(generation.tokens) for generation in generations)
    prompt_s = sum(generation.first_token_s for generation in generations)
    predicted_s = sum(generation.total_s for generation in generations) - prompt_s
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    return {
        "cache_n": cached,
        **_rates("prompt", prompt, prompt_s),
        **_rates("predicted", predicted, predicted_s),
        "draft_n": sum(round_.window for round_ in rounds),
        "draft_n_accepted": sum(round_.accepted for round_ in rounds),
    }


def _rates(name: str, count: int, took_s: float) -> Body:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(took_s * 1e3, 3),
        f"{name}_per_token_ms": round(took_s * 1e3 / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / took_s, 3) if took_s > 0 else 0.0,
    }
