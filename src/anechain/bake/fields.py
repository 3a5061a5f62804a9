"""Which fields of a config.json decide the mathematics, and reading them: all faults together, nothing guessed."""

from collections.abc import Iterable, Mapping
from typing import Any

READ = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
# Fields that change the mathematics, with the values under which they change nothing; null is always such a value.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (),
    "sliding_window": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "residual_multiplier": (),
    "embedding_multiplier": (),
    "logits_scaling": (),
    "num_experts": (),
    "num_local_experts": (),
    "auto_map": (),
}
# Fields about training, bookkeeping and defaults of generation: no value of theirs changes a logit.
IGNORED = frozenset({
    "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path", "_commit_hash",
    "use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "residual_dropout", "embd_pdrop",
    "return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "tie_encoder_decoder", "is_decoder", "cross_attention_hidden_size", "finetuning_task", "id2label",
    "label2id", "num_labels", "problem_type", "tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id",
    "task_specific_params", "unk_token_id", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "attn_implementation", "_flash_attn_2_enabled", "gradient_checkpointing",
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "unsloth_version", "unsloth_fixed",
    "transformers.js_config", "model_max_length", "bos_token", "eos_token", "pad_token", "license", "tags",
})  # fmt: skip


class Reader:
    """Reads config fields and collects what is wrong, so that one sentence can name everything."""

    def __init__(self, config: Mapping[str, Any], field_names: Mapping[str, str]) -> None:
        self.config = config
        self.field_names = field_names
        self.faults: list[str] = []

    def fault(self, name: str, text: str) -> None:
        self.faults.append(f"{self.field_names.get(name, name)} {text}")

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.fault(name, "is missing")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fault(name, f"= {value!r} (use a whole number of at least 1)")
        else:
            return value
        return 1

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.fault(name, f"= {value!r} (use a positive number)")
            return default
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fault(name, f"= {value!r} (use true or false)")
            return default
        return value


def field_faults(config: Mapping[str, Any], known: Iterable[str], fixed: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """A phrase for each field that is neither in READ, IGNORED or `known` nor has a value of `fixed` (over FIXED)."""
    known, allowed = {*READ, *IGNORED, *known}, FIXED | dict(fixed)
    faults = []
    for name, value in config.items():
        if value is None or name in known:
            continue
        if name not in allowed:
            faults.append(f"{name} = {short(value)} is not understood (remove it if no result depends on it)")
        elif not allowed[name]:
            faults.append(f"{name} = {short(value)} is not supported")
        elif value not in allowed[name]:
            faults.append(f"{name} = {short(value)} is not supported (only {short(allowed[name][0])} is)")
    return faults


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
