"""Idle shares that formulas give, for equal stages and no cost of transfers. Pure.

P stages, m micro-batches of each model; forward, input gradient and weight gradient cost one each. A lower bound is
reached only with about as many micro-batches as stages or more. Two models run one after the other idle as one does.
"""

from __future__ import annotations


def idle_1f1b(num_stages: int, num_micro_batches: int) -> float:
    """GPipe and one-forward-one-backward alike (Huang et al. 2019, Narayanan et al. 2021)."""
    return _share(num_stages - 1, num_micro_batches)


def idle_interleaved(num_stages: int, num_micro_batches: int, chunks_per_stage: int) -> float:
    """Interleaved 1F1B, micro-batches a multiple of the stages (Narayanan et al. 2021)."""
    return _share(num_stages - 1, chunks_per_stage * num_micro_batches)


def idle_zero_bubble(num_stages: int, num_micro_batches: int) -> float:
    """ZB-H1, which holds no more activations than 1F1B (Qi et al. 2023)."""
    return _share(num_stages - 1, 3 * num_micro_batches)


def idle_bidirectional(num_stages: int, num_micro_batches: int, splits: bool) -> float:
    """Lower bound of two models in opposite directions: the middle stages wait until the first work reaches them."""
    return _share(max(0.0, num_stages / 2 - 1), (6 if splits else 2) * num_micro_batches)


def idle_fused(num_stages: int, num_micro_batches: int) -> float:
    """Lower bound of V and reversed V, weight gradients apart: with half as long chunks, work arrives twice as soon."""
    return _share(max(0.0, num_stages / 2 - 1) / 2, 6 * num_micro_batches)


def idle_stream(num_stages: int, num_micro_batches: int, num_models: int) -> float:
    """Forward passes of several models back to back down the stages, filled and drained once."""
    return _share(num_stages - 1, num_models * num_micro_batches)


def idle_stream_v(num_stages: int, num_micro_batches: int, num_models: int) -> float:
    """Lower bound of forward passes on V and reversed V: filled and drained from both ends."""
    return _share(max(0.0, num_stages / 2 - 1), num_models * num_micro_batches)


def _share(idle: float, work: float) -> float:
    return idle / (work + idle)
