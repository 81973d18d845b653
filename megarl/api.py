"""Training from a program of your own, in one process or in the ranks of torchrun and srun; without a command line.

    trainer = PPOTrainer(PPOConfig(actor_model_name="models/Qwen2.5-0.5B-Instruct", prompts=my_rows, max_steps=100))
    trainer.set_reward_model(my_reward)          # a function, a folder, an address, or RemoteRewardModel(...)
    trainer.train()
    print(trainer.generate(["What is 3 + 4?"]))
    trainer.save("models/trained")

`PPOConfig` holds what a first run needs; any other option of `megarl train` goes into `options` by its dotted name. It
is turned into the same words that `megarl train` takes, and checked as those are: what trains is the same program.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.algo.algorithms import ALGORITHMS
from megarl.api_config import NUM_SUMS, Judge, PPOConfig, build_words, lacks_data
from megarl.config.hub import load_run
from megarl.config.load import ConfigError
from megarl.config.schema import Config
from megarl.config.validate import find_problems
from megarl.launch.failure import run_rank
from megarl.launch.join import join_world
from megarl.launch.local import World, find_free_port, find_world
from megarl.launch.peers import PeerWatch
from megarl.launch.stop import StopRequest
from megarl.obs.log import quiet_environment
from megarl.reward.verdict import Scorer

if TYPE_CHECKING:
    from megarl.job import Job
    from megarl.keeper import Keeper
    from megarl.report import RunReport
    from megarl.train_preference import PreferenceJob

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What came of a run: the rows of metrics.jsonl (none on ranks other than 0), and whether all steps are done
    (`trainer.max_wall_time_s` may have ended it before).
    """

    run_dir: Path
    metrics: tuple[dict[str, float], ...]
    is_complete: bool


class Trainer:
    """One run of one algorithm; every rank of the job has one and makes the same calls.

    Args:
        config: see `PPOConfig`.
        algorithm: a name of `megarl.algo.algorithms.ALGORITHMS`, as `algorithm.name` takes it.

    Raises:
        ValueError: an unknown algorithm. What else is wrong in the configuration is found by the first call that needs
            it (`ConfigError`, which is a ValueError, with every problem at once).
    """

    def __init__(self, config: PPOConfig, algorithm: str) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        self.config, self.algorithm = config, algorithm
        self._judges: dict[str, Judge] = {}
        for section, name in (("reward", config.reward_model_name), ("cost", config.cost_model_name)):
            if name is not None:
                self._judges[section] = name
        self._run: tuple[Job, RunReport, Keeper] | None = None
        self._preferences: tuple[PreferenceJob, RunReport, Keeper] | None = None
        self._peers: PeerWatch | None = None
        self._is_trained = False

    def set_reward_model(self, judge: Judge) -> None:
        """What scores the answers, instead of `config.reward_model_name`.

        Args:
            judge: a name as `PPOConfig` takes it; a function of `(data_source, solution_str, ground_truth, extra_info)`
                that returns a number or a mapping with `score`; or an object with the methods of
                `megarl.reward.verdict.Scorer`, such as `RemoteRewardModel`. Rank 0 asks it.
        """
        self._set_judge("reward", judge)

    def set_cost_model(self, judge: Judge) -> None:
        """What the answers cost, instead of `config.cost_model_name`; see `set_reward_model`."""
        self._set_judge("cost", judge)

    def train(self) -> TrainResult:
        """Runs all steps; a collective of the job.

        Raises:
            ConfigError: what is wrong with the configuration or the user's files. In the ranks of a launcher an error
                ends the process instead, and the job with it.
        """
        if self._is_trained:
            raise RuntimeError("this trainer has trained; make another one, with its own output_dir, to train again")
        return self._in_world(self._train)

    def generate(self, prompts: Sequence[str], *, temperature: float = 0.0, max_tokens: int | None = None) -> list[str]:
        """One answer of the policy to each text, in the model's chat template; a collective of the job.

        Args:
            temperature: 0 = greedy.
            max_tokens: None = `config.max_response_length`.
        """
        return self._in_world(lambda: self._generate(prompts, temperature, max_tokens))

    def save(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder, tokenizer included; a collective of the job.

        A reward model in training is written with its head (`score.weight`).
        """
        self._in_world(lambda: self._save(Path(folder)))

    def build_config(self) -> Config:
        """The whole configuration of this run, every option filled in and checked for the ranks there are.

        Rows in memory are written to the folder of the run.

        Raises:
            ConfigError: every problem at once.
        """
        world = find_world(os.environ)
        config, not_found = load_run(None, build_words(self.config, self.algorithm, self._judges))
        problems = find_problems(config, 1 if world is None else world.world_size, not_found=not_found)
        if problems:
            raise ConfigError(problems)
        return config

    def _set_judge(self, section: str, judge: Judge) -> None:
        if self._run is not None:
            raise RuntimeError(f"the {section} model is chosen before the first call of train, generate or save")
        self._judges[section] = judge

    def _in_world(self, call: Callable[[], Any]) -> Any:
        """Runs `call` as a rank of the job, which is joined the first time."""
        import torch.distributed as dist

        world = find_world(os.environ) or World(0, 1, 0, 1, "127.0.0.1", find_free_port())
        found: list[Any] = []

        def run() -> None:
            if not dist.is_initialized():
                self._peers = PeerWatch()
                join_world(world, self.build_config().trainer.timeout_s, self._peers)
            found.append(call())

        if world.world_size == 1:
            run()
        else:
            run_rank(run, lambda: "" if self._peers is None else self._peers.describe())
        return found[0]

    def _open(self) -> tuple[Job, RunReport, Keeper]:
        if self._run is None:
            from megarl.keeper import open_run

            config = self.build_config()
            stop = StopRequest(config.trainer.max_wall_time_s)
            self._run = open_run(config, stop, {name: _to_scorer(judge) for name, judge in self._given().items()})
            self._run[0].sync_weights(0)
            if lacks_data(self.config, self.algorithm):
                log.warning("no prompts and no train_files: trained on %d sums of two one-digit numbers", NUM_SUMS)
        return self._run

    def _open_preferences(self) -> tuple[PreferenceJob, RunReport, Keeper]:
        if self._preferences is None:
            from megarl.train_preference import open_preference_run

            config = self.build_config()
            self._preferences = open_preference_run(config, StopRequest(config.trainer.max_wall_time_s))
        return self._preferences

    def _train(self) -> TrainResult:
        from megarl.train import train
        from megarl.train_preference import train_preference

        if ALGORITHMS[self.algorithm].advantage is None:
            job, report, keeper = self._open_preferences()
            train_preference(job, report, keeper)
        else:
            opened, report, keeper = self._open()
            train(opened, report, keeper)
        self._is_trained = True
        import torch.distributed as dist

        metrics = report.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if dist.get_rank() == 0 and metrics.is_file() else []
        return TrainResult(report.run_dir, tuple(json.loads(line) for line in lines), keeper.ending.code == 0)

    def _generate(self, prompts: Sequence[str], temperature: float, max_tokens: int | None) -> list[str]:
        from megarl.records import Sampling
        from megarl.rollout.prompts import build_prompts

        if ALGORITHMS[self.algorithm].advantage is None:
            raise RuntimeError(f"{self.algorithm} trains without an engine; save the model and generate with it")
        job, _, _ = self._open()
        data = job.config.data
        built, _ = build_prompts(
            [{data.prompt_key: prompt} for prompt in prompts],
            job.data.tokenizer,
            max_prompt_length=data.max_prompt_length,
            prompt_key=data.prompt_key,
            chat_template=data.chat_template,
            raw_prompt=data.raw_prompt,
            origin="generate",
        )
        limit = data.max_response_length if max_tokens is None else max_tokens
        seed = job.config.trainer.seed
        rollouts = job.generate(built, Sampling(1, temperature, limit, job.data.stop_ids, seed))
        return job.data.tokenizer.batch_decode([each.token_ids for each in rollouts], skip_special_tokens=True)

    def _save(self, folder: Path) -> None:
        import torch.distributed as dist

        from megarl.report import gather_role, list_exports
        from megarl.train_preference import exported_role
        from megarl.weights.hf import save_hf_folder

        if ALGORITHMS[self.algorithm].advantage is None:
            exported = exported_role(self._open_preferences()[0])
        else:
            exported = list_exports(self._open()[0], is_last=False)[0]
        tensors, dtype = gather_role(exported)
        if dist.get_rank() == 0:
            save_hf_folder(tensors, folder, str(exported.settings.model_path), dtype)
        else:
            for _ in tensors:
                continue

    def _given(self) -> dict[str, Judge]:
        """Judges that are objects of this program."""
        return {section: judge for section, judge in self._judges.items() if not isinstance(judge, str | Path)}


def _to_scorer(judge: Judge) -> Scorer:
    """The object that rank 0 asks."""
    from megarl.reward.function import bind_reward_function
    from megarl.reward.score import FunctionScorer

    if hasattr(judge, "score"):
        return judge  # pyright: ignore[reportReturnType] (told apart by its method)
    if callable(judge):
        name = getattr(judge, "__name__", repr(judge))
        try:
            return FunctionScorer(bind_reward_function(name, judge))
        except ValueError as error:
            raise ConfigError([str(error)]) from error
    raise ConfigError([f"{judge!r} is no reward: give a function, an object with `score`, a folder or an address"])


def PPOTrainer(config: PPOConfig) -> Trainer:
    """PPO with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""
    return Trainer(config, "ppo")


def GRPOTrainer(config: PPOConfig) -> Trainer:
    """GRPO: answers are compared with their siblings, there is no critic (Shao et al. 2024)."""
    return Trainer(config, "grpo")


def ReMaxTrainer(config: PPOConfig) -> Trainer:
    """ReMax: the baseline of an answer is the score of the greedy answer (Li et al. 2023)."""
    return Trainer(config, "remax")


def RLOOTrainer(config: PPOConfig) -> Trainer:
    """RLOO: the baseline of an answer is the mean of its siblings (Ahmadian et al. 2024)."""
    return Trainer(config, "rloo")


def SafeRLHFTrainer(config: PPOConfig) -> Trainer:
    """PPO-Lagrangian: a cost, a cost critic, and a multiplier that holds the mean cost under `cost_limit` (Dai et al.
    2023)."""
    return Trainer(config, "safe_rlhf")


def DPOTrainer(config: PPOConfig) -> Trainer:
    """DPO on pairs of a chosen and a rejected answer (Rafailov et al. 2023)."""
    return Trainer(config, "dpo")


def RewardModelTrainer(config: PPOConfig) -> Trainer:
    """A reward model from pairs of a chosen and a rejected answer (Ouyang et al. 2022)."""
    return Trainer(config, "reward_model")


quiet_environment()
