"""vLLM as the rollout engine, inside the trainer's own processes.

Every rank of the job builds a part of one engine: the world is cut into groups of `topology.tp_size` neighbouring
ranks, each group is one engine with its own scheduler and KV cache, and engines never wait for each other after the
start. With 4 ranks and tp 2:

    engine 0: ranks 0 1      engine 1: ranks 2 3

The ranks of one engine run the same scheduler on the same requests and so take the same decisions; they meet only in
the model's collectives. vLLM cuts the groups itself, always from ranks 0, 1, 2, ... of the whole world, and creating
them takes every rank: so the rollout role must own all ranks in order.

What vLLM does to the process while it starts is undone: random states, the number of threads and `set_num_threads`
itself, and the variables it writes for worker processes that do not exist here.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl import device
from megarl.parallel.topology import Topology
from megarl.records import Prompt, Rollout, Sampling
from megarl.rollout.engine import RolloutEngine, request_seed
from megarl.weights.vllm_sync import (
    check_loadable,
    compute_checksums,
    live_parameters,
    pack_,
    share_parameters_,
    visible_weights,
)

MIN_TEMPERATURE = 0.01  # below it vLLM would silently use another temperature
CPU_BLOCK_TOKENS = 32  # vLLM's 128 on CPUs would keep short prompts from sharing their prefix
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_NAME = "megarl-vllm-"
STALE_AFTER_S = 600.0


def build_vllm_engine(
    model_path: str,
    topology: Topology,
    rank: int,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int = 256,
    kv_cache_gib: float = 1.0,
    gpu_memory_utilization: float = 0.5,
    enforce_eager: bool = True,
    seed: int = 0,
    vocab_limit: int | None = None,
    can_sleep: bool = False,
) -> RolloutEngine:
    """Builds this rank's part of its engine. A collective of the world; needs an initialised process group.

    Only `config.json` is read from the folder: the weights are random until they are written and published, and
    `generate` refuses.

    Args:
        model_path: a Hugging Face folder.
        topology: the rollout role: tp, dp = engines, pp 1, over all ranks in order.
        rank: this process's global rank.
        dtype: of weights, activations and KV cache.
        max_model_len: longest prompt plus answer, in tokens.
        max_num_seqs: answers in flight in one engine.
        kv_cache_gib: size of the KV cache of each rank, on a CPU.
        gpu_memory_utilization: share of the GPU's memory that vLLM may use in all, on a GPU.
        enforce_eager: no compilation and no CUDA graphs.
        seed: vLLM's own; the answers depend on `Sampling.seed` only.
        vocab_limit: token ids from here on are never sampled and take no probability mass: the size of the tokenizer
            where the embedding table is larger. The trainer must mask the same columns. None = the whole table
            (columns that vLLM pads it with are never sampled).
        can_sleep: on a GPU, lets `discard_weights` give the memory of weights and KV cache back (vLLM's sleep mode).

    Raises:
        ValueError: a topology that vLLM cannot serve, or a model whose weights could not be updated.
    """
    check_topology(topology, dist.get_world_size())
    first_variables = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "HF_HUB_OFFLINE")}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    is_quiet = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR") == "ERROR"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # that a CPU has no Triton is no news
    identity = _agree_on_identity()
    options: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": can_sleep}
    if not device.has_gpu():
        options = {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30), "block_size": CPU_BLOCK_TOKENS}
    options["dtype"] = str(dtype).removeprefix("torch.")
    if vocab_limit is not None:
        options |= {
            "logits_processors": [_vocab_limit_processor()],
            "additional_config": {"megarl_vocab_limit": vocab_limit},
        }
    with preserved_process_state(), visible_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        gc.disable()  # thousands of modules: the collector would look at them again and again, a sixth of the start
        from vllm import LLM

        _import_model_class(model_path)
        gc.freeze()
        llm = LLM(
            model=model_path,
            tensor_parallel_size=topology.tp_size,
            distributed_executor_backend=_executor_class(identity, rank),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            enforce_eager=enforce_eager,
            seed=seed,
            load_format="dummy",  # the trainer sends the weights
            skip_tokenizer_init=True,  # tokens in, tokens out
            generation_config="vllm",  # what the folder says about sampling is not asked
            logprobs_mode="processed_logprobs",  # at the sampling temperature, after top-k and top-p
            enable_prefix_caching=True,
            **options,
        )
    # vLLM's own clean-up would run when the engine is collected, and destroy the trainer's process group with its own
    core: Any = llm.llm_engine.engine_core
    core._finalizer.detach()
    for name, value in first_variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if is_quiet:
        logging.getLogger("vllm").setLevel(logging.WARNING)
    dist.barrier()  # every rank has joined its engine's shared memory: the names can go, a killed run leaves nothing
    for file in SHARED_MEMORY.glob(f"*{identity}*"):
        file.unlink(missing_ok=True)
    model = llm.apply_model(lambda model: model)[0]
    check_loadable(model)
    return VLLMEngine(llm, model, max_model_len, enforce_eager, can_sleep and device.has_gpu())


class VLLMEngine:
    """Holds this rank's `vllm.LLM`. Built by `build_vllm_engine`; what the methods do is told in `engine.py`."""

    def __init__(self, llm: Any, model: nn.Module, max_model_len: int, is_eager: bool, can_sleep: bool) -> None:
        self._llm: Any = llm
        self._model: Any = model
        self._max_model_len = max_model_len
        self._is_eager = is_eager
        self._can_sleep = can_sleep
        self._is_asleep = False
        self._version: int | None = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine`. At temperature 0 the log-probabilities are those at temperature 1.

        Every answer is a request of its own with its own seed, so it does not depend on the other requests beyond the
        rounding of the matrix products; answers to one prompt share its prefix through the prefix cache.
        """
        from vllm import SamplingParams

        if self._version is None:
            raise ValueError("the vLLM engine holds no weights: write and publish them before generate")
        _check_request(prompts, sampling, self._max_model_len)
        answers = [(index, sample) for index in range(len(prompts)) for sample in range(sampling.num_answers)]
        params = [
            SamplingParams(
                temperature=sampling.temperature_of(sample),
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                seed=request_seed(sampling.seed, prompts[index].row, sample),
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # stop_token_ids alone end an answer
                logprobs=0,  # the sampled token's only
                detokenize=False,
            )
            for index, sample in answers
        ]
        requests = [{"prompt_token_ids": list(prompts[index].token_ids)} for index, _ in answers]
        with preserved_process_state(), self._compile_stance():
            outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [
            _to_rollout(index, sample, output, self._version)
            for (index, sample), output in zip(answers, outputs, strict=True)
        ]

    def open_weights(self) -> dict[str, Tensor]:
        """See `RolloutEngine`. Wakes the weights, but not the KV cache: the transfer's buffers have that room."""
        self._version = None
        if self._is_asleep:
            self._llm.wake_up(tags=["weights"])
        return live_parameters(self._model)

    def share_weights(self, trained: Mapping[str, Tensor]) -> int:
        """See `RolloutEngine`."""
        if self._can_sleep or not self._is_eager:
            raise ValueError(
                "rollout.share_weights=true: vLLM's sleep mode and CUDA graphs need parameters that stay where they "
                "are; use rollout.enforce_eager=true without sleep mode, or rollout.share_weights=false"
            )
        return share_parameters_(self._model, trained)

    def publish_weights(self, version: int) -> None:
        """See `RolloutEngine`."""
        pack_(self._model)
        if self._is_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        assert self._llm.reset_prefix_cache(), "vLLM kept its prefix cache: requests are still running"
        self._version = version

    def checksums(self) -> dict[str, int]:
        """See `RolloutEngine`. Collective over the ranks of the engine."""
        from vllm.distributed.parallel_state import get_tp_group

        return compute_checksums(self._model, get_tp_group().cpu_group)

    def discard_weights(self) -> None:
        """See `RolloutEngine`. Gives memory back only on a GPU, when built with `can_sleep`."""
        if self._can_sleep and not self._is_asleep:
            self._llm.sleep(level=2)
            self._is_asleep = True
        self._version = None

    def close(self) -> None:
        """See `RolloutEngine`. Another engine can be built afterwards."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        if self._llm is None:
            return
        core = self._llm.llm_engine.engine_core.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        self._llm = self._model = self._version = None
        destroy_model_parallel()
        gc.unfreeze()  # vLLM froze what was alive at its start
        gc.collect()
        device.release_cached_memory()

    def _compile_stance(self) -> contextlib.AbstractContextManager[Any]:
        """Eager also means that vLLM's small compiled functions (token ranks) are not compiled at the first call."""
        return torch.compiler.set_stance("force_eager") if self._is_eager else contextlib.nullcontext()


@contextlib.contextmanager
def preserved_process_state() -> Iterator[None]:
    """Gives back, on leaving, the random states, `torch.set_num_threads`, the number of threads, the collector."""
    is_collecting = gc.isenabled()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device.device().index] if device.has_gpu() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        if is_collecting:
            gc.enable()
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


def _import_model_class(model_path: str) -> None:
    """Imports the model class here. Otherwise vLLM starts a process to look at it: seconds on every rank, each time
    its cache does not know the class."""
    from vllm import ModelRegistry

    config = json.loads((Path(model_path) / "config.json").read_text())
    for architecture in config.get("architectures") or []:
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def check_topology(topology: Topology, world_size: int) -> None:
    """Raises ValueError when vLLM cannot serve this rollout role; needs no process group."""
    if topology.pp_size != 1:
        raise ValueError(f"parallel.rollout.pp={topology.pp_size}: vLLM engines here have no pipeline; use 1")
    if topology.ranks != tuple(range(world_size)):
        raise ValueError(
            f"parallel.rollout.ranks={list(topology.ranks)}: vLLM engines need all {world_size} ranks of the job in "
            f"order; leave parallel.rollout.ranks out (tp={topology.tp_size} then gives "
            f"{world_size // topology.tp_size} engines), or use rollout.name=naive"
        )


def _check_request(prompts: Sequence[Prompt], sampling: Sampling, max_model_len: int) -> None:
    if sampling.n < 1 or sampling.max_tokens < 1:
        raise ValueError(f"sampling.n={sampling.n} and max_tokens={sampling.max_tokens} must be 1 or more")
    if sampling.temperature != 0 and sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(f"rollout.temperature={sampling.temperature}: use 0 (greedy) or {MIN_TEMPERATURE} and more")
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) <= max_model_len - sampling.max_tokens:
            raise ValueError(
                f"prompt of row {prompt.row} has {len(prompt.token_ids)} tokens; with max_tokens="
                f"{sampling.max_tokens} the engine (max_model_len={max_model_len}) takes 1 to "
                f"{max_model_len - sampling.max_tokens}"
            )


def _to_rollout(prompt_index: int, sample: int, output: Any, version: int) -> Rollout:
    answer = output.outputs[0]
    token_ids = tuple(answer.token_ids)
    assert answer.finish_reason in ("stop", "length"), (
        f"vLLM ended answer {sample} to prompt {prompt_index} with {answer.finish_reason!r}"
    )
    return Rollout(
        prompt_index=prompt_index,
        sample=sample,
        token_ids=token_ids,
        logprobs=tuple(step[token].logprob for step, token in zip(answer.logprobs, token_ids, strict=True)),
        is_finished=answer.finish_reason == "stop",
        weights_version=version,
    )


def _agree_on_identity() -> str:
    """A name for this job's shared memory, the same on all ranks and unlike any other job's on the machine.

    Files under the same prefix that are older than ten minutes are removed: a living job drops the names of its files
    as soon as it has started, so these belong to one that was killed while starting.
    """
    if SHARED_MEMORY.is_dir():
        for file in SHARED_MEMORY.glob(f"*{SHARED_MEMORY_NAME}*"):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # another rank or another user
                if time.time() - file.stat().st_mtime > STALE_AFTER_S:
                    file.unlink()
    identity = [f"{SHARED_MEMORY_NAME}{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(identity, src=0, device=torch.device("cpu"))
    return identity[0]


def _executor_class(identity: str, rank: int) -> type:
    """vLLM's executor for ranks that are started from outside, told where it is instead of asking the environment."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class TrainerProcessExecutor(ExecutorWithExternalLauncher):
        """One worker in this very process; `identity` names the shared memory of the engine's ranks."""

        def _distributed_args(self) -> tuple[str, int, int]:
            local_rank = device.device().index if device.has_gpu() else 0
            return f"file:///{identity}", rank, local_rank  # the process group exists: no file is opened

    return TrainerProcessExecutor


def _vocab_limit_processor() -> type:
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class VocabLimit(LogitsProcessor):
        """Takes all probability from token ids that the tokenizer does not have."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self.limit = int(vllm_config.additional_config["megarl_vocab_limit"])

        def apply(self, logits: Tensor) -> Tensor:
            logits[:, self.limit :] = -torch.inf
            return logits

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            pass

    return VocabLimit
