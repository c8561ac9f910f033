"""Megatron layers on a CPU: attention, norms, rotation, SwiGLU, experts and log-probabilities in C, compiled on the machine.

Each kernel except those of the experts' multiplications makes one pass over memory, where torch makes five to ten. With
bfloat16 matrix multiplications, torch's passes take half of a small model's training step. ``layer`` has the parts that
``model.cpu_kernels=c`` puts into the layer specs; ``auto`` is the same as ``c`` if the kernels can be compiled. With
``torch``, and in deterministic runs, this package is not imported.
"""
