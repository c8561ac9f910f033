"""To copy from: generate functions (``rollout.generate=slime_like.examples.<module>:<function>``) and an agent."""
