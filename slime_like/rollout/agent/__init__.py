"""Agents that use the OpenAI chat completions API: an endpoint on loopback that records sampled tokens."""
