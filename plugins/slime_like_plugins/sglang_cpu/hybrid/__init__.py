"""Torch forms of what SGLang's hybrid models (gated delta nets beside attention) call Triton for.

SGLang's backends, state pools and models are used unchanged; only leaf functions are replaced, in a worker, after the
model was loaded. Layouts are SGLang's: convolution states [slots, D, W - 1], delta rule states [slots, HV, V, K].
"""
