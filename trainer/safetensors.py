"""The .safetensors format, which holds tensors and nothing that could run.

    8 bytes      length n of the header, little-endian
    n bytes      JSON: {name: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...}
    the rest     the tensors, at those offsets

It is so simple that reading it needs no package, only mistrust. (Format and rules:
https://github.com/huggingface/safetensors.)
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .snapshot import SnapshotError, saving

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; as the format's own library has it


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory: one that is not used is not read.

    They must not be written to. Raises SnapshotError that names the file and what is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    except (OSError, ValueError) as error:  # (ValueError: a name that no file can have)
        reason = getattr(error, "strerror", None) or error
        raise SnapshotError(f"cannot read {path}: {reason}") from None
    n_header = int.from_bytes(data[:8], "little")
    start = 8 + n_header
    if size < 8 or not 2 <= n_header <= min(size - 8, LONGEST_HEADER):
        raise SnapshotError(
            f"{path} is no .safetensors file, or was cut short: {size:,} bytes, of which the "
            f"header would take {n_header:,}"
        )
    try:
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        entries = {name: read_entry(entry) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise SnapshotError(f"{path} is no .safetensors file, or its header is damaged") from None
    # One after the other, without gaps: then no two share a byte, and none is missing.
    expected = start
    for begin, end, _, _ in sorted(entries.values(), key=lambda entry: entry[:2]):
        if begin != expected - start:
            raise SnapshotError(f"{path} is damaged: its tensors overlap, or have gaps between")
        expected = start + end
    if expected != size:
        raise SnapshotError(
            f"{path} was cut short, or has been added to: {size:,} bytes, not {expected:,}"
        )
    return {
        name: torch.frombuffer(
            data, dtype=dtype, count=math.prod(shape), offset=start + begin
        ).view(shape)
        if end > begin
        else torch.empty(shape, dtype=dtype)
        for name, (begin, end, dtype, shape) in entries.items()
    }


def read_entry(entry: dict[str, Any]) -> tuple[int, int, torch.dtype, list[int]]:
    """(begin, end, dtype, shape) of a tensor. Raises ValueError, KeyError or TypeError."""
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError
    if end - begin != math.prod(shape) * dtype.itemsize or math.prod(filter(None, shape)) > 2**60:
        raise ValueError
    return begin, end, dtype, shape


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write them (on the CPU), complete or not at all. Raises SaveError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    with saving(path, end) as temporary:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        os.replace(temporary, path)
