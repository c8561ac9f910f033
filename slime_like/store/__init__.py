"""Columnar store of the samples of a group while they are sampled."""
