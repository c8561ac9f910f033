"""Phantom GPU: runs the CUDA path without a GPU and shows its memory, calls and synchronisations, but no values.

A process started with ``PhantomGpu(...).environment()`` loads a library that takes the place of CUDA's runtime, cuBLAS,
NCCL, the driver and NVML. torch's CUDA build then runs its dispatcher, caching allocator, streams and NCCL process groups on
a machine without a GPU: peaks, fragmentation, out-of-memory errors, shapes, dtypes, launch configurations, and the counts of
calls and of host synchronisations are the same as on a GPU. Kernels, matrix multiplications and collectives compute nothing,
so values and times are meaningless.

``python -m slime_like.phantom COMMAND...`` runs a command on phantom GPUs.
"""
