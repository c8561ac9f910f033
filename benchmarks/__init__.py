"""Benchmarks. The docstring of a script shows its command; the pages that scripts write are in docs/measurements."""
