"""Which algorithms there are, as data: what an advantage needs, what a loss sees, and what each named algorithm sets.

    algorithm.name=dapo  ->  ALGORITHMS["dapo"].settings()  ->  laid over the defaults, under the user's own values

An advantage names the scores it needs; the trainer runs only the forward passes and builds only the roles that make
those. The functions behind the names are in `trainer/estimators.py` and `losses.py`; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Need = Literal["values", "siblings", "greedy", "costs"]
"""values: a critic. siblings: two or more answers a prompt. greedy: one greedy answer more a prompt, for its score
only. costs: a cost for each answer, and a cost critic."""

NEEDS: tuple[Need, ...] = ("values", "siblings", "greedy", "costs")


@dataclass(frozen=True)
class AdvantageFacts:
    """What `algorithm.adv_estimator` asks for beside the answers and their scores, and where it is described."""

    needs: tuple[Need, ...]
    paper: str


@dataclass(frozen=True)
class LossFacts:
    """`algorithm.policy_loss`; `needs_whole`: the loss looks at all tokens of an answer together."""

    needs_whole: bool
    paper: str


@dataclass(frozen=True)
class PreferenceFacts:
    """`preference.loss`: whether it compares two answers to one prompt, whether it reads a reference's log-probs, and
    which head the model has."""

    is_pairwise: bool
    needs_reference: bool
    head: Literal["policy", "value"]
    paper: str


@dataclass(frozen=True)
class Algorithm:
    """A named algorithm: advantage, policy loss, reduction over tokens, and further options it is defined with.

    Training on preferences has no advantage: `loss` is then of `PREFERENCES`.
    """

    advantage: str | None
    loss: str
    reduction: str
    paper: str
    options: Mapping[str, object] = field(default_factory=dict)

    def settings(self) -> dict[str, object]:
        """The options that this name stands for, by configuration key."""
        if self.advantage is None:
            return {"preference.loss": self.loss, **self.options}
        return {
            "algorithm.adv_estimator": self.advantage,
            "algorithm.policy_loss": self.loss,
            "actor.loss_agg_mode": self.reduction,
            **self.options,
        }


ADVANTAGES: dict[str, AdvantageFacts] = {
    "gae": AdvantageFacts(("values",), "Schulman et al. 2016"),
    "gae_lagrangian": AdvantageFacts(("values", "costs"), "Dai et al. 2023"),
    "grpo": AdvantageFacts(("siblings",), "Shao et al. 2024"),
    "rloo": AdvantageFacts(("siblings",), "Ahmadian et al. 2024"),
    "opo": AdvantageFacts(("siblings",), "Hao et al. 2025"),
    "remax": AdvantageFacts(("greedy",), "Li et al. 2023"),
    "reinforce_plus_plus": AdvantageFacts((), "Hu 2025"),
    "reinforce_plus_plus_baseline": AdvantageFacts(("siblings",), "Hu 2025"),
}

LOSSES: dict[str, LossFacts] = {
    "clip": LossFacts(False, "Schulman et al. 2017"),
    "pg": LossFacts(False, "Williams 1992"),
    "cispo": LossFacts(False, "MiniMax 2025"),
    "gspo": LossFacts(True, "Zheng et al. 2025"),
    "gmpo": LossFacts(True, "Zhao et al. 2025"),
}

PREFERENCES: dict[str, PreferenceFacts] = {
    "dpo": PreferenceFacts(True, True, "policy", "Rafailov et al. 2023"),
    "ipo": PreferenceFacts(True, True, "policy", "Azar et al. 2023"),
    "kto": PreferenceFacts(False, True, "policy", "Ethayarajh et al. 2024"),
    "simpo": PreferenceFacts(True, False, "policy", "Meng et al. 2024"),
    "reward_model": PreferenceFacts(True, False, "value", "Bradley and Terry 1952; Ouyang et al. 2022"),
}

_PER_ANSWER, _PER_TOKEN = "seq-mean-token-mean", "token-mean"

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm("gae", "clip", _PER_TOKEN, "Schulman et al. 2017; Ouyang et al. 2022"),
    "vapo": Algorithm(
        "gae",
        "clip",
        _PER_TOKEN,
        "Yue et al. 2025",
        {"algorithm.lam_alpha": 0.05, "algorithm.lam_critic": 1.0, "actor.clip_ratio_high": 0.28},
    ),
    "grpo": Algorithm("grpo", "clip", _PER_ANSWER, "Shao et al. 2024", {"actor.use_kl_loss": True}),
    "dr_grpo": Algorithm(
        "grpo", "clip", "seq-mean-token-sum-norm", "Liu et al. 2025", {"algorithm.norm_adv_by_std": False}
    ),
    "dapo": Algorithm(
        "grpo",
        "clip",
        _PER_TOKEN,
        "Yu et al. 2025",
        {"actor.clip_ratio_high": 0.28, "algorithm.filter_groups.enable": True},
    ),
    "gspo": Algorithm(
        "grpo",
        "gspo",
        _PER_ANSWER,
        "Zheng et al. 2025",
        {"actor.clip_ratio_low": 3e-4, "actor.clip_ratio_high": 4e-4},
    ),
    "cispo": Algorithm("grpo", "cispo", _PER_TOKEN, "MiniMax 2025", {"actor.clip_ratio_low": 1.0}),
    "gmpo": Algorithm(
        "grpo", "gmpo", _PER_ANSWER, "Zhao et al. 2025", {"actor.clip_ratio_low": 0.4, "actor.clip_ratio_high": 0.4}
    ),
    "rloo": Algorithm("rloo", "pg", "seq-mean-token-sum", "Ahmadian et al. 2024", {"algorithm.use_kl_in_reward": True}),
    "opo": Algorithm("opo", "pg", "seq-mean-token-sum", "Hao et al. 2025"),
    "remax": Algorithm("remax", "pg", "seq-mean-token-sum", "Li et al. 2023", {"algorithm.use_kl_in_reward": True}),
    "reinforce_plus_plus": Algorithm(
        "reinforce_plus_plus", "clip", _PER_TOKEN, "Hu 2025", {"algorithm.use_kl_in_reward": True}
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "reinforce_plus_plus_baseline",
        "clip",
        _PER_TOKEN,
        "Hu 2025",
        {"actor.use_kl_loss": True, "actor.kl_loss_type": "k2"},
    ),
    "safe_rlhf": Algorithm(
        "gae_lagrangian",
        "clip",
        _PER_TOKEN,
        "Dai et al. 2023",
        {"algorithm.use_kl_in_reward": True, "algorithm.whiten_advantages": False},
    ),
    "dpo": Algorithm(None, "dpo", "mean of pairs", "Rafailov et al. 2023"),
    "cdpo": Algorithm(None, "dpo", "mean of pairs", "Mitchell 2023", {"preference.label_smoothing": 0.1}),
    "ipo": Algorithm(None, "ipo", "mean of pairs", "Azar et al. 2023"),
    "kto": Algorithm(None, "kto", "mean of answers", "Ethayarajh et al. 2024"),
    "simpo": Algorithm(
        None, "simpo", "mean of pairs", "Meng et al. 2024", {"preference.beta": 2.0, "preference.simpo_gamma": 1.0}
    ),
    "reward_model": Algorithm(None, "reward_model", "mean of pairs", "Ouyang et al. 2022"),
}
