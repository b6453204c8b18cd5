"""Turns a quantised GGUF model file into a plain Hugging Face folder; the child process behind `thundersync.models`.

Usage: python -m thundersync.generate.unpack FILE.gguf FOLDER. Knows nothing of caches or names.
"""

import sys
from pathlib import Path


def unpack(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into `folder`: bfloat16 safetensors (embeddings stay tied), config, tokenizer, chat template.

    bfloat16 because the file's 4-bit values carry less: the rounding is far below the quantisation's.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # An end of turn ends the reply. The file's own end-of-text id would let a reply run past its turn.
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    model.config.eos_token_id, model.config.pad_token_id = end_of_turn, pad
    model.generation_config = GenerationConfig(eos_token_id=end_of_turn, pad_token_id=pad)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
