"""Gated DeltaNet of Qwen3-Next and Qwen3.5 for the Megatron actor: the layer and its kernel backends."""
