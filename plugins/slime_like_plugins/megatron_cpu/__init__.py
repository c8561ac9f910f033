"""Megatron's layers on a plain CPU: attention, norms, rotation, SwiGLU and log-probabilities as one pass over memory each, in C compiled where it runs.

Once matrix products run in bfloat16, such passes are half of a small model's training step; torch makes five to ten of
each. ``layer`` has the parts that ``model.cpu_kernels`` puts into the layer specs; nothing here is loaded otherwise.
"""
