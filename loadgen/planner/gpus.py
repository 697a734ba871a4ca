"""Memory, bandwidth and speed of common GPUs and of their MIG slices, as vendors print them.

Speeds are dense 16-bit tensor operations (half of those printed "with sparsity"). Memory is the
printed GB as 10^9 bytes. A driver shows up to 7 % more; set ``memory_gb`` to use it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from router.config.worker_notation import unknown
from router.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, by the document that prints its figures; units of 10^9 and 10^12."""

    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    source: str
    sliced: bool = False


_WHOLE: Mapping[str, Gpu] = {
    "B200": Gpu(180, 8000, 2250, "NVIDIA Blackwell architecture brief, HGX B200"),
    "H200-SXM": Gpu(141, 4800, 989.5, "NVIDIA H200 data sheet"),
    "H200-NVL": Gpu(141, 4800, 835.5, "NVIDIA H200 data sheet"),
    "H100-SXM": Gpu(80, 3350, 989.5, "NVIDIA H100 data sheet"),
    "H100-NVL": Gpu(94, 3900, 835.5, "NVIDIA H100 data sheet"),
    "H100-PCIe": Gpu(80, 2000, 756.5, "NVIDIA H100 PCIe data sheet"),
    "A100-80GB-SXM": Gpu(80, 2039, 312, "NVIDIA A100 data sheet"),
    "A100-80GB-PCIe": Gpu(80, 1935, 312, "NVIDIA A100 data sheet"),
    "A100-40GB": Gpu(40, 1555, 312, "NVIDIA A100 data sheet"),
    "A30": Gpu(24, 933, 165, "NVIDIA A30 data sheet"),
    "A10": Gpu(24, 600, 125, "NVIDIA A10 data sheet"),
    "A10G": Gpu(24, 600, 70, "NVIDIA A10G data sheet"),
    "L40S": Gpu(48, 864, 362.05, "NVIDIA L40S data sheet"),
    "L40": Gpu(48, 864, 181.05, "NVIDIA L40 data sheet"),
    "L4": Gpu(24, 300, 121, "NVIDIA L4 data sheet"),
    "T4": Gpu(16, 300, 65, "NVIDIA T4 data sheet"),
    "V100-32GB": Gpu(32, 900, 125, "NVIDIA V100 data sheet"),
    "RTX-4090": Gpu(24, 1008, 165.2, "NVIDIA Ada GPU architecture white paper, appendix A"),
    "RTX-3090": Gpu(24, 936, 71, "NVIDIA GA102 architecture white paper, appendix A"),
    "MI300X": Gpu(192, 5300, 1307.4, "AMD Instinct MI300X data sheet"),
    "MI325X": Gpu(256, 6000, 1307.4, "AMD Instinct MI325X data sheet"),
}

# Profiles of each GPU: compute slices, eighths of the memory, GB in the name.
_PROFILES = {
    "A100-40GB": ((1, 1, 5), (2, 2, 10), (3, 4, 20), (4, 4, 20)),
    "A100-80GB-SXM": ((1, 1, 10), (1, 2, 20), (2, 2, 20), (3, 4, 40), (4, 4, 40)),
    "A100-80GB-PCIe": ((1, 1, 10), (1, 2, 20), (2, 2, 20), (3, 4, 40), (4, 4, 40)),
    "H100-SXM": ((1, 1, 10), (1, 2, 20), (2, 2, 20), (3, 4, 40), (4, 4, 40)),
    "H100-PCIe": ((1, 1, 10), (1, 2, 20), (2, 2, 20), (3, 4, 40), (4, 4, 40)),
    "H200-SXM": ((1, 1, 18), (1, 2, 35), (2, 2, 35), (3, 4, 71), (4, 4, 71)),
}
# A100: a slice has 14 of the 108 multiprocessors. Hopper: the guide's "fraction of SMs".
_AMPERE_SLICE, _HOPPER_SLICE = 14 / 108, 1 / 7


def _slices() -> Iterator[tuple[str, Gpu]]:
    for name, profiles in _PROFILES.items():
        whole = _WHOLE[name]
        share = _AMPERE_SLICE if name.startswith("A100") else _HOPPER_SLICE
        for compute, eighths, gb in profiles:
            bandwidth_gb_s = whole.bandwidth_gb_s * eighths / 8
            tflops = round(whole.tflops * compute * share, 1)
            source = f"{whole.source}; NVIDIA MIG User Guide, supported MIG profiles"
            yield f"{name}/{compute}g.{gb}gb", Gpu(gb, bandwidth_gb_s, tflops, source, sliced=True)


GPUS: Mapping[str, Gpu] = {**_WHOLE, **dict(_slices())}


def gpu(name: str) -> Gpu:
    """The preset of that name, case-insensitive; ConfigError names the nearest."""
    found = {known.lower(): preset for known, preset in GPUS.items()}.get(name.lower())
    if found is None:
        problem = unknown("gpu", name, GPUS)
        # A GPU that has several variants, like the H200, is named without one.
        model = name.lower().partition("-")[0].partition("/")[0]
        kinds = [known for known in _WHOLE if known.lower().startswith(f"{model}-")]
        if kinds and "/" not in name:
            problem = f"unknown gpu {name!r}; did you mean {' or '.join(kinds)}?"
        raise ConfigError(
            f"[servers]: {problem} (evenstep plan --list-gpus shows all), or give "
            "memory_gb, bandwidth_gb_s and tflops in place of gpu"
        )
    return found
