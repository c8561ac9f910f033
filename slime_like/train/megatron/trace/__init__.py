"""Trace of one trainer rank on a phantom GPU (``slime_like.phantom``): its calls, memory and host synchronisations.

Kernels compute nothing on a phantom GPU, so tensor values are meaningless.
"""
