"""Trace of one trainer rank on a phantom GPU: its calls, memory and host synchronisations. Tensor values are meaningless."""
