"""A role: one model on its own grid, with an optimizer when it learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megarl import device
from megarl.models.build import BuildOptions, build_chunks, named_parameters, named_weights
from megarl.models.layout import Family, HeadKind, ModelSpec, ParamLayout, plan_rank
from megarl.models.packed_gpt import PackedGPT
from megarl.models.registry import read_model_spec
from megarl.parallel.groups import RoleGroups
from megarl.trainer.optim import AdamOptions, LRSchedule, attend_optimizer_build, build_optimizer, wrap_for_training
from megarl.weights.hf import HFFolder, check_folder, load_shard
from megarl.weights.megatron_folder import MegatronFolder
from megarl.weights.source import TensorSource
from megarl.weights.torch_dist import is_checkpoint


@dataclass(frozen=True)
class Training:
    """What a role that learns has more than one that only scores; `chunks` as the role's, in Megatron's DDP.

    `problems`: what this rank found wrong with its gradients in the last backward pass.
    """

    chunks: tuple[DistributedDataParallel, ...]
    optimizer: ChainedOptimizer
    adam: AdamOptions
    schedule: LRSchedule
    problems: list[str] = field(default_factory=list)

    @property
    def model(self) -> DistributedDataParallel:
        """The last chunk; the only one where a stage has one."""
        return self.chunks[-1]


@dataclass(frozen=True)
class Role:
    """One rank's part of a role.

    `chunks`: the parts of the model that this rank runs, first to last (`groups.chunks` numbers them).
    `max_tokens`, `max_sequences` bound a micro-batch; `layouts` says what of the checkpoint this rank holds.
    `num_ids`: token ids from here on take no probability mass: padding of the vocabulary, and rows of a table that is
    larger than the tokenizer, which the sampler never draws either.
    """

    name: str
    groups: RoleGroups
    family: Family
    spec: ModelSpec
    dtype: torch.dtype
    chunks: tuple[PackedGPT, ...]
    layouts: tuple[ParamLayout, ...]
    num_ids: int
    max_tokens: int
    max_sequences: int | None = None
    training: Training | None = None
    head: HeadKind = "policy"

    @property
    def model(self) -> PackedGPT:
        """This rank's last chunk: on the rank that runs the model's end, the one with the head."""
        return self.chunks[-1]

    def runs(self, chunk: int) -> torch.nn.Module:
        """The module to call in a forward pass of this chunk."""
        at = self.groups.chunks.index(chunk)
        return self.chunks[at] if self.training is None else self.training.chunks[at]

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters by layout name, live."""
        return named_weights(self.chunks)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The fp32 gradient buffers of this rank's parameters by layout name, live; for a role that learns."""
        return {name: vars(parameter)["main_grad"] for name, parameter in named_parameters(self.chunks).items()}


def open_weights(model_path: str, family: Family, spec: ModelSpec, head: HeadKind) -> TensorSource:
    """A Hugging Face folder or a Megatron one, checked; raises ValueError where it does not hold this model."""
    if is_checkpoint(Path(model_path)):
        megatron = MegatronFolder(model_path, family, spec)
        if head == "policy" and megatron.head == "value":
            raise ValueError(f"{model_path} holds a critic; a policy needs an output layer")
        return megatron
    source = HFFolder(model_path, family)
    check_folder(source, family, spec, head)
    return source


def build_role(
    name: str,
    groups: RoleGroups | None,
    model_path: str,
    options: BuildOptions,
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    num_ids: int | None = None,
    learns: tuple[AdamOptions, LRSchedule] | None = None,
) -> Role | None:
    """Builds this rank's part of a role and loads its weights; a collective of the world.

    Args:
        name: for messages.
        groups: this rank's place, None outside the role.
        model_path: a Hugging Face folder of a policy, or of a saved critic; or either converted to a Megatron folder.
        options: dtype, kind of head, recomputation.
        max_tokens, max_sequences: bounds of a micro-batch.
        num_ids: ids of the tokenizer; None = as many as the table has rows.
        learns: Adam's options and the learning rate over time, for a role that is trained.

    Returns:
        The role, or None outside it.

    Raises:
        ValueError: the folder does not hold such a model, or the grid does not fit it.
    """
    if groups is None:
        if learns is not None:
            attend_optimizer_build()
        return None
    family, spec = read_model_spec(model_path)
    topology, at = groups.topology, groups.at
    layouts = tuple(plan_rank(family, spec, topology, at.tp, at.pp, options.head))
    source = open_weights(model_path, family, spec, options.head)
    chunks = build_chunks(spec, groups, options)
    load_shard(source, layouts, named_weights(chunks))
    training = None
    if learns is None:
        for chunk in chunks:
            chunk.requires_grad_(False)
            chunk.eval()
    else:
        adam, schedule = learns
        wrapped = tuple(wrap_for_training(chunk, groups) for chunk in chunks)
        training = Training(wrapped, build_optimizer(wrapped, groups, adam, options.dtype), adam, schedule)
    device.release_cached_memory()
    return Role(
        name=name,
        groups=groups,
        family=family,
        spec=spec,
        dtype=options.dtype,
        chunks=chunks,
        layouts=layouts,
        num_ids=min(num_ids or spec.vocab_size, spec.vocab_size),
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        training=training,
        head=options.head,
    )
