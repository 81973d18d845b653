"""Process groups of the roles: from `Topology` to Megatron's `ProcessGroupCollection`.

`torch.distributed.new_group` must be called by every rank of the world, for the same groups in the same order.
`build_groups` does so for one role; roles whose grids share a group of ranks share the process group too, through
the `GroupCache` that the caller holds. A rank outside the role takes part in the making and gets None.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.parallel.topology import Coordinates, Topology


@dataclass
class GroupCache:
    """The process groups made so far in this job, by their ranks."""

    timeout_s: int
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = field(default_factory=dict)

    def get(self, ranks: tuple[int, ...], purpose: str = "collectives") -> dist.ProcessGroup | None:
        """The group of `ranks` for `purpose`; a collective of the whole world when it is new. None off the group."""
        if (purpose, ranks) not in self.groups:
            made = dist.new_group(
                list(ranks), timeout=datetime.timedelta(seconds=self.timeout_s), use_local_synchronization=False
            )
            self.groups[purpose, ranks] = made if isinstance(made, dist.ProcessGroup) else None
        return self.groups[purpose, ranks]


@dataclass(frozen=True)
class RoleGroups:
    """One rank's place in a role and the groups it belongs to.

    `everyone` holds all ranks of the role; `collection` is what Megatron's models, DDP, optimizer and gradient
    finalisation are given. Activations and gradients travel between stages over a group each (`forward_pp`,
    `backward_pp`): NCCL runs the transfers of one group in order, and one waiting for its peer must not hold up the
    other direction.
    """

    topology: Topology
    at: Coordinates
    collection: ProcessGroupCollection
    everyone: dist.ProcessGroup
    forward_pp: dist.ProcessGroup
    backward_pp: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.topology.pp_size - 1

    def peer(self, stage: int) -> int:
        """The global rank that holds pipeline stage `stage` of this rank's replica."""
        return self.topology.rank_at(tp=self.at.tp, dp=self.at.dp, pp=stage)


def build_groups(topology: Topology, cache: GroupCache) -> RoleGroups | None:
    """Makes every group of a role. A collective: all ranks of the world call it with the same arguments.

    Returns:
        This rank's groups, or None when it is not part of the role.
    """
    rank = dist.get_rank()
    mine: dict[str, dist.ProcessGroup] = {}

    def make(name: str, groups: list[tuple[int, ...]], purpose: str = "collectives") -> None:
        for ranks in groups:
            group = cache.get(ranks, purpose)
            if group is not None and rank in ranks:
                mine[name] = group

    make("tp", topology.groups("tp"))
    make("pp", topology.groups("pp"))
    make("forward_pp", topology.groups("pp"), "forward")
    make("backward_pp", topology.groups("pp"), "backward")
    make("dp", topology.groups("dp"))
    make("mp", topology.groups("tp", "pp"))
    make("tp_dp", topology.groups("tp", "dp"))
    make("everyone", topology.groups("tp", "dp", "pp"))
    make("alone", [(each,) for each in topology.ranks])
    pipelines = topology.groups("pp")
    make("embd", [(ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in pipelines])
    make("pos_embd", [(ranks[0],) for ranks in pipelines])
    if rank not in topology:
        return None

    alone = mine["alone"]
    collection = ProcessGroupCollection(
        tp=mine["tp"],
        pp=mine["pp"],
        mp=mine["mp"],
        embd=mine.get("embd", alone),
        pos_embd=mine.get("pos_embd", alone),
        cp=alone,
        tp_cp=mine["tp"],
        ep=alone,
        expt_tp=mine["tp"],
        tp_ep=mine["tp"],
        tp_ep_pp=mine["mp"],
        tp_dp_cp=mine["tp_dp"],
        dp=mine["dp"],
        dp_cp=mine["dp"],
        expt_dp=mine["dp"],
        intra_dp_cp=mine["dp"],
        intra_expt_dp=mine["dp"],
        inter_dist_opt=alone,
        intra_dist_opt=mine["everyone"],
    )
    return RoleGroups(
        topology=topology,
        at=topology.coordinates(rank),
        collection=collection,
        everyone=mine["everyone"],
        forward_pp=mine["forward_pp"],
        backward_pp=mine["backward_pp"],
    )
