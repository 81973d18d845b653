"""A conversion holds one tensor at a time, however large the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_task import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MEASURE = """
import re, sys, threading, time
from pathlib import Path

def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

from megarl.cli import main
import megarl.convert
from transformers import AutoConfig
AutoConfig.for_model("llama")
peak = before = anonymous_bytes()
is_over = False

def watch():
    global peak
    while not is_over:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
code = main(sys.argv[1:])
is_over = True
watcher.join()
print("PEAK", peak - before)
sys.exit(code)
"""
LAYERS, HIDDEN, FFN, VOCAB = 64, 256, 1024, 32000
EMBEDDING_BYTES = VOCAB * HIDDEN * 4


def write_model(folder: Path) -> int:
    """A Llama folder in several files; returns its bytes. Values are cheap: each tensor is one number."""
    folder.mkdir()
    shapes = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    shapes |= {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    weight_map: dict[str, str] = {}
    total = 0
    for layer in range(-1, LAYERS):
        if layer < 0:
            names = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
        else:
            names = {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
        tensors = {f"{name}.weight": torch.full(shape, float(layer)) for name, shape in names.items()}
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, f"{layer}.safetensors")
        save_file(tensors, folder / f"{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return total


def measure(*words: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "convert", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split("PEAK ")[1])


def test_peak_is_a_few_tensors(tmp_path) -> None:
    total = write_model(tmp_path / "model")
    assert total > 8 * EMBEDDING_BYTES
    there = measure(
        "hf-to-megatron", "--hf", f"{tmp_path}/model", "--out", f"{tmp_path}/ckpt", "--tp", "2", "--pp", "4"
    )
    back = measure("megatron-to-hf", "--ckpt", f"{tmp_path}/ckpt", "--out", f"{tmp_path}/back")
    print(f"model {total / 2**20:.0f} MiB, there {there / 2**20:.0f} MiB, back {back / 2**20:.0f} MiB")
    assert there < 2 * EMBEDDING_BYTES, f"{there / 2**20:.0f} MiB"  # half of it a rank's part, plus what is freed late
    assert back < 3 * EMBEDDING_BYTES, f"{back / 2**20:.0f} MiB"  # the tensor, a rank's part of it
