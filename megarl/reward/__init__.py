"""Rewards: the rules that come with megarl, a function of the user's own, and the scoring of a batch of answers.

An answer whose scoring failed is marked as failed and left out of training; it never counts as a reward of zero.
"""
