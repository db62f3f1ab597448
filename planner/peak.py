"""The peak of a training step as a formula: a walk through the step, part by part.

`closed_form` (planner/formulas.py) has the parts of a step; they are not all there at once, since
gradients come while activations go. So this adds up, in the order of a step, what is born and what
dies, at the instants at which most is alive: in the head, in which forward ends; in each block's
backward, the last block first; in the optimizer. The peak is the largest of those sums.

`Planner` counts every tensor of a simulated step, and takes seconds; this takes no time:
docs/calculator.js has it, line by line, in JavaScript. How far it is from `Planner`:
docs/planning.md, "The calculator".

Letters as in formulas.py. a = 2 is the size of an activation under autocast, else a = 4. A block:

    name      what it makes                                      there until the backward of
    x         4 N C, its input                                   ln_1
    ln_1      a N C, and mean and deviation 8 N                  c_attn
    qkv       3 a N C                                            attention
    attended  a N C, and the softmax's normaliser 4 N H          attention
    x2        4 N C, x after attention's half                    ln_2
    ln_2      a N C, and mean and deviation 8 N                  c_fc
    wide      a N F, what c_fc returns                           GELU
    gelu      a N F                                              mlp.c_proj

Under autocast each input of a linear layer comes with a copy of the layer's weight, 2 an element;
`proj` is that of attention's c_proj, whose input is `attended`. `mask` is dropout's, N C.
"""

import math

import torch

from memory.head import SLICE
from model import MiniGPTConfig

from .formulas import closed_form, head_bytes
from .timeline import KINDS

WORKSPACES = 2 * 8320 * 1024  # of cuBLAS: see planner/kernels.py
AT_A_TIME, LANES = 2**22, 64  # elements that LeanOptimizer copies: see trainer/optimizer.py

# What a policy keeps of each block beside x; backward makes the rest again, in this order.
ATTENTION, MLP = ("ln_1", "qkv", "attended", "proj", "mask"), ("x2", "ln_2", "wide", "gelu")
KEPT: dict[str, tuple[str, ...]] = {
    "none": ATTENTION + MLP,
    "cheap": ("qkv", "attended", "proj", "mask", "x2", "wide"),
    "selective": ("qkv", "attended", "wide"),  # and the results of both c_proj
    "mlp": (*ATTENTION, "x2"),
    "attn": ("mask", *MLP),
    "sdpa": ("attended",),
    "full": (),
}


def peak(
    config: MiniGPTConfig,
    batch_size: int,
    seq_len: int,
    precision: torch.dtype,
    optimizer: str = "adamw",
    moments: torch.dtype = torch.float32,
    *,
    ddp: bool = False,
    shards: int = 1,
) -> tuple[str, dict[str, int]]:
    """Where the peak of a training step stands, "head" or "backward, block 11", and of how many
    bytes of each of KINDS it is made.

    Of a GPU of NVIDIA's. (Without dropout a CPU takes what it does without its kernels' own memory;
    with dropout, and on Apple's chips, attention keeps its scores.) `ddp` and `shards`: as in
    `Planner`. Raises ValueError for what it has no formula for, groups of blocks and offload.
    """
    if config.recompute_group > 1 or config.offload_activations:
        raise ValueError("no formula for recompute_group, nor for offload_activations")
    walk = Walk(config, batch_size, seq_len, precision, ddp, shards)
    policies = [config.recompute] * config.n_recomputed
    policies += [config.recompute_rest] * (config.n_layers - config.n_recomputed)
    form = closed_form(config, batch_size, seq_len, precision)
    walk.state(optimizer, moments.itemsize)
    walk.forward(form["blocks"])
    walk.head(policies[-1])
    for i in reversed(range(config.n_layers)):
        walk.block(i, policies[i])
    walk.embeddings()
    walk.update(optimizer, moments.itemsize)
    return walk.where, walk.most


class Walk:
    """What is alive `now`, bytes by kind; and `where`, in this step, that was the `most`."""

    def __init__(
        self,
        config: MiniGPTConfig,
        batch_size: int,
        seq_len: int,
        precision: torch.dtype,
        ddp: bool,
        shards: int,
    ):
        C, F, H = config.d_model, config.d_ff, config.n_heads
        self.config, self.precision, self.ddp, self.n = config, precision, ddp, shards
        self.N, self.C, self.F = batch_size * seq_len, C, F
        self.rows_outside = config.vocab_size, config.max_position_embeddings
        self.amp, self.dropout = precision != torch.float32, config.dropout > 0
        self.a = 2 if self.amp else 4
        self.now = dict.fromkeys(KINDS, 0)
        self.most, self.where, self.place = dict(self.now), "", "head"

        N, a, copies = self.N, self.a, 2 * self.amp  # (bytes of a weight's copy)
        self.sizes = {
            "ln_1": a * N * C + 8 * N + copies * 3 * C * C,
            "qkv": 3 * a * N * C,
            "attended": a * N * C + 4 * N * H,
            "proj": copies * C * C,
            "mask": N * C * self.dropout,
            "x2": 4 * N * C,
            "ln_2": a * N * C + 8 * N + copies * C * F,
            "wide": a * N * F,
            "gelu": a * N * F + copies * C * F,
        }
        # What kernels work in, all the time and in attention's backward: see planner/kernels.py
        self.in_attention = 0
        if self.amp:
            T, D = seq_len + -seq_len % 128, C // H + -(C // H) % 32
            self.in_attention = 4 * batch_size * H * T * (D + 1)

    def born(self, kind: str, size: int) -> None:
        self.now[kind] += size
        if sum(self.now.values()) > sum(self.most.values()):
            self.most, self.where = dict(self.now), self.place

    def dies(self, kind: str, size: int) -> None:
        self.now[kind] -= size

    # ---- the parts of a step, in order

    def state(self, optimizer: str, itemsize: int) -> None:
        """Weights, moments, and a step count of 4 for each tensor; as optimizer_bytes has it, but
        of one process's shards."""
        L, n = self.config.n_layers, self.n
        held = L * self.in_a_block(n) + self.outside(n)
        stored, counters = 2 * held, 4 + 12 * L
        if optimizer == "muon":
            stored, counters = stored - L * self.in_matrices(n), counters - 4 * L
        self.born("parameters", 4 * held)
        self.born("optimizer", itemsize * stored + 4 * counters)
        self.born("gradients", 4 * held * self.ddp)

    def forward(self, blocks: int) -> None:
        """What it leaves; blocks: what they keep, as closed_form has it."""
        N, C = self.N, self.C
        self.born("temporaries", WORKSPACES)
        # Ids and labels; the embeddings' mask; what comes out of the blocks, and ln_f's statistics.
        self.born("activations", 16 * N + self.sizes["mask"] + 4 * N * C + 8 * N + blocks)
        if self.n > 1:  # the root's weights are whole; and the last block's buffer is still there
            self.born("parameters", 4 * self.outside(1) + 4 * self.n * self.in_a_block(self.n))

    def head(self, policy: str) -> None:
        """Forward and backward; `policy`: of the last block."""
        N, C, a, V = self.N, self.C, self.a, self.config.vocab_size
        of_weight, of_x = 4 * V * C, 4 * N * C  # gradients
        kind = "head" if self.ddp else "gradients"
        size = head_bytes(self.config, N, self.precision)
        # What the last block returned, unless the policy keeps it anyway; what ln_f did.
        returned, normed = a * N * C * (policy != "selective"), 4 * N * C
        self.born("temporaries", returned + normed)
        if self.config.loss_chunks == 1:
            self.born("head", size - 4 * V * N)
            self.dies("temporaries", returned + normed * self.amp)  # (there is a copy of it then)
            self.born("head", 4 * V * N)  # backward begins
            # In the end the logits' gradient, the weight's and x's.
            end = a * V * N + 2 * self.amp * V * C + 2 * a * N * C
            self.dies("head", size)
            self.born("head", end)
            self.born(kind, of_weight)
            self.dies("temporaries", normed * (not self.amp))
        else:
            end = size - of_weight
            self.born(kind, of_weight)
            self.born("head", end)
            self.dies("temporaries", returned + normed)
        self.dies("head", end - of_x)
        self.place = f"backward, block {self.config.n_layers - 1}"
        self.born("temporaries", of_x)  # ln_f's backward, of the gradient of its result
        self.dies("head", of_x)
        self.dies("activations", 4 * N * C + 8 * N)

    def block(self, i: int, policy: str) -> None:
        """Its backward, from its end; the gradient of what it returned is there, 4 N C."""
        N, C, F, a = self.N, self.C, self.F, self.a
        self.place, self.policy = f"backward, block {i}", policy
        self.there = dict.fromkeys(KEPT[policy], "activations")

        of_update = self.enter_half()
        self.dies("activations", self.sizes["mask"])
        self.gather(i)
        self.need("wide", "gelu")
        self.linear(F, C, of_update)  # mlp.c_proj
        self.gone("gelu")
        self.weight(C * F)
        self.born("temporaries", a * N * F)  # GELU
        self.gone("wide")
        self.dies("temporaries", a * N * F)
        self.need("ln_2")
        self.linear(C, F, a * N * F)  # c_fc
        self.gone("ln_2")
        self.layer_norm(C * F)
        self.gone("x2")

        of_update = self.enter_half()
        self.gone("mask")
        self.need("qkv", "attended")
        self.linear(C, C, of_update)  # attn.c_proj
        self.gone("proj")
        self.weight(C * C)
        self.born("temporaries", 3 * a * N * C + self.in_attention)  # of q, k and v
        self.gone("qkv", "attended")
        self.dies("temporaries", a * N * C + self.in_attention)
        self.born("temporaries", 3 * a * N * C)  # of all three, side by side
        self.dies("temporaries", 3 * a * N * C)
        self.need("ln_1")
        self.linear(C, 3 * C, 3 * a * N * C)  # c_attn
        self.gone("ln_1")
        self.layer_norm(3 * C * C)
        self.dies("activations", 4 * N * C + a * N * C * (policy == "selective"))  # x; a result
        self.born("gradients", 4 * (9 * C + F) * (not self.ddp))  # of biases and gains
        self.reduce(i)

    def embeddings(self) -> None:
        """Backward of what comes before the blocks: the rest of the gradients."""
        N, C = self.N, self.C
        V, T_max = self.rows_outside
        self.born("temporaries", 4 * N * C * self.dropout)
        self.dies("temporaries", 4 * N * C * self.dropout)
        self.dies("activations", self.sizes["mask"])
        self.born("gradients", 4 * (T_max * C + 2 * C) * (not self.ddp))
        channels = math.ceil(C / math.ceil(V * C / (2 * SLICE)))  # at a time: see TiedLookup
        self.born("temporaries", 4 * V * channels)
        self.dies("temporaries", 4 * V * channels + 4 * N * C)
        self.dies("head", 4 * V * C * self.ddp)
        if self.n > 1:
            root, share = 4 * self.outside(1), 4 * self.outside(self.n)
            self.dies("parameters", root)
            self.dies("gradients", 4 * self.n * self.in_a_block(self.n))  # block 0's buffer
            self.born("gradients", self.n * share)
            self.dies("gradients", self.n * share + root - share)

    def update(self, optimizer: str, itemsize: int) -> None:
        """The gradients' norm, and what the optimizer copies, some parameters at a time."""
        L, n, muon, lean = self.config.n_layers, self.n, optimizer == "muon", itemsize < 4
        matrices = self.matrices(n)
        tables = [math.ceil(rows / n) * self.C for rows in self.rows_outside]
        sizes = [rows * columns for rows, columns in matrices]
        self.place, most = "optimizer", 0
        if muon or lean or n > 1:
            most = most_copied(tables + sizes * L * (not muon), lean)
        for rows, columns in matrices if muon else ():
            alike = L * matrices.count((rows, columns))
            together = min(alike, max(1, AT_A_TIME // (rows * columns)))
            size, square = together * rows * columns, together * min(rows, columns) ** 2
            # `look_ahead`: gradients, momenta and a mean of both, 4 each; that in bfloat16, 2. In
            # float32 `orthogonalize` may need more: what it gets and makes, 4 each, and 3 squares
            # of the small side, or 5 in `product_of_factors`.
            products = 8 * size + (20 if size > square else 12) * square
            low = self.precision == torch.bfloat16
            most = max(most, 14 * size if low else max(12 * size, products))
        # For the gradients' norm: norms of rows, those beside all vectors, that in float64.
        rows = sum(tables) // self.C + L * sum(rows for rows, _ in matrices)
        vectors = L * (self.in_a_block(n) - self.in_matrices(n)) + 2 * math.ceil(self.C / n)
        self.born("temporaries", max(most, 4 * rows + 12 * (rows + vectors)))

    # ---- the parts of a block's backward

    def enter_half(self) -> int:
        """The gradient of what a half adds to x; without autocast and dropout it is x's own."""
        size = self.a * self.N * self.C * (self.amp or self.dropout)
        self.born("temporaries", size * (2 if self.amp and self.dropout else 1))
        self.dies("temporaries", size * (self.amp and self.dropout))
        return size

    def need(self, *names: str) -> None:
        """Replay, if one of them is not there: all that is not; `cheap` just that."""
        missing = [name for name in ATTENTION + MLP if name not in self.there]
        if self.policy == "cheap":
            missing = [name for name in missing if name in names]
        if not set(missing) & set(names):
            return
        if self.policy == "selective":  # x2 is made of a result that was kept
            self.dies("activations", self.a * self.N * self.C)
        for name in missing:
            self.there[name] = "recomputed"
            self.born("recomputed", self.sizes[name])
        if self.amp:  # what a LayerNorm returned, in float32, stays until the replay is over
            self.born("recomputed", 4 * self.N * self.C)
            self.dies("recomputed", 4 * self.N * self.C)

    def gone(self, *names: str) -> None:
        for name in names:
            self.dies(self.there[name], self.sizes[name])

    def linear(self, columns: int, rows: int, of_result: int) -> None:
        """The gradients of its input and of its weight are made, that of its result goes."""
        self.born("temporaries", self.a * self.N * columns)
        kind = "temporaries" if self.amp or self.ddp else "gradients"
        self.born(kind, self.a * columns * rows)
        self.dies("temporaries", of_result)

    def weight(self, elements: int) -> None:
        """The gradient of a weight, in float32; in DDP it is added to what is there."""
        if self.amp:
            self.born("temporaries" if self.ddp else "gradients", 4 * elements)
            self.dies("temporaries", 2 * elements)
        self.dies("temporaries", 4 * elements * self.ddp)

    def layer_norm(self, elements: int) -> None:
        """Its backward, after `weight` of the linear layer that follows it."""
        wide = 4 * self.N * self.C
        if self.amp:
            self.born("temporaries", wide)
            self.dies("temporaries", wide // 2)
        self.weight(elements)
        self.born("temporaries", wide)
        self.dies("temporaries", 2 * wide)

    # ---- shards: what planner/shards.py says

    def gather(self, i: int) -> None:
        """The block's weights are copied out of their buffer; the next one's takes its place."""
        if self.n > 1:
            self.born("parameters", 4 * self.in_a_block(1))
            self.dies("parameters", 4 * self.n * self.in_a_block(self.n) * (i == 0))

    def reduce(self, i: int) -> None:
        """Its weights go; its gradients to a buffer, in the last one's place; a share stays."""
        if self.n > 1:
            whole, share = 4 * self.in_a_block(1), 4 * self.in_a_block(self.n)
            self.dies("parameters", whole)
            self.born("gradients", self.n * share * (i == self.config.n_layers - 1))
            self.dies("gradients", whole - share)

    # ---- elements that one of n processes has, of each weight an n-th of the rows, rounded up

    def matrices(self, n: int) -> list[tuple[int, int]]:
        """(rows, columns) of a block's: c_attn, c_proj, c_fc, mlp.c_proj."""
        C, F = self.C, self.F
        whole = [(3 * C, C), (C, C), (F, C), (C, F)]
        return [(math.ceil(rows / n), columns) for rows, columns in whole]

    def in_matrices(self, n: int) -> int:
        return sum(rows * columns for rows, columns in self.matrices(n))

    def in_a_block(self, n: int) -> int:
        vectors = math.ceil(3 * self.C / n) + math.ceil(self.F / n) + 6 * math.ceil(self.C / n)
        return self.in_matrices(n) + vectors

    def outside(self, n: int) -> int:
        rows = sum(math.ceil(rows / n) for rows in self.rows_outside)
        return rows * self.C + 2 * math.ceil(self.C / n)


def most_copied(sizes: list[int], lean: bool) -> int:
    """Bytes that AdamW in LeanOptimizer copies of tensors that have `sizes` elements, in order.

    `lean`: both moments, to float32. Of a piece that is no multiple of LANES it copies and pads all
    four, weights and gradients too; and the last one twice, if it is lean.
    """
    plain, padded = (8, 20) if lean else (0, 16)  # bytes an element
    most = copied = room = 0
    for size in sizes:
        for begin in range(0, size, AT_A_TIME):
            piece = min(size - begin, AT_A_TIME)
            if piece > room:
                copied, room = 0, AT_A_TIME
            copied += piece * (padded if piece % LANES else plain)
            room -= piece
            most = max(most, copied)
    return most
