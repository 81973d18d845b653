"""A reward model that transformers runs: any sequence-classification model with one label, on CPU or GPU, on rank 0.

It reads text, with its own tokenizer: the chat of the prompt and the answer as the assistant's message, in its own chat
template where it has one, else the prompt's text and the answer one after the other. Answers of the same number of
tokens are scored together, so there is no padding, and no doubt about which token is the last one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl import device
from megarl.reward.score import read_scores
from megarl.reward.verdict import Answer, Verdict, failed

NO_PADDING = -1  # as pad_token_id: matches no token, so transformers takes the last one


class TransformersRewardModel:
    """Holds the model and its tokenizer.

    Args:
        folder: a Hugging Face folder of a sequence-classification model with its tokenizer; the network is never asked.
        on_cpu: keep it on the CPU, also where the job has a GPU.
        dtype: of its weights.
        max_tokens: of the sequences scored together; also what one sequence may have.

    Raises:
        ValueError: not such a model, more than one label, no head on disk, no tokenizer.
    """

    def __init__(self, folder: str, *, on_cpu: bool, dtype: torch.dtype, max_tokens: int) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer  # seconds to import

        check_labels(folder)
        self._device = torch.device("cpu") if on_cpu else device.device()
        self._max_tokens = max_tokens
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, notes = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, num_labels=1, dtype=dtype, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{folder} holds no model that can score: {error}") from error
        if notes["missing_keys"]:
            raise ValueError(
                f"{folder} has no weights for {', '.join(sorted(notes['missing_keys'])[:3])}: scores would be random; "
                f"give the folder of a trained reward model"
            )
        model.config.get_text_config().pad_token_id = NO_PADDING
        self._model: Any = model.to(self._device).eval().requires_grad_(False)

    def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
        """See `Scorer.score`."""
        token_ids = [self._encode(answer) for answer in answers]
        verdicts: dict[int, Verdict] = {}
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(token_ids):
            if len(ids) > self._max_tokens:
                verdicts[index] = failed(f"{len(ids)} tokens for the reward model, more than {self._max_tokens}")
            elif not ids:
                verdicts[index] = failed("no tokens for the reward model")
            else:
                by_length.setdefault(len(ids), []).append(index)
        for length, members in by_length.items():
            size = max(1, self._max_tokens // length)
            for first in range(0, len(members), size):
                some = members[first : first + size]
                scores = self._run([token_ids[index] for index in some])
                verdicts |= dict(zip(some, read_scores(scores), strict=True))
        return [verdicts[index] for index in range(len(answers))]

    def close(self) -> None:
        """See `Scorer.close`."""
        self._model = None
        device.release_cached_memory()

    @torch.no_grad()
    def _run(self, token_ids: list[list[int]]) -> torch.Tensor:
        """[n] fp32 on the host; every row of `token_ids` [n, L] has the same length."""
        ids = torch.tensor(token_ids, device=self._device)
        logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return logits.float().squeeze(-1).cpu()

    def _encode(self, answer: Answer) -> list[int]:
        prompt = answer.prompt
        if prompt.messages and getattr(self._tokenizer, "chat_template", None):
            chat = [*map(dict, prompt.messages), {"role": "assistant", "content": answer.text}]
            text = self._tokenizer.apply_chat_template(chat, tokenize=False)
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._tokenizer(prompt.text + answer.text)["input_ids"]


def check_labels(folder: str) -> None:
    """Raises ValueError when config.json names more labels than one: a class's logit is not a reward."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
    labels = json.loads(file.read_text(encoding="utf-8")).get("id2label") or {}
    if len(labels) > 1:
        raise ValueError(
            f"{folder} has {len(labels)} labels ({', '.join(map(str, labels.values()))}); a reward needs one"
        )
