"""Fields of other servers' requests that this service does not offer, and their neutral values.

A client that sends such a field with a value without effect is answered as if it had left the field
out; any other value of the fields in `SAMPLING`, `INPUT` and `OUTPUT` is refused, since it would
change the answer. The names are those of vLLM, SGLang, llama.cpp, Ollama, text-generation-webui,
TGI, LM Studio, Mistral and OpenRouter, whose clients send them unasked.
"""

from typing import Final

from pilotfish.device_runtime.service.field_check import Values

_OFF: Final = (None, False)
_ZERO: Final = (None, 0)
_ONE: Final = (None, 1)
_EMPTY: Final[tuple[object, ...]] = (None, "", [], {})

SAMPLING: Final[Values] = {
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "bad_words_ids": _EMPTY,
    "ban_eos_token": _OFF,
    "custom_token_bans": _EMPTY,
    "do_sample": (None, True),
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "dynamic_temperature": _OFF,
    "early_stopping": _OFF,
    "encoder_repetition_penalty": _ONE,
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "guidance_scale": _ONE,
    "length_penalty": _ONE,
    "logits_processors": _EMPTY,
    "lora": _EMPTY,
    "lora_path": _EMPTY,
    "min_keep": (None, 0, 1),
    "mirostat": _ZERO,
    "mirostat_mode": _ZERO,
    "n_predict": (None, -1),
    "negative_prompt": _EMPTY,
    "no_repeat_ngram_size": _ZERO,
    "num_beams": _ONE,
    "num_predict": (None, -1),
    "penalize_nl": _OFF,
    "penalty_alpha": _ZERO,
    "repeat_penalty": _ONE,
    "smoothing_factor": _ZERO,
    "temperature_last": _OFF,
    "tfs": _ONE,
    "tfs_z": _ONE,
    "top_a": _ZERO,
    "top_n_sigma": (None, -1, 0),
    "typical": _ONE,
    "typical_p": _ONE,
    "use_beam_search": _OFF,
    "xtc_probability": _ZERO,
}
INPUT: Final[Values] = {
    "add_bos_token": (None, True),
    "chat_template": _EMPTY,
    "documents": _EMPTY,
    "image_data": _EMPTY,
    "images": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "multi_modal_data": _EMPTY,
    "safe_prompt": _OFF,
    "transforms": _EMPTY,
    "truncate": (None, False),
    "truncate_prompt_tokens": (None,),
}
OUTPUT: Final[Values] = {
    "ebnf": _EMPTY,
    "format": _EMPTY,
    "grammar": _EMPTY,
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": _OFF,
    "json_schema": _EMPTY,
    "n_probs": _ZERO,
    "no_stop_trim": _OFF,
    "post_sampling_probs": _OFF,
    "regex": _EMPTY,
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
    "return_tokens": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "separate_reasoning": (None, True),
    "skip_special_tokens": (None, True),
    "stream_reasoning": (None, True),
    "structural_tag": _EMPTY,
    "t_max_predict_ms": _ZERO,
}
# Unsupported hints: they concern only the length or the cost of an answer.
HINTS: Final[Values] = {
    "min_length": _ZERO,
    "min_new_tokens": _ZERO,
    "min_tokens": _ZERO,
    "thinking_token_budget": (None,),
}
# Names, costs, caches and routes; and parameters of samplers that are off (`SAMPLING`).
INERT: Final = frozenset(
    (
        "cache_control",
        "cache_prompt",
        "cache_salt",
        "client_metadata",
        "detokenize",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "guided_decoding_backend",
        "id_slot",
        "keep_alive",
        "kv_transfer_params",
        "metadata",
        "mirostat_eta",
        "mirostat_tau",
        "n_keep",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "provider",
        "repeat_last_n",
        "request_id",
        "return_progress",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "smoothing_curve",
        "spaces_between_special_tokens",
        "store",
        "timings_per_token",
        "trace",
        "usage",
        "user",
        "vllm_xargs",
        "xtc_threshold",
    )
)
