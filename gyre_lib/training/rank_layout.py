"""Where one training process stands: its cell, and its tensor, pipeline and data-parallel place inside it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Global rank = cell * ranks_per_cell + shard; inside a cell tensor ranks are innermost, then data, then pipeline stages.

    `tp`, `pp`, `dp` are sizes; `cells` is K, the same on every rank. `ep` is 1, or tp: the tensor ranks then share out whole experts.
    """

    cell: int
    cells: int
    shard: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def ranks_per_cell(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def rank(self) -> int:
        return self.cell * self.ranks_per_cell + self.shard

    @property
    def world(self) -> int:
        return self.cells * self.ranks_per_cell

    @property
    def tensor_rank(self) -> int:
        return self.shard % self.tp

    @property
    def data_rank(self) -> int:
        return self.shard // self.tp % self.dp

    @property
    def stage(self) -> int:
        return self.shard // (self.tp * self.dp)

    @property
    def is_core(self) -> bool:
        return self.cell == 0

    @property
    def is_leader(self) -> bool:
        """The cell's first rank: it claims micro-steps and speaks for the cell."""
        return self.shard == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1

    def shard_of(self, tensor_rank: int, data_rank: int, stage: int) -> int:
        return (stage * self.dp + data_rank) * self.tp + tensor_rank
