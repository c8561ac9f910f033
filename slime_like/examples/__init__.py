"""Generate functions to copy from: ``rollout.generate=slime_like.examples.<module>:<function>``."""
