"""A tiny random Llama with a byte-level ChatML tokenizer: a real model folder in 50 ms, equal for equal seeds.

Small enough that a test may start an engine on it, yet with everything that bites: grouped-query attention, tied or
untied head, a chat template, an end-of-turn token, and logits wide enough (std about 2) that stale weights show.
"""

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN_ID = 2
NAMED_IDS = 384
# Merges are written from words, prefix by prefix, instead of trained: the same vocabulary on every machine.
WORDS = (
    "Ġthe",
    "Ġfile",
    "Ġa",
    "Ġis",
    "user",
    "assistant",
    "system",
    "bash",
    "echo",
    "Ġto",
    "Ġof",
    "Ġnamed",
    "```",
    "done",
)


def tiny_model(
    path: Path, *, seed: int = 0, vocab: int = NAMED_IDS, tie: bool = True, layers: int = 2, std: float = 0.25
) -> Path:
    """Write a random float32 Llama (about 0.1M parameters, head size 32) and its tokenizer to `path`; returns `path`.

    `vocab` is at least 384; the tokenizer names 384 ids, the rest are padding rows, as in real models. The usual `std`
    of the weights saturates attention, so that float32 gradients of some inputs are good to 2e-5 only; 0.1 is benign.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=END_OF_TURN_ID,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1.0 + 0.1 * torch.randn_like(parameter))
                else:
                    # std 0.25: hidden states of norm 8 against rows of norm 2 give logits of std 2.
                    parameter.copy_(std * torch.randn_like(parameter))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tiny_tokenizer(path)
    return path


def tiny_tokenizer(path: Path) -> Path:
    """Write only the tokenizer: 3 special tokens, 256 bytes, the merges of WORDS, reserved names up to 384; ChatML."""
    vocabulary, merges = _vocabulary()
    special = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for index, token in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    tokens = [*SPECIAL, *_byte_letters()]
    merges: list[list[str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if [left, right] not in merges:
                merges.append([left, right])
                tokens.append(left + right)
    # Every id has a name: a random model samples them all, and text must come out of each.
    tokens += [f"<reserved_{index}>" for index in range(len(tokens), NAMED_IDS)]
    return {token: index for index, token in enumerate(tokens)}, merges


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte value, in byte order: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
