"""A whole tiny job on disk: model, tokenizer, data and a reward function, and the command that trains it.

The task: the answer should be made of the word `d`. A random model says it once in 25 words; it is learned in a few
steps, so a run shows that rewards, advantages, gradients and the weight transfer have the right sign and place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tiny import save_hf_model

ROOT = Path(__file__).parents[1]
WORDS = ["<unk>", "</s>", "<bos>", "<u>", "<a>", *"abcdefghijklmnopqrs"]
TEMPLATE = "{% for m in messages %}<u> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
REWARD = """
def share_of_d(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    return {"score": words.count(ground_truth) / max(len(words), 1), "accuracy": float(words[:1] == [ground_truth])}
"""


def write_job(folder: Path, family: str = "llama", **changes: Any) -> list[str]:
    """Writes everything below `folder`.

    Returns:
        The `key=value` words that name it.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    save_hf_model(folder / "model", family, **{"num_hidden_layers": 2, "vocab_size": len(WORDS) + 8, **changes})
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    letters = WORDS[5:]
    for name, count in (("train", 64), ("val", 9)):
        rows = [
            {"prompt": " ".join(letters[(i + j * j) % len(letters)] for j in range(2 + i % 3)), "ground_truth": "d"}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return list_words(folder)


def list_words(folder: Path) -> list[str]:
    """The `key=value` words that name the job of `write_job`."""
    return [
        f"actor.model_path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"reward.function={folder / 'reward.py'}:share_of_d",
        f"trainer.default_local_dir={folder / 'run'}",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "data.train_batch_size=8",
        "actor.dtype=fp32",
        "critic.dtype=fp32",
        "rollout.dtype=fp32",
        "rollout.kv_cache_gib=0.1",
        "rollout.max_num_seqs=32",
        "actor.ppo_max_token_len=64",
        "critic.ppo_max_token_len=64",
        "ref.ppo_max_token_len=64",
    ]


def run_megarl(words: list[str], timeout_s: float = 240, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `megarl train` with these words; output and error are text."""
    return subprocess.run(
        [sys.executable, "-m", "megarl", "train", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
