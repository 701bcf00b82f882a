"""A tiny random Llama with a tokenizer of its own, as a folder that Hugging Face reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, USER, ASSISTANT, END, MASK = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"
CONTROL = (PAD, USER, ASSISTANT, END, MASK)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|>{{ message.content }}<|end|>"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MERGED_WORDS = ("the and of a is in to what how many write that for with each on your", "return def list number")
HIDDEN_SIZE, INNER_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, VOCAB_SIZE = 64, 128, 4, 4, 2, 320
STEADY = 3.0  # the value of one residual dimension in every token
END_BIAS = 1.15  # weight of the end token on it: about every second answer of 32 tokens ends by itself


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE with a few dozen merges; ids 0..4 are the control tokens, of which the last masks blocks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{words} " * 20 for words in MERGED_WORDS], trainer)
    return tokenizer


def tiny_weights(num_layers: int = NUM_LAYERS) -> dict[str, torch.Tensor]:
    """A random Llama's weights, the same at every call, with a bias for the end token by way of a steady dimension."""
    random = torch.Generator().manual_seed(8)
    kv_size = HIDDEN_SIZE * NUM_KV_HEADS // NUM_HEADS

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 0.1

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN_SIZE),
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
    }
    for layer in range(num_layers):
        parts = {
            "input_layernorm": torch.ones(HIDDEN_SIZE),
            "self_attn.q_proj": matrix(HIDDEN_SIZE, HIDDEN_SIZE),
            "self_attn.k_proj": matrix(kv_size, HIDDEN_SIZE),
            "self_attn.v_proj": matrix(kv_size, HIDDEN_SIZE),
            "self_attn.o_proj": matrix(HIDDEN_SIZE, HIDDEN_SIZE),
            "post_attention_layernorm": torch.ones(HIDDEN_SIZE),
            "mlp.gate_proj": matrix(INNER_SIZE, HIDDEN_SIZE),
            "mlp.up_proj": matrix(INNER_SIZE, HIDDEN_SIZE),
            "mlp.down_proj": matrix(HIDDEN_SIZE, INNER_SIZE),
        }
        # No layer writes the first dimension of the residual stream, so it keeps the embedding's value.
        parts["self_attn.o_proj"][0] = parts["mlp.down_proj"][0] = 0
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in parts.items()}
    head = matrix(VOCAB_SIZE, HIDDEN_SIZE)
    head[:, 0] = 0
    head[CONTROL.index(END), 0] = END_BIAS
    head[[CONTROL.index(text) for text in CONTROL if text != END], 0] = -20.0
    weights["model.embed_tokens.weight"][:, 0] = STEADY
    return weights | {"lm_head.weight": head}


def write_tiny_target(folder: Path, *, num_layers: int = NUM_LAYERS) -> Path:
    """Config, weights and tokenizer of the tiny target, in Hugging Face's own format."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INNER_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": CONTROL.index(END),
        "pad_token_id": CONTROL.index(PAD),
    }
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": CONTROL.index(END)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": TEMPLATE}))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(tiny_weights(num_layers), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
