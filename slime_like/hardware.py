"""Hardware known by name: GPUs with their memory, bandwidth and FLOP/s, and machines with several of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime_like.errors import ConfigError
from slime_like.registry import nearest

CORES_PER_GPU = 8  # assumed if only the GPUs of a machine are known


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One kind of GPU. ``link`` and ``network`` are per direction; ``memory`` is the total that nvidia-smi shows."""

    name: str
    memory: int  # bytes
    hbm: float  # bytes/s
    bf16: float  # dense FLOP/s
    fp8: float  # dense FLOP/s; that of bf16 if the GPU has no FP8
    link: float  # bytes/s to the GPUs of its node
    network: float  # bytes/s to other nodes
    sms: int  # streaming multiprocessors
    capability: tuple[int, int] | None  # compute capability, for example (9, 0); None: unknown
    source: str


def _gpu(
    name: str,
    mib: int,
    chip: tuple[int, int],
    gigabytes: tuple[float, float, float],
    teraflops: tuple[float, float],
    source: str,
) -> GpuKind:
    """Return the entry of a GPU with ``mib`` MiB of memory.

    ``chip``: multiprocessors, compute capability (90: 9.0). ``gigabytes``: GB/s of HBM, link, network. ``teraflops``: BF16,
    FP8.
    """
    hbm, link, network = (1e9 * rate for rate in gigabytes)
    bf16, fp8 = (1e12 * rate for rate in teraflops)
    sms, capability = chip
    return GpuKind(name, mib << 20, hbm, bf16, fp8, link, network, sms, divmod(capability, 10), source)


_H20 = "lmsys.org 2025-09-26 (H20-96G); memory: nvidia-smi; multiprocessors: CUDA's device properties"
_DGX = "NVIDIA data sheet; memory: nvidia-smi; network: one 400 Gb/s adapter per GPU, as in a DGX H100"
_AMPERE = "NVIDIA data sheet; memory: nvidia-smi; network: one 200 Gb/s adapter per GPU, as in a DGX A100"
_CARD = "NVIDIA data sheet; memory: nvidia-smi; links: PCIe 4.0 x16; network: 100 Gb/s"
_CARD_5 = "NVIDIA data sheet; memory: nvidia-smi; links: PCIe 5.0 x16; network: 100 Gb/s"
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H20", 97_871, (78, 90), (4_000, 450, 50), (148, 296), _H20),
        _gpu("H800", 81_559, (132, 90), (3_350, 200, 50), (989, 1_979), _DGX),
        _gpu("H100", 81_559, (132, 90), (3_350, 450, 50), (989, 1_979), _DGX),
        _gpu("H100-NVL", 95_830, (132, 90), (3_900, 300, 50), (835, 1_671), _DGX),
        _gpu("H100-PCIe", 81_559, (114, 90), (2_000, 64, 12.5), (756, 1_513), _CARD_5),
        _gpu("H20-3e", 143_771, (78, 90), (4_800, 450, 50), (148, 296), _DGX),
        _gpu("H200", 143_771, (132, 90), (4_800, 450, 50), (989, 1_979), _DGX),
        _gpu("B200", 183_359, (148, 100), (8_000, 900, 50), (2_250, 4_500), _DGX),
        _gpu("A100", 81_920, (108, 80), (2_039, 300, 25), (312, 312), _AMPERE),
        _gpu("A100-40GB", 40_960, (108, 80), (1_555, 300, 25), (312, 312), _AMPERE),
        _gpu("A100-PCIe", 81_920, (108, 80), (1_935, 32, 12.5), (312, 312), _CARD),
        _gpu("A800", 81_920, (108, 80), (2_039, 200, 25), (312, 312), _AMPERE),
        _gpu("L4", 23_034, (58, 89), (300, 32, 12.5), (121, 242), _CARD),
        _gpu("L40S", 46_068, (142, 89), (864, 32, 12.5), (362, 733), _CARD),
        _gpu("RTX4090", 24_564, (128, 89), (1_008, 32, 12.5), (165, 330), _CARD),
    )
}
# Patterns for the driver's names, which are longer than the table's; the first match counts.
_DRIVER_NAMES = (
    (r"A100.*40GB", "A100-40GB"),
    (r"A100.*PCIe", "A100-PCIe"),
    (r"H100 NVL", "H100-NVL"),
    (r"H100.*PCIe", "H100-PCIe"),
    (r"H20-3e", "H20-3e"),
    (r"RTX 4090", "RTX4090"),
    *((rf"\b{name}\b", name) for name in ("H20", "H800", "H100", "H200", "B200", "A100", "A800", "L40S", "L4")),
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """``nodes`` machines of ``gpus`` GPUs each."""

    gpu: GpuKind
    gpus: int
    nodes: int = 1

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.gpus * self.nodes

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.gpus}x{self.gpu.name}"


def known_gpu(name: str) -> GpuKind | None:
    """Return the GPU that ``GPUS`` or the NVIDIA driver calls ``name``; None if the name is unknown."""
    if name in GPUS:
        return GPUS[name]
    matches = (entry for pattern, entry in _DRIVER_NAMES if re.search(pattern, name, re.IGNORECASE))
    entry = next(matches, None)
    return None if entry is None else GPUS[entry]


def unknown_speed(name: str) -> GpuKind:
    """Return an entry for a GPU that is not in ``GPUS``; its memory and speeds are 0."""
    return GpuKind(name, memory=0, hbm=0, bf16=0, fp8=0, link=0, network=0, sms=0, capability=None, source="the driver")


def parse_hardware(flag: str, text: str) -> Hardware:
    """Parse ``[NODESx]GPUSxNAME`` such as 8xH20 or 4x8xH800.

    Raises ``ConfigError`` naming ``flag`` if ``text`` has another form or the GPU is unknown.
    """
    match = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})x([A-Za-z].*)", text)
    if match is None:
        raise ConfigError(f"{flag} {text}: write [NODESx]GPUSxNAME, for example 8xH20, or 4x8xH800 for four nodes of 8")
    gpu = known_gpu(match[3])
    if gpu is None:
        raise ConfigError(f"{flag} {text}: GPU {match[3]!r} is unknown: {nearest(match[3], GPUS)}")
    return Hardware(gpu, int(match[2]), int(match[1] or 1))
