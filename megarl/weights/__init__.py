"""Weights on the move: from and to Hugging Face folders, and from the trainer into the rollout engine."""
