"""The mathematics of the algorithms: advantages, KL, weights of the loss, losses, objectives.

Pure functions on packed tensors that import torch only. Every vector over tokens is [T]; `mask` is True where the
policy produced the token; what lies under a False is never read, even when it holds NaN.
"""
