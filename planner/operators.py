"""Describe an operator: whether it returns a view, the arguments that it reads and writes, its
FLOPs, its workspace on a GPU.

- FLOPs are those of matrix products and attention, 2 per multiply-add. Attention has two products
  in forward, and five in backward, which computes the scores again; causal attention skips the
  masked half of each.
- Bytes are those of the tensors that an operator reads or writes; each tensor counts once. An
  operator that returns a view, or that only allocates memory, moves no bytes. A lookup reads only
  the rows that it returns, not the whole table.
"""

import re
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

MATMUL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of matrix products
# operator -> name of the argument that is the left factor of its matrix product
LEFT_MATRIX_ARGUMENT_BY_OP = {
    "mm": "self",
    "bmm": "self",
    "addmm": "mat1",
    "addmm_": "mat1",
    "baddbmm": "batch1",
    "_grouped_mm": "self",
}
# Operators that allocate memory without writing to it.
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Operators that write their argument without reading its old values.
WRITE_ONLY_OPS = {"copy_", "fill_", "zero_", "normal_"}
# (operator, argument): by torch's schema the operator writes to this argument, but without a
# GradScaler it only reads it.
ONLY_READ_ARGUMENTS = {("_fused_adamw_", "grads")}
# (operator, argument): the operator reads or writes only those elements of the argument that it
# looks up or adds to.
INDEXED_ARGUMENTS = {
    ("embedding", "weight"), ("gather", "self"), ("index_select", "self"), ("index", "self"),
    ("scatter_", "self"), ("index_add_", "self"),
}  # fmt: skip
TORCH_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional")
UNIFIED_ATTENTION_NAMES = ("attention", "attention_backward")  # the same names on all devices


class SchemaArgument(NamedTuple):
    """An argument in an operator's schema."""

    name: str
    is_read: bool
    is_written: bool
    is_table: bool  # only some elements are read or written: see INDEXED_ARGUMENTS


class OperatorSchema(NamedTuple):
    """The facts of an operator's schema that the planner needs."""

    name: str  # "addmm"; of another library than torch: "torchvision::nms"
    parameters: tuple[SchemaArgument, ...]
    is_view: bool  # returns arguments or views of them, and changes none of them


@cache
def operator_schema(operator: Any) -> OperatorSchema:
    """Return the schema of an operator's overload, such as torch.ops.aten.addmm.default."""
    name, schema = operator.overloadpacket.__name__, operator._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    # `_unsafe_view` returns a view, although its schema in torch does not say so.
    returns_arguments = any(result.alias_info is not None for result in schema.returns)
    returns_arguments |= operator.overloadpacket is torch.ops.aten._unsafe_view
    unified_name = unify_attention_name(name)
    if unified_name and operator.namespace not in TORCH_NAMESPACES:
        unified_name = f"{operator.namespace}::{name}"
    parameters = tuple(
        SchemaArgument(
            a.name,
            is_read=not (is_written and (a.is_out or name in WRITE_ONLY_OPS)),
            is_written=is_written and (name, a.name) not in ONLY_READ_ARGUMENTS,
            is_table=(name, a.name) in INDEXED_ARGUMENTS,
        )
        for a, is_written in zip(schema.arguments, written, strict=True)
    )
    return OperatorSchema(unified_name, parameters, returns_arguments and not any(written))


def unify_attention_name(name: str) -> str:
    """Return an operator's name, the same for the attention operators of all devices; "" for the
    marks that torch's profiler sets, which are no operators."""
    if name.startswith("_scaled_dot_product_"):
        return UNIFIED_ATTENTION_NAMES["backward" in name]
    return "" if name.startswith("_record") else name


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result, which is a tensor or a flat list of values."""
    values = argument if isinstance(argument, list | tuple) else [argument]
    return [value for value in values if isinstance(value, Tensor)]


def matmul_dtype_index(name: str, inputs: dict[str, Any]) -> int:
    """Return the dtype of an operator's matrix products, as an index into MATMUL_DTYPES; 0 for an
    operator without matrix products, or with products in another dtype. `inputs`: its arguments, by
    name."""
    argument = LEFT_MATRIX_ARGUMENT_BY_OP.get(name, "weight" if "convolution" in name else "")
    left = inputs.get("query", inputs.get(argument))
    precision = left.dtype if isinstance(left, Tensor) else torch.float32
    return MATMUL_DTYPES.index(precision) if precision in MATMUL_DTYPES else 0


def count_flops(name: str, inputs: dict[str, Any], results: list[Tensor]) -> float:
    """Return the FLOPs of an operator's matrix products, 2 per multiply-add; 0 if it has none.
    `inputs`: its arguments, by name."""
    if name in LEFT_MATRIX_ARGUMENT_BY_OP:
        # The gradient of experts' weights (E, K, N) is a sum over each expert's rows alone.
        n_groups = results[0].size(0) if name == "_grouped_mm" and results[0].dim() == 3 else 1
        return 2 * results[0].numel() / n_groups * inputs[LEFT_MATRIX_ARGUMENT_BY_OP[name]].size(-1)
    if name in ("convolution", "convolution_backward"):
        # Each output (if transposed: each input) is multiplied by the weights of one channel, of
        # shape (channels of the other side / groups, *kernel). Backward has one product for the
        # gradient of the input and one for the gradient of the weight, if they are needed.
        output = inputs.get("grad_output", results[0])
        many = inputs["input"] if inputs["transposed"] else output
        products = sum(inputs.get("output_mask", (True,))[:2])
        return products * 2 * many.numel() * inputs["weight"][0].numel()
    if name in UNIFIED_ATTENTION_NAMES:
        B, H, T, D = inputs["query"].shape
        products = 5 if "backward" in name else 2
        unmasked_share = 0.5 if inputs.get("is_causal") else 1  # absent: False, the default
        return unmasked_share * products * 2 * B * H * T * inputs["key"].size(2) * D
    return 0


# ---- workspaces of GPU kernels
#
# A workspace is memory that a kernel takes beside its inputs and results. Fake tensors on a CPU do
# not show workspaces, so these functions follow the source code of the kernels. (docs/evidence.md
# lists under "Not counted" the workspaces that are left out.)


# Start of a card's name -> MiB of the workspaces of one thread (see `cublas_workspace_bytes`)
WORKSPACE_MIB_BY_CARD = {
    r"(H|GH|B|GB|RTX 50(?=[5-9])|RTX PRO )\d": 32,  # Hopper and Blackwell
    "MI3": 128 + 76,
    "(MI|RX )": 32 + 76,
    "": 2 * 4 + 8 / 64,
}


def cublas_workspace_bytes(card: str | None = None) -> int:
    """Return the bytes of cuBLAS's two workspaces, which exist from the first matmul on: one of the
    thread that runs forward, the other of autograd's thread.

    `card`: name of the planned card; None: this machine's GPU or, without a GPU, one of NVIDIA's
    before Hopper.

    Source: `getChosenWorkspaceSize` in PyTorch's CublasHandlePool.cpp. Each workspace has 32 MiB on
    Hopper and Blackwell, 2 x 4,096 KiB + 8 x 16 KiB on NVIDIA's other GPUs, 128 MiB on MI300 and
    MI350, and 32 MiB on AMD's other GPUs (also on an AMD GPU without a name). On all AMD GPUs, each
    of the two threads has a second workspace of 76 MiB, for hipBLASLt.
    """
    name = card or ""
    if card is None and torch.cuda.is_available():  # (ROCm's major numbers are AMD's)
        is_new = torch.cuda.get_device_properties().major >= 9
        name = "MI" if torch.version.hip else "H100" * is_new
    return int(2 * 2**20 * next(v for k, v in WORKSPACE_MIB_BY_CARD.items() if re.match(k, name)))


def kernel_workspace_bytes(operator: Any, args: tuple) -> int:
    """Return the bytes of workspace that a GPU's kernel takes while it runs.

    `operator`: the CPU operator that simulates this kernel. `args`: its positional arguments.

    Only the backward of fused attention has a workspace here: its kernel sums the gradient of q in
    float32 (`dq_accum` of FlashAttention-2; Dao, 2023), and keeps one float32 value for each row of
    q (`softmax_d`). T is rounded up to a multiple of 128, and the size of a head to a multiple of
    32. There is no such kernel for float32 tensors, and the workspace of cuDNN's kernel, which H100
    and B200 use from torch 2.11 on, is not planned.
    """
    if operator is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    q = args[1]  # (B, H, T, D)
    if q.dtype == torch.float32:
        return 0
    B, H, T, D = q.shape
    return 4 * B * H * (T + -T % 128) * (D + -D % 32 + 1)
