"""What a role learns in tests of the update: every answer is equally good, and the policy is the one that drew it."""

from __future__ import annotations

import torch

from megarl.algo.objective import policy_objective
from megarl.models.forward import compute_logprobs
from megarl.trainer.roles import Role
from megarl.trainer.update import Objective


def build_even_policy_objective(role: Role) -> Objective:
    """PPO's clipped loss with advantage 1 on every policy token and a ratio of 1."""

    def objective(hidden, micro, weights):
        logprobs, entropy = compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
        pick = micro.token_index
        return policy_objective(
            logprobs, entropy, logprobs.detach(), torch.ones_like(logprobs), weights.loss[pick], weights.mask[pick],
            clip_low=0.2, clip_high=0.2, clip_c=3.0,
        )  # fmt: skip

    return objective
