"""A GPU that does not exist, for memory, calls and synchronisation of the CUDA path. Values are not checked.

A process started with ``PhantomGpu(...).environment()`` has a library in front of CUDA's runtime, cuBLAS, NCCL and the
driver. torch's CUDA build then runs its dispatcher, caching allocator, streams and NCCL process groups on a machine
without a GPU: peaks, fragmentation, running out of memory, shapes, dtypes, launch configurations, numbers of calls and
host synchronisations equal a GPU's. Kernels, matrix products and collectives compute nothing, so every value is
meaningless, and so is every time.

``python -m slime_like.phantom COMMAND...`` runs a command on one.
"""
