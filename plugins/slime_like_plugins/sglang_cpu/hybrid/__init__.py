"""Replacements in torch for the Triton kernels of SGLang's hybrid models (Gated DeltaNet and attention).

SGLang's backends, state pools and models are used unchanged; only leaf functions are replaced, in a worker, after the
model is loaded. Layouts are SGLang's: convolution states [slots, D, W - 1], delta rule states [slots, HV, V, K].
"""
