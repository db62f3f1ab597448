"""What a GPU's kernels take beside the tensors that they are given and that they return.

A planner that runs on fake CPU tensors cannot see it, so it stands here, from the sources of the
kernels. What is left out is listed in docs/evidence.md ("Not counted").
"""

from typing import Any

import torch

MIB = 2**20


def workspaces() -> int:
    """Bytes that cuBLAS works in, from the first matmul on: one workspace for the thread that runs
    forward, one for autograd's.

    Source: `getChosenWorkspaceSize` in PyTorch's CublasHandlePool.cpp: 2 x 4,096 KiB + 8 x 16 KiB,
    32 MiB on Hopper and later. (A GPU that is not here is taken for an older one.)
    """
    new = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    return 2 * (32 * MIB if new else 8320 * 1024)


def inside(operator: Any, args: tuple) -> int:
    """Bytes that a GPU's kernel for this operator (of a CPU) takes while it runs.

    The backward of fused attention adds the gradient of q up in float32, and keeps a number a row
    (`dq_accum` and `softmax_d` of FlashAttention-2, Dao, 2023); T is rounded up to a multiple of
    128, the size of a head to one of 32. There is no such kernel for float32.
    """
    if operator is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    q = args[1]  # (B, H, T, D)
    if q.dtype == torch.float32:
        return 0
    B, H, T, D = q.shape
    return 4 * B * H * (T + -T % 128) * (D + -D % 32 + 1)
