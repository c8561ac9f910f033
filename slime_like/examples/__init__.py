"""Examples to copy: generate functions (``rollout.generate=slime_like.examples.<module>:<function>``) and an agent."""
