"""The shape of an 8B Llama, with a tokenizer that needs no download."""

import json
from pathlib import Path

__all__ = ["VOCABULARY", "prompt", "write_llama"]

VOCABULARY = 128_256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_llama(folder: Path) -> None:
    """A folder that vLLM loads with ``load_format="dummy"``: random weights.

    Each token of its tokenizer is a word, w0, w1 and so on, so that n words are n tokens there and
    back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    unknown = "w0"
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": None,
                "decoder": None,
                "model": {
                    "type": "WordLevel",
                    "vocab": {f"w{number}": number for number in range(VOCABULARY)},
                    "unk_token": unknown,
                },
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown})
    )


def prompt(number: int, length: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids of a prompt that shares no beginning with others."""
    return [(number * 7919 + at * 104_729) % (vocabulary - 100) + 50 for at in range(length)]
