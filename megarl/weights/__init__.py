"""Weights on the move: from and to Hugging Face folders, and from the trainer into the rollout engine.

`hf.py` reads and writes folders, `gather.py` makes whole tensors of a role's shards, `vllm_sync.py` writes them into a
live vLLM model, and `checksum.py` shows that what arrived is what was sent.
"""
