"""Layers of Megatron on a plain CPU: attention, norms, rotation, SwiGLU and log-probabilities in C, compiled on the machine.

Each kernel is one pass over memory, for which torch needs five to ten. With matrix products in bfloat16, these passes take
half of a small model's training step. ``layer`` has the parts that ``model.cpu_kernels`` puts into the layer specs; with
other settings this package is not imported.
"""
