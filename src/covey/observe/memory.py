"""Peak memory of the process and of the CUDA device. Torch is used only where it is already loaded."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    # VmHWM first: ru_maxrss of a process that was started by fork and exec includes the parent's peak.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> bool:
    """Let `peak_rss_bytes` and `peak_cuda_bytes` start anew from what is held now. False where the system cannot."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_cuda_bytes() -> int | None:
    """Largest memory that torch has allocated on the current CUDA device, in bytes; None without torch or CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.max_memory_allocated())


def memory_metrics() -> dict[str, float]:
    """`memory/peak_gb`, and `memory/peak_cuda_gb` where CUDA is in use (GB = 10^9 bytes)."""
    metrics = {"memory/peak_gb": peak_rss_bytes() / 1e9}
    cuda = peak_cuda_bytes()
    if cuda is not None:
        metrics["memory/peak_cuda_gb"] = cuda / 1e9
    return metrics
