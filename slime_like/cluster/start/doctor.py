"""Check machine and environment (``train.py --doctor``). Every problem is reported with its fix.

The doctor's own process does not import torch; some of the processes that it starts do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TextIO

from slime_like.cluster.start import doctor_machine, doctor_software
from slime_like.cluster.start.doctor_finding import DoctorFinding, Level
from slime_like.printable import visible
from slime_like.util.counted import counted

CHECKS: tuple[Callable[[], Iterator[DoctorFinding]], ...] = (
    doctor_machine.check_system,
    doctor_software.check_versions,
    doctor_machine.check_devices,
    doctor_machine.check_storage,
    doctor_machine.check_limits,
    doctor_machine.check_network,
    doctor_software.check_plugins,
    doctor_software.check_cpu_kernels,
    doctor_software.check_collective,
)


def doctor(out: TextIO) -> int:
    """Write the report to ``out``. Return exit code 1 if something required is missing, else 0."""
    num_missing = 0
    for check in CHECKS:
        for finding in check():
            num_missing += finding.level is Level.MISSING
            fix = f"\n{'':<24}fix: {finding.fix}" if finding.fix else ""
            out.write(visible(f"{finding.level:<8} {finding.subject:<14} {finding.text}{fix}\n"))
            out.flush()
    out.write(
        visible("all requirements are met\n" if not num_missing else f"{counted(num_missing, 'requirement')} not met\n")
    )
    return int(num_missing > 0)
