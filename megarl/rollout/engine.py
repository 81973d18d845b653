"""What every rollout engine can do. `vllm_engine.py` and `naive_engine.py` build the two kinds.

One engine lives on the ranks of one tensor-parallel (and, for the naive engine, pipeline-parallel) group; several
engines side by side are rollout data parallel. All methods are called on every rank of an engine with the same
arguments; engines never wait for each other in `generate`.

    write_into(engine.open_weights())               # parameters in place; `generate` is refused meanwhile
    engine.publish_weights(version=3)               # they take effect, the prefix cache is dropped
    rollouts = engine.generate(prompts, sampling)   # refused before the first publication and after `discard_weights`
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megarl.records import Prompt, Rollout, Sampling


class RolloutEngine(Protocol):
    """An engine that answers prompts with the weights it was given last."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """Draws `sampling.n` answers to each prompt, greedily when `sampling.temperature` is 0, and a greedy one more
        with `sampling.with_greedy`: all in one go.

        Returns:
            `len(prompts) * sampling.num_answers` rollouts, by prompt, then by sample, the same on every rank of the
            engine.

        Raises:
            ValueError: no weights, or a request that the engine cannot serve (too long, an unusable temperature).
        """
        ...

    def open_weights(self) -> dict[str, Tensor]:
        """The engine's live parameters on this rank, to be written in place.

        `generate` refuses from here to `publish_weights`. Empty where the engine has no weights of its own.
        """
        ...

    def share_weights(self, trained: Mapping[str, Tensor]) -> int:
        """Lets parameters of the engine be the trainer's own storage from now on.

        Args:
            trained: the trainer's parameters by the engine's name for them, in the engine's layout and dtype.

        Returns:
            Bytes that the engine gave back.

        Raises:
            ValueError: an engine whose parameters must stay where they are.
        """
        ...

    def publish_weights(self, version: int) -> None:
        """Makes what was written take effect; answers drawn from now on carry `version`. Caches are dropped."""
        ...

    def checksums(self) -> dict[str, int]:
        """Hugging Face name -> checksum of the live weights, comparable with `weights.checksum.compute_checksum`."""
        ...

    def discard_weights(self) -> None:
        """Forgets the weights; `generate` refuses until weights are written and published again."""
        ...

    def close(self) -> None:
        """Frees the engine; it is of no use afterwards."""
        ...


def request_seed(seed: int, row: int, sample: int) -> int:
    """The seed of one answer, in [0, 2**63): depends on these three only, not on the engine or the batch.

    `seed` must change with the step. A row that occurs twice in one step gets the same answers twice.
    """
    digest = hashlib.blake2b(f"{seed} {row} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
