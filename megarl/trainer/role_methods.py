"""The scoring methods of a role, to be called from any other grid: log-probs, values, rewards of whole sequences.

    critic = ScoringRole(topologies["critic"], job_critic_or_none)
    values = critic.compute_values(shard, caller=actor_topology)      # on every rank of the job

See `parallel/role_calls.py` for how the sequences travel. Every rank holds the object; on ranks outside the role it
knows the grid only.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.parallel.role_calls import register
from megarl.parallel.topology import Topology
from megarl.records import PackedBatch
from megarl.trainer.annotate import append_end_tokens, logprob_pass, read_sequence_scores, score_share, value_pass
from megarl.trainer.roles import Role


@dataclass(frozen=True)
class ScoringRole:
    """A role and its grid; `role` is None on ranks outside it."""

    topology: Topology
    role: Role | None
    temperature: float = 1.0

    @register(transfer_mode="3D_PROTO", returns="tokens")
    def compute_logprobs(self, batch: PackedBatch) -> Tensor:
        """[T] fp32: log-probs of the policy tokens at the sampling temperature."""
        return score_share(logprob_pass("logprobs", self._own(), self.temperature), batch)

    @register(transfer_mode="3D_PROTO", returns="tokens")
    def compute_values(self, batch: PackedBatch) -> Tensor:
        """[T] fp32: values of the states before the policy tokens."""
        return score_share(value_pass("values", self._own()), batch)

    @register(transfer_mode="3D_PROTO", returns="sequences")
    def get_rewards(self, batch: PackedBatch) -> Tensor:
        """[B] fp32: what a reward or cost model gives each sequence, read at its last token."""
        longer = append_end_tokens(batch)
        return read_sequence_scores(score_share(value_pass("rewards", self._own()), longer), longer)

    def _own(self) -> Role:
        assert self.role is not None, "this rank is not part of the role"
        return self.role
