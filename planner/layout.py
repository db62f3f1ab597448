"""Which processes of a run share what: weights, sequences, or nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The place of one process among the processes of a run.

    kind   trainer           weights, gradients, moments   each sequence
    one    train_minimal.py  whole                         whole
    ddp    train_ddp.py      whole                         whole
    fsdp   train_fsdp.py     1 / world_size                whole
    sp     train_sp.py       1 / world_size                1 / world_size of the tokens
    """

    kind: str = "one"
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # number of processes on this machine

    @property
    def shard_degree(self) -> int:
        """Number of processes that share weights, gradients and moments."""
        return self.world_size if self.kind in ("fsdp", "sp") else 1

    @property
    def sp_degree(self) -> int:
        """Number of processes that share each sequence."""
        return self.world_size if self.kind == "sp" else 1

    @property
    def replicas(self) -> int:
        """Number of micro-batches that the processes compute at the same time."""
        return self.world_size // self.sp_degree

    @property
    def replica_index(self) -> int:
        """Index of this process's replica, 0 .. replicas - 1."""
        return self.rank // self.sp_degree

    @property
    def gradients_persist(self) -> bool:
        """Whether gradients stay after the update, in DistributedDataParallel's buckets."""
        return self.kind == "ddp"
