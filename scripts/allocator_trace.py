"""What an allocator did, change by change: from the trace that PyTorch's profiler exports.

The profiler's tables have sums only; a peak is found by going through the changes one after the
other. scripts/benchmark_worker.py and studies/memory_timeline.py do.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as a profile names them (c10::DeviceType)


def trace_events(profiler: profile) -> list[dict[str, Any]]:
    """All that was noted, in the order of time. Can be asked once: the profiler forgets it then."""
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return sorted(events, key=lambda event: event.get("ts", 0))


def allocations(events: list[dict[str, Any]], device_type: str) -> list[tuple[float, int]]:
    """(when, bytes) for each tensor that came to be; when it went, once more, with a minus."""
    return [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == DEVICE_TYPES[device_type]
    ]
