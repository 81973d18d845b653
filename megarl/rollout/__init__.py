"""Prompts in, answers out: data sets (rows), the tokenizer, prompts and their order, and the engines that answer.

Nothing here knows Megatron or the trainer; what leaves is `megarl.records.Prompt` and `Rollout`.
"""
