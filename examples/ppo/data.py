"""The prompts of a run, and a look at one of them."""

from __future__ import annotations

import torch.distributed as dist
from rich.console import Console

from megarl.job import Job
from megarl.records import Prompt
from megarl.rollout.show_row import inspect_row


class PromptData:
    """The training prompts, shuffled anew each epoch; the same on every rank."""

    def __init__(self, job: Job) -> None:
        self._data = job.data

    def next_batch(self) -> list[Prompt]:
        """`data.train_batch_size` prompts."""
        return self._data.stream.next_batch()

    def debug_sample(self) -> None:
        """Prints one prompt as the model will see it: text, tokens, and where the mask of the answer begins."""
        if dist.get_rank() == 0:
            Console().print(inspect_row(self._data.stream.first, self._data.tokenizer, self._data.stop_ids))
