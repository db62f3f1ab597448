"""What an operator is, by its schema: a view, what it reads and writes; what it costs; and what a
GPU's kernel for it takes besides.

- FLOPs are those of matrix products and of attention, whose backward forms five products (it
  computes the scores again) to forward's two; of causal attention half are masked, and not done.
- Bytes are those of the tensors that an operator is given and returns, once each. Views cost
  nothing, nor does memory that is asked for and not yet written; a lookup reads what it finds, not
  its table.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)  # of products
LEFT_FACTOR = {"mm": "self", "bmm": "self", "addmm": "mat1", "addmm_": "mat1", "baddbmm": "batch1"}
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Arguments that are written, and whose old values are not read; and one that torch declares as
# written, which is so with a GradScaler only.
OVERWRITTEN = {"copy_", "fill_", "zero_", "normal_"}
ONLY_READ = {("_fused_adamw_", "grads")}
# Arguments of which only some elements are touched: as many as are found, or added.
TABLES = {
    ("embedding", "weight"), ("gather", "self"), ("index_select", "self"), ("index", "self"),
    ("scatter_", "self"), ("index_add_", "self"),
}  # fmt: skip
ATTENTION = ("attention", "attention_backward")  # whatever a device calls them


class SchemaArgument(NamedTuple):
    name: str
    is_read: bool
    is_written: bool
    is_table: bool


class Signature(NamedTuple):
    name: str  # "addmm"
    parameters: tuple[SchemaArgument, ...]
    is_view: bool  # does it return its arguments, and change nothing?


@cache
def signature(operator: Any) -> Signature:
    name, schema = operator.overloadpacket.__name__, operator._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    # (`_unsafe_view` is a view, whatever torch declares.)
    of_arguments = any(result.alias_info is not None for result in schema.returns)
    of_arguments |= operator.overloadpacket is torch.ops.aten._unsafe_view
    parameters = tuple(
        SchemaArgument(
            a.name,
            is_read=not (is_written and (a.is_out or name in OVERWRITTEN)),
            is_written=is_written and (name, a.name) not in ONLY_READ,
            is_table=(name, a.name) in TABLES,
        )
        for a, is_written in zip(schema.arguments, written, strict=True)
    )
    return Signature(canonical_name(name), parameters, of_arguments and not any(written))


def canonical_name(name: str) -> str:
    """Attention has another name on each device. (And a profiler's marks are no operators.)"""
    if name.startswith("_scaled_dot_product_"):
        return ATTENTION["backward" in name]
    return "" if name.startswith("_record") else name


def tensors_in(argument: Any) -> list[Tensor]:
    if isinstance(argument, list | tuple):
        return [tensor for tensor in argument if isinstance(tensor, Tensor)]
    return [argument] if isinstance(argument, Tensor) else []


def precision_of(name: str, inputs: dict[str, Any]) -> int:
    """Of its products: an index into PRECISIONS. `inputs`: its arguments, by name."""
    left = inputs.get("query", inputs.get(LEFT_FACTOR.get(name, "")))
    precision = left.dtype if isinstance(left, Tensor) else torch.float32
    return PRECISIONS.index(precision) if precision in PRECISIONS else 0


def count_flops(name: str, inputs: dict[str, Any], results: list[Tensor]) -> float:
    if name in LEFT_FACTOR:
        return 2 * results[0].numel() * inputs[LEFT_FACTOR[name]].size(-1)
    if name in ATTENTION:
        B, H, T, D = inputs["query"].shape
        products = 5 if "backward" in name else 2
        of_all = 0.5 if inputs.get("is_causal") else 1  # (torch leaves defaults out)
        return of_all * products * 2 * B * H * T * inputs["key"].size(2) * D
    return 0


# ---- what a GPU's kernels take beside what they are given and return. Fake CPU tensors cannot show
# it, so it is from the sources of the kernels. (Left out: docs/evidence.md, "Not counted".)


def cublas_workspace_bytes() -> int:
    """Bytes that cuBLAS works in, from the first matmul on: one workspace for the thread that runs
    forward, one for autograd's.

    Source: `getChosenWorkspaceSize` in PyTorch's CublasHandlePool.cpp: 2 x 4,096 KiB + 8 x 16 KiB,
    32 MiB on Hopper and Blackwell. AMD's GPUs: 32 MiB, 128 on MI300 and MI350; and 76 of hipBLASLt,
    which shares none. (A GPU that is not here is taken for an older one of NVIDIA's.)
    """
    here = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    if here and torch.version.hip:
        large = here.gcnArchName.startswith(("gfx94", "gfx95"))
        return 2 * ((128 if large else 32) + 76) * 2**20
    return 2 * (2**25 if here and here.major in (9, 10, 12) else 8320 * 1024)


def kernel_workspace_bytes(operator: Any, args: tuple) -> int:
    """Bytes that a GPU's kernel for this operator (of a CPU) takes while it runs.

    The backward of fused attention adds the gradient of q up in float32, and keeps a number a row
    (`dq_accum` and `softmax_d` of FlashAttention-2, Dao, 2023; an H100 or B200 takes cuDNN's from
    torch 2.11 on, which is not followed); T is rounded up to a multiple of
    128, the size of a head to one of 32. There is no such kernel for float32.
    """
    if operator is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    q = args[1]  # (B, H, T, D)
    if q.dtype == torch.float32:
        return 0
    B, H, T, D = q.shape
    return 4 * B * H * (T + -T % 128) * (D + -D % 32 + 1)
