"""The engine for debugging: the trainer's own model answers, token by token, without any cache.

It needs one function of the trainer, `next_logits`, that runs the model on whole sequences. There is no second copy
of the weights, so nothing to transfer and no gap between sampler and trainer. Every token costs a full forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megarl.records import Prompt, Rollout, Sampling
from megarl.rollout.engine import request_seed

NextLogits = Callable[[Sequence[Sequence[int]]], Tensor]


class NaiveEngine:
    """Answers prompts through `next_logits`.

    Args:
        next_logits: sequences of token ids -> [B, V] fp32 on the host, logits of the token that follows each; the
            same on every rank of the replica. Ids beyond the tokenizer's must be -inf.
        max_model_len: prompt and answer together.
    """

    def __init__(self, next_logits: NextLogits, max_model_len: int) -> None:
        self._next_logits = next_logits
        self._max_model_len = max_model_len
        self._version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`."""
        drafts = [
            _Draft(index, sample, prompt, request_seed(sampling.seed, prompt.row, sample))
            for index, prompt in enumerate(prompts)
            for sample in range(sampling.num_answers)
        ]
        for prompt in prompts:
            if len(prompt.token_ids) + sampling.max_tokens > self._max_model_len:
                raise ValueError(
                    f"row {prompt.row}: {len(prompt.token_ids)} prompt tokens and {sampling.max_tokens} to come are "
                    f"more than the engine's {self._max_model_len}"
                )
        open_drafts = list(drafts)
        for _ in range(sampling.max_tokens):
            if not open_drafts:
                break
            logits = self._next_logits([(*draft.prompt.token_ids, *draft.token_ids) for draft in open_drafts])
            for draft, row in zip(open_drafts, logits, strict=True):
                draft.extend(row, sampling)
            open_drafts = [draft for draft in open_drafts if not draft.is_finished]
        return [draft.to_rollout(self._version) for draft in drafts]

    def open_weights(self) -> dict[str, Tensor]:
        """Nothing to write: the trainer's weights are the engine's."""
        return {}

    def share_weights(self, trained: Mapping[str, Tensor]) -> int:
        """All weights are the trainer's already."""
        return 0

    def publish_weights(self, version: int) -> None:
        """Stamps later answers with the number of the update that the trainer's weights come from."""
        self._version = version

    def checksums(self) -> dict[str, int]:
        return {}

    def discard_weights(self) -> None:
        raise ValueError("rollout.name=naive uses the trainer's own weights, which cannot be discarded")

    def close(self) -> None:
        pass


class _Draft:
    """An answer in the making."""

    def __init__(self, prompt_index: int, sample: int, prompt: Prompt, seed: int) -> None:
        self.prompt_index, self.sample, self.prompt = prompt_index, sample, prompt
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.is_finished = False
        self._generator = torch.Generator().manual_seed(seed)

    def extend(self, logits: Tensor, sampling: Sampling) -> None:
        temperature = sampling.temperature_of(self.sample)
        if temperature == 0:
            token = int(logits.argmax())
            log_p = logits.log_softmax(-1)
        else:
            log_p = restrict(logits / temperature, sampling.top_p, sampling.top_k).log_softmax(-1)
            token = int(torch.multinomial(log_p.exp(), 1, generator=self._generator))
        self.token_ids.append(token)
        self.logprobs.append(float(log_p[token]))
        self.is_finished = token in sampling.stop_token_ids

    def to_rollout(self, version: int) -> Rollout:
        return Rollout(
            prompt_index=self.prompt_index,
            sample=self.sample,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            is_finished=self.is_finished,
            weights_version=version,
        )


def restrict(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """[V] logits with everything outside the `top_k` likeliest, then outside the nucleus of mass `top_p`, at -inf."""
    if top_k > 0:
        limit = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[mass_before >= top_p], -torch.inf)
    return logits
