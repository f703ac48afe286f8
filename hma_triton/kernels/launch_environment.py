"""Which device kernels run on, as tuned launches are keyed by it."""

from __future__ import annotations

from pathlib import Path

import torch
import triton

from hma_triton.tuning import Environment, source_hash

KERNEL_SOURCES = tuple(Path(__file__).parent / name for name in ("block_copy.py", "specialize.py"))
INTERPRETER = "interpreter"


def architecture(device: torch.device) -> str:
    """`sm_90`, `gfx942`, ... of a device; `interpreter` for the CPU."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def versions() -> dict[str, str]:
    """Versions that compiled code depends on."""
    return {"torch": torch.__version__, "triton": triton.__version__}


def environment(device: torch.device) -> Environment:
    """Device, versions and kernel source of this process."""
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    runtime = torch.version.hip or torch.version.cuda or "none"
    return Environment(
        device=name,
        architecture=architecture(device),
        **versions(),
        driver="none" if device.type == "cpu" else runtime,
        kernel_source=source_hash(KERNEL_SOURCES),
    )
