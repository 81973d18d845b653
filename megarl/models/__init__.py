"""Megatron models of packed sequences, and the layout that ties them to Hugging Face checkpoints."""
