"""Communication groups: those inside a cell, and one set per prefix of the ordered cells (§6).

For K cells there are K-1 prefix sets, for 2..K cells; a set has one group per shard, joining the ranks that hold the same model shard in
those cells. All groups are made once, at start, by every rank in the same order, and live as long as the process: a role change makes
none. Nothing here or later uses the world group, so a dead satellite breaks only the prefixes that contain it.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from gyre_lib.training.rank_layout import RankLayout


@dataclass(frozen=True)
class Groups:
    """This rank's groups. `prefix[p]` joins its shard over cells 0..p-1, present for each p in 2..K that includes its cell."""

    model: ProcessGroupCollection
    """tp, pp, cp, ep and what else megatron-core's layers ask for."""
    forward: dist.ProcessGroup
    """Same ranks as the pipeline group; activations only."""
    backward: dist.ProcessGroup
    """Same ranks as the pipeline group; gradients only. Two groups keep each direction in order without message tags."""
    data: dist.ProcessGroup
    """The cell's data-parallel copies of this shard."""
    copy: dist.ProcessGroup
    """All shards of this rank's data-parallel copy: the whole model once."""
    embedding: dist.ProcessGroup | None
    """First and last stage, on the ranks that hold a tied embedding twice; else None."""
    cell: dist.ProcessGroup
    prefix: dict[int, dist.ProcessGroup]


def build_groups(layout: RankLayout, timeout_s: float) -> Groups:
    """Collective over all ranks of all cells. An operation in a group fails after `timeout_s` without its peers."""
    n, timeout = layout.ranks_per_cell, timedelta(seconds=timeout_s)

    def maybe_mine(members: list[list[int]], name: str) -> dist.ProcessGroup | None:
        """Make one group of shards per list and cell; return the one this rank is in."""
        found: dist.ProcessGroup | None = None
        for cell in range(layout.cells):
            for shards in members:
                ranks = [cell * n + shard for shard in shards]
                group = dist.new_group(ranks, timeout=timeout, group_desc=f"cell{cell}/{name}")
                if layout.rank in ranks:
                    found = group
        return found

    def mine(members: list[list[int]], name: str) -> dist.ProcessGroup:
        """The same where each rank is in one."""
        found = maybe_mine(members, name)
        if found is None:
            raise ValueError(f"rank {layout.rank} is in none of the {name} groups")
        return found

    tensor, data, stages = range(layout.tp), range(layout.dp), range(layout.pp)
    at = layout.shard_of
    pipelines = [[at(t, d, s) for s in stages] for d in data for t in tensor]
    tp = mine([[at(t, d, s) for t in tensor] for s in stages for d in data], "tensor")
    pp = mine(pipelines, "pipeline")
    forward = mine(pipelines, "forward")
    backward = mine(pipelines, "backward")
    dp = mine([[at(t, d, s) for d in data] for s in stages for t in tensor], "data")
    copy = mine([[at(t, d, s) for s in stages for t in tensor] for d in data], "copy")
    ends = maybe_mine([[pipe[0], pipe[-1]] for pipe in pipelines], "embedding") if layout.pp > 1 else None
    cell = mine([list(range(n))], "cell")
    alone = mine([[shard] for shard in range(n)], "alone")
    prefix = {}
    for cells in range(2, layout.cells + 1):
        for shard in range(n):
            ranks = [c * n + shard for c in range(cells)]
            group = dist.new_group(ranks, timeout=timeout, group_desc=f"prefix{cells}/shard{shard}")
            if layout.rank in ranks:
                prefix[cells] = group
    model = ProcessGroupCollection(
        tp=tp, pp=pp, cp=alone, ep=alone, dp=dp, dp_cp=dp, mp=copy, tp_cp=tp, embd=None, pos_embd=None,
        expt_dp=dp, tp_ep_pp=copy, expt_tp=tp, tp_ep=tp, intra_dp_cp=dp, intra_dist_opt=dp,
    )  # fmt: skip
    return Groups(model, forward, backward, dp, copy, ends, cell, prefix)
