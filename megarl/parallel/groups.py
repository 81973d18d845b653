"""Process groups of the roles: from `Topology` to Megatron's `ProcessGroupCollection`.

`torch.distributed.new_group` must be called by every rank of the world, for the same groups in the same order.
`build_groups` does so for one role; roles whose grids share a group of ranks share the process group too, through
the `GroupCache` that the caller holds. A rank outside the role takes part in the making and gets None.
"""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl import device
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
    finalisation are given. Tensors travel between stages over a group for each direction, to higher stages (`up_pp`)
    and to lower ones (`down_pp`): NCCL runs the transfers of one group and pair of ranks in order, and one waiting for
    its peer must not hold up the other direction. A transfer that takes longer than `timeout_s` ends the job.
    """

    topology: Topology
    at: Coordinates
    collection: ProcessGroupCollection
    everyone: dist.ProcessGroup
    up_pp: dist.ProcessGroup
    down_pp: dist.ProcessGroup
    timeout_s: float

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of the model that this rank runs."""
        return self.topology.chunks_of(self.at.pp)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank runs the model's beginning."""
        return self.at.pp == self.topology.first_stage

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank runs the model's end."""
        return self.at.pp == self.topology.last_stage

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
    make("up_pp", topology.groups("pp"), "up")
    make("down_pp", topology.groups("pp"), "down")
    make("dp", topology.groups("dp"))
    make("mp", topology.groups("tp", "pp"))
    make("tp_dp", topology.groups("tp", "dp"))
    make("everyone", topology.groups("tp", "dp", "pp"))
    make("alone", [(each,) for each in topology.ranks])
    pipelines = topology.groups("pp")
    ends = sorted({topology.first_stage, topology.last_stage})
    make("embd", [tuple(ranks[stage] for stage in ends) for ranks in pipelines])
    make("pos_embd", [(ranks[topology.first_stage],) for ranks in pipelines])
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
    groups = RoleGroups(
        topology=topology,
        at=topology.coordinates(rank),
        collection=collection,
        everyone=mine["everyone"],
        up_pp=mine["up_pp"],
        down_pp=mine["down_pp"],
        timeout_s=cache.timeout_s,
    )
    _open_channels(groups)
    return groups


def _open_channels(groups: RoleGroups) -> None:
    """Sends one number through every channel that the chunks use, pair by pair in the same order on all ranks.

    NCCL connects two ranks at their first transfer, and both wait there: in the middle of a schedule, where each may
    first talk to another, they would wait for ever.
    """
    stages, own = groups.topology.chunk_stages, groups.at.pp
    for one, other in sorted({(min(pair), max(pair)) for pair in itertools.pairwise(stages) if pair[0] != pair[1]}):
        for source, target, group in ((one, other, groups.up_pp), (other, one, groups.down_pp)):
            token = torch.zeros(1, device=device.device())
            if own == source:
                dist.send(token, dst=groups.peer(target), group=group)
            elif own == target:
                dist.recv(token, src=groups.peer(source), group=group)
