"""What a configuration asks for: which scores its algorithm needs, and so which roles there are."""

from __future__ import annotations

from megarl.algo.algorithms import ADVANTAGES, LOSSES, PREFERENCES
from megarl.config.schema import Config, CriticConfig
from megarl.config.sources import scoring_roles


def score_needs(config: Config) -> frozenset[str]:
    """Of `algo.algorithms.NEEDS`, what the advantage asks for."""
    algorithm = config.algorithm
    if config.preference is not None:
        return frozenset()
    if algorithm.advantage is not None:
        return frozenset(algorithm.advantage_needs)
    return frozenset(ADVANTAGES[algorithm.adv_estimator.value].needs)


def loss_needs_whole(config: Config) -> bool:
    """Whether the policy loss looks at all tokens of an answer together; a user's function may."""
    algorithm = config.algorithm
    return algorithm.loss is not None or LOSSES[algorithm.policy_loss.value].needs_whole


def critic_roles(config: Config) -> dict[str, CriticConfig]:
    """The value models, with their settings."""
    needs = score_needs(config)
    roles: dict[str, CriticConfig] = {}
    if "values" in needs:
        roles["critic"] = config.critic
    if "costs" in needs:
        roles["cost_critic"] = config.cost_critic
    return roles


def trained_roles(config: Config) -> tuple[str, ...]:
    """Roles with an optimizer."""
    return ("actor", *critic_roles(config))


def needs_reference(config: Config) -> bool:
    """Whether a KL term, or a preference loss, asks for the reference's log-probabilities."""
    if config.preference is not None:
        return PREFERENCES[config.preference.loss.value].needs_reference
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss


def model_roles(config: Config) -> tuple[str, ...]:
    """Roles that are Megatron models, of a resolved configuration."""
    ref = ("ref",) if needs_reference(config) else ()
    scoring = scoring_roles(config) if config.preference is None else ()
    return (*trained_roles(config), *ref, *scoring)


def count_together(config: Config) -> int:
    """Answers that a micro-batch must hold together: 2 for a loss that compares pairs."""
    preference = config.preference
    return 2 if preference is not None and PREFERENCES[preference.loss.value].is_pairwise else 1
