"""Benchmarks: each is a script whose docstring shows its command; the pages they write are in docs/measurements."""
