"""Describe an operator: whether it is a view, what it reads and writes, its cost, its workspace.

- FLOPs count matrix products and attention, 2 a multiply-add. Attention has two products in forward
  and five in backward, which computes the scores again. Causal attention skips the masked half of
  each product.
- Bytes count each tensor that an operator takes or returns once. Views cost nothing. Allocated
  memory costs nothing until it is written. A lookup reads the rows that it finds, not its table.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of matrix products
# operator -> name of the argument that is the left factor of its product
LEFT_MATRIX_ARGUMENT = {
    "mm": "self",
    "bmm": "self",
    "addmm": "mat1",
    "addmm_": "mat1",
    "baddbmm": "batch1",
}
# operators that allocate memory and do not write it
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Operators that write their argument without reading its old values.
WRITE_ONLY_OPS = {"copy_", "fill_", "zero_", "normal_"}
# Arguments that torch declares as written. The operator only reads them, without a GradScaler.
ONLY_READ = {("_fused_adamw_", "grads")}
# Arguments of which an operator touches only some elements: as many as it looks up, or adds.
TABLES = {
    ("embedding", "weight"), ("gather", "self"), ("index_select", "self"), ("index", "self"),
    ("scatter_", "self"), ("index_add_", "self"),
}  # fmt: skip
ATTENTION = ("attention", "attention_backward")  # one name for the operators of all devices


class SchemaArgument(NamedTuple):
    """An argument in an operator's schema."""

    name: str
    is_read: bool
    is_written: bool
    is_table: bool  # only some elements are touched: see TABLES


class Signature(NamedTuple):
    """The facts of a schema that the planner needs."""

    name: str  # "addmm"
    parameters: tuple[SchemaArgument, ...]
    is_view: bool  # returns its arguments, and changes none of them


@cache
def signature(operator: Any) -> Signature:
    """Return the signature of an operator's overload, such as torch.ops.aten.addmm.default."""
    name, schema = operator.overloadpacket.__name__, operator._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    # `_unsafe_view` is a view, though torch declares that it is none.
    returns_arguments = any(result.alias_info is not None for result in schema.returns)
    returns_arguments |= operator.overloadpacket is torch.ops.aten._unsafe_view
    parameters = tuple(
        SchemaArgument(
            a.name,
            is_read=not (is_written and (a.is_out or name in WRITE_ONLY_OPS)),
            is_written=is_written and (name, a.name) not in ONLY_READ,
            is_table=(name, a.name) in TABLES,
        )
        for a, is_written in zip(schema.arguments, written, strict=True)
    )
    return Signature(canonical_name(name), parameters, returns_arguments and not any(written))


def canonical_name(name: str) -> str:
    """Return an operator's name, with one name for attention on all devices.

    A mark of a profiler is no operator: "".
    """
    if name.startswith("_scaled_dot_product_"):
        return ATTENTION["backward" in name]
    return "" if name.startswith("_record") else name


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result: a tensor, or a flat list that has some."""
    if isinstance(argument, list | tuple):
        return [tensor for tensor in argument if isinstance(tensor, Tensor)]
    return [argument] if isinstance(argument, Tensor) else []


def precision_of(name: str, inputs: dict[str, Any]) -> int:
    """Return the dtype of an operator's matrix products, an index into PRECISIONS; else 0.

    `inputs`: the operator's arguments, by name.
    """
    left = inputs.get("query", inputs.get(LEFT_MATRIX_ARGUMENT.get(name, "")))
    precision = left.dtype if isinstance(left, Tensor) else torch.float32
    return PRECISIONS.index(precision) if precision in PRECISIONS else 0


def count_flops(name: str, inputs: dict[str, Any], results: list[Tensor]) -> float:
    """Return the FLOPs of an operator's matrix products, 2 a multiply-add; 0 if it has none.

    `inputs`: the operator's arguments, by name.
    """
    if name in LEFT_MATRIX_ARGUMENT:
        return 2 * results[0].numel() * inputs[LEFT_MATRIX_ARGUMENT[name]].size(-1)
    if name in ATTENTION:
        B, H, T, D = inputs["query"].shape
        products = 5 if "backward" in name else 2
        unmasked_share = 0.5 if inputs.get("is_causal") else 1  # torch omits defaults
        return unmasked_share * products * 2 * B * H * T * inputs["key"].size(2) * D
    return 0


# ---- workspaces of GPU kernels: memory beside their inputs and results. Fake CPU tensors cannot
# show it, so it follows the kernels' sources. (Left out: docs/evidence.md, "Not counted".)


def cublas_workspace_bytes() -> int:
    """Return the bytes of cuBLAS's two workspaces, which exist from the first matmul on.

    The thread that runs forward has one, and autograd's thread has one.

    Source: `getChosenWorkspaceSize` in PyTorch's CublasHandlePool.cpp. Each has 2 x 4,096 KiB +
    8 x 16 KiB; 32 MiB on Hopper and Blackwell. AMD: 32 MiB, on MI300 and MI350 128 MiB; and 76 MiB
    for hipBLASLt, which has a workspace of its own. On a machine without a GPU the result is that
    of older GPUs of NVIDIA.
    """
    gpu = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    if gpu and torch.version.hip:
        large = gpu.gcnArchName.startswith(("gfx94", "gfx95"))
        return 2 * ((128 if large else 32) + 76) * 2**20
    return 2 * (2**25 if gpu and gpu.major in (9, 10, 12) else 8320 * 1024)


def kernel_workspace_bytes(operator: Any, args: tuple) -> int:
    """Return the bytes that a GPU's kernel for this CPU operator takes only while it runs.

    Only the backward of fused attention counts. It sums the gradient of q in float32, and keeps
    one float32 for each row: `dq_accum` and `softmax_d` of FlashAttention-2 (Dao, 2023). T is
    rounded up to a multiple of 128, the size of a head to a multiple of 32. For float32 tensors
    there is no such kernel. (From torch 2.11 on H100 and B200 use cuDNN's kernel, which is not
    planned.)
    """
    if operator is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    q = args[1]  # (B, H, T, D)
    if q.dtype == torch.float32:
        return 0
    B, H, T, D = q.shape
    return 4 * B * H * (T + -T % 128) * (D + -D % 32 + 1)
