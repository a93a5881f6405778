"""Random models whose greedy text varies (untied weights) and tells wrong attention.

The tiny ones are saved with weights; the full-sized shapes are configurations only.
"""

from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB = 512
WINDOW = 64


def gemma3_like(folder: Path) -> Path:
    """Six ring layers (window 64) and two flat ones, head size 32, group size 2."""
    torch.manual_seed(7)
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return _save(Gemma3ForCausalLM(config), folder)


def mistral_like(folder: Path) -> Path:
    """Four ring layers (window 64) and nothing else, head size 32, group size 3."""
    torch.manual_seed(11)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=WINDOW,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _save(MistralForCausalLM(config), folder)


def gemma3_shape(folder: Path) -> Path:
    """26 layers, five ring (window 1024) to one flat, head size 256; no weights."""
    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 5
    config = Gemma3TextConfig(
        vocab_size=32768,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        layer_types=layers[:26],
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    return _save_shape(config, "Gemma3ForCausalLM", folder)


def llama_8b_shape(folder: Path) -> Path:
    """32 flat layers, 8 KV heads of size 128, four query heads to each; no weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    return _save_shape(config, "LlamaForCausalLM", folder)


def _save_shape(config: PreTrainedConfig, architecture: str, folder: Path) -> Path:
    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.save_pretrained(folder)
    return folder


def _save(model: PreTrainedModel, folder: Path) -> Path:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Strong attention: with the usual small weights every key weighs the same.
            if weight.dim() == 2:
                weight.normal_(0, 0.3 if "_proj" in name else 1.0)
    model.save_pretrained(folder)
    return folder


def prompts(lengths: list[int], seed: int = 3) -> list[list[int]]:
    """Random token ids, one list for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def byte_tokenizer(folder: Path) -> Path:
    """A token for each byte, for what needs text; a model knows more tokens than that."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: i for i, token in enumerate(special + alphabet)}
    made = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>").save_pretrained(folder)
    return folder


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA of `mistral_like` for what makes its queries and values, strong enough to be seen."""
    import json

    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, width in {"q_proj": 96, "v_proj": 32}.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 96, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, 8, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
