"""Who is on the device when: roles step aside for the engines and the engines for the roles, where asked.

    generate        engines; roles are parked
    annotate        weights of all roles; with rollout.free_cache_engine the engines have given their memory back
    update          of the roles that learn: everything; then gradients and optimizer are parked again
    sync            engine weights awake, the actor's weights; then the actor is parked; then the KV cache awake

On a CPU the device's memory is the host's: parking there gives back the gradients' memory and nothing else.
"""

from __future__ import annotations

import dataclasses
import logging

from megarl import device
from megarl.config.schema import Config, Engine
from megarl.trainer.offload import Offload, OffloadOptions
from megarl.trainer.roles import Role

log = logging.getLogger(__name__)


def open_offloads(config: Config, roles: dict[str, Role | None]) -> dict[str, Offload]:
    """What of this rank's roles can be parked, by role."""
    offloads: dict[str, Offload] = {}
    for name, role in roles.items():
        options = read_options(config, name)
        if role is None or options == OffloadOptions():
            continue
        if not device.has_gpu() and (options.params or options.optimizer):
            log.info("%s.offload: weights and optimizer of %s are in host memory already: they stay", name, name)
            options = OffloadOptions(grads=options.grads)
        if name == "actor" and options.params and config.rollout.name is Engine.naive:
            log.info("actor.offload.params: rollout.name=naive answers with the actor's own weights: they stay")
            options = dataclasses.replace(options, params=False)
        if options != OffloadOptions():
            offloads[name] = Offload(role, options)
    return offloads


def read_options(config: Config, name: str) -> OffloadOptions:
    """What the configuration says for a role."""
    if name == "ref":
        return OffloadOptions(params=config.ref.offload_params)
    asked = getattr(config, name).offload
    return OffloadOptions(params=asked.params, grads=asked.grads, optimizer=asked.optimizer)


def make_room_for_engines(offloads: dict[str, Offload], keeps_actor: bool = False) -> None:
    """Parks all roles.

    Args:
        keeps_actor: the actor's weights stay: the transfer to the engines reads them.
    """
    for name, offload in offloads.items():
        offload.leave(keeps_params=keeps_actor and name == "actor")


def bring_weights(offloads: dict[str, Offload]) -> None:
    """Brings the weights of all roles back, for forward passes."""
    for offload in offloads.values():
        offload.return_params()
