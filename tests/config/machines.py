"""Machines to plan for."""

from __future__ import annotations

from slime_like.cluster.plan.machine import Machine

LAPTOP = Machine(0, 4, 16 * 2**30, ())
SERVER = Machine(8, 64, 512 * 2**30, ("H100",) * 8)
