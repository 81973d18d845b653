"""megarl: reinforcement-learning post-training of large language models, native to Megatron-Core."""

__version__ = "0.1.0"
