"""No test times: hypothesis's own deadline per example is off, as a busy machine would break it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("slime_like", deadline=None)
settings.load_profile("slime_like")
