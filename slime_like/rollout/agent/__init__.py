"""Agents that speak OpenAI's chat completions: an endpoint on loopback that records what it samples."""
