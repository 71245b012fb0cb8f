"""Every field of transformers' GenerationConfig: read, known by what it makes, unread, or refused.

Plain sampling and greedy search are the measure: what they read is honoured or refused by name,
what they ignore is ignored here too. A field nobody has sorted yet is refused once it is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from outrider.errors import InvalidConfig

READ = frozenset({
    "assistant_confidence_threshold", "do_sample", "max_matching_ngram_size",
    "num_assistant_tokens", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "return_dict_in_generate",
})  # fmt: skip
"""Fields read from the configuration itself."""

ARRIVES = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "guidance_scale", "max_length", "max_new_tokens", "max_time", "min_length",
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_return_sequences", "pad_token_id",
    "remove_invalid_values", "renormalize_logits", "repetition_penalty", "sequence_bias",
    "stop_strings", "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p",
    "watermarking_config",
})  # fmt: skip
"""Fields that reach a callable as processors, criteria, token tensors or repeated prompts."""

UNREAD = frozenset({
    "_from_model_config", "bos_token_id", "compile_config", "decoder_start_token_id",
    "disable_compile", "early_stopping", "length_penalty", "transformers_version",
    "use_cache",
})  # fmt: skip
"""Fields that plain decoder-only sampling does not read, or that change no token."""

REFUSED = {
    "assistant_early_exit": "give early_exit through drafter= once there is such a drafter",
    "assistant_ensemble_weight": "it changes the law of the text; leave it out",
    "assistant_lookbehind": "it belongs to drafting across vocabularies; leave it out",
    "cache_config": "keys and values are kept in Outrider's own blocks; leave it out",
    "cache_implementation": "keys and values are kept in Outrider's own blocks; leave it out",
    "constraints": "it is for beam search; leave it out",
    "continuous_batching_config": "batches are Outrider's own; leave it out",
    "diversity_penalty": "it is for beam search; leave it out",
    "dola_layers": "DoLa is another law of the text; leave it out",
    "force_words_ids": "it is for beam search; leave it out",
    "is_assistant": "give the model that guesses as assistant_model= to custom_generate",
    "low_memory": "it is for contrastive search; leave it out",
    "max_cache_len": "keys and values are kept in Outrider's own blocks; leave it out",
    "num_assistant_tokens_schedule": "the draft length stays as given; use 'constant'",
    "num_beam_groups": "there is no beam search here; use 1",
    "num_beams": "there is no beam search here; use 1",
    "output_attentions": "attention weights are never made; leave it out",
    "output_hidden_states": "hidden states are not kept; leave it out",
    "output_logits": "rows of logits are not kept; leave it out",
    "output_scores": "rows of scores are not kept; leave it out",
    "penalty_alpha": "contrastive search is another law of the text; leave it out",
    "speculation_type": "give who guesses as drafter= to custom_generate",
    "target_lookbehind": "it belongs to drafting across vocabularies; leave it out",
    "token_healing": "heal the prompt yourself before generate",
    "use_mtp": "give who guesses as drafter= to custom_generate",
}
"""Fields that cannot be honoured, and what to do instead."""

HANDED = frozenset({
    "attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids",
    "use_cache",
})  # fmt: skip
"""Keywords transformers hands every callable of a decoder-only model."""

HARMLESS: dict[str, tuple[Any, ...]] = {"cache_implementation": ("dynamic",)}
"""Values of refused fields that ask for nothing."""


def defaults() -> dict[str, Any]:
    """What transformers fills in where nobody said anything."""
    plain = GenerationConfig()
    fill = getattr(plain, "_get_default_generation_params", dict)
    return {**vars(plain), **fill()}


def check_fields(config: GenerationConfig) -> None:
    """Refuses a configuration that asks for what cannot be given.

    Raises:
        InvalidConfig: names the field, its value and the remedy.
    """
    usual = defaults()
    for name in sorted(usual):
        value = getattr(config, name, None)
        asks_nothing = (None, False, 0, usual[name], *HARMLESS.get(name, ()))
        if name in READ | ARRIVES | UNREAD or any(value is v or value == v for v in asks_nothing):
            continue
        remedy = REFUSED.get(name, "Outrider does not know this field; leave it out")
        raise InvalidConfig(f"{name}={value!r} cannot be honoured by custom_generate: {remedy}")


def check_handed(keywords: Mapping[str, Any]) -> None:
    """Refuses inputs of a model that rows of tokens do not have, and caches that hold something.

    Raises:
        InvalidConfig: names the input.
    """
    for name, value in keywords.items():
        if name not in HANDED and value is not None and value is not False:
            raise InvalidConfig(
                f"{name} cannot be honoured by custom_generate, which reads token ids and their "
                "attention_mask alone; leave it out"
            )
    cache = keywords.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise InvalidConfig(
            f"past_key_values holds {cache.get_seq_length()} tokens and cannot be gone on from; "
            "give the whole prompt and leave it out"
        )


def pad_of(config: GenerationConfig) -> int:
    """The padding token; 0 where there is none, and then none is needed."""
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)
