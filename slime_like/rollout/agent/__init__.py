"""Run agents that use the OpenAI chat completions API, with an endpoint on loopback that records the sampled tokens."""
