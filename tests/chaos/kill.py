"""Kills a random rank with SIGKILL at a random moment, again and again, and looks at what is left.

    python -m tests.chaos.kill --times 20 --seed 1

A tiny PPO run with critic and vLLM on two ranks, a checkpoint every step. First it runs undisturbed. Then runs are
killed, `--kills-per-run` times each, in the phase of the main loop whose turn it is, after a random delay inside it;
the same command starts them again. After each kill: how long until every process of the run is gone, whether shared
memory is left. In the end: whether the last checkpoint is the undisturbed run's, bit for bit. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.start import list_processes, start_told, wait
from tests.checkpoints import list_differences
from tests.tiny_task import list_words, write_job

NUM_RANKS, STEPS = 2, 11  # more than an epoch of 8, and than the kills of a run can take
PHASES = (
    "gen",
    "reward",
    "annotate",
    "update_critic",
    "update_actor",
    "sync",
    "save",
    "save: writing",
    "save: writing the metadata",
    "save: completing",
    "save: moving the pointer",
    "save: clearing old ones",
)
START_S, GONE_S = 240.0, 30.0
ALONE = ("reward", "completing", "moving the pointer", "clearing old ones")  # rank 0 does it, the others wait
MOMENT_S = {"reward": 0.0, "sync": 0.004, "save": 0.004}  # the kill falls within this after its phase began
LONG_MOMENT_S = 0.1  # for the other phases


@dataclass(frozen=True)
class Kill:
    """One kill and what followed: seconds until all was gone, the launcher's exit code, what stayed behind."""

    rank: int
    where: str
    saved: int
    gone_s: float
    code: int
    left: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="kills in all")
    parser.add_argument("--kills-per-run", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=0, help="kills done before, in another call: the phases go on there"
    )
    parser.add_argument("--engine", default="vllm", choices=("vllm", "naive"))
    parser.add_argument("--folder", type=Path, help="keeps everything there, and goes on where a call was broken off")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="megarl-chaos-") as scratch:
        base = options.folder or Path(scratch)
        straight = base / "straight"
        if not (straight / "run" / "checkpoints" / f"step_{STEPS:06d}").exists():
            code = wait(start(straight, options.engine), START_S)
            assert code == 0, f"the undisturbed run ended with {code}:\n{(straight / 'log').read_text()[-3000:]}"
        print(
            "| kill | rank | where | steps saved | all gone after | left behind | resumed and finished as undisturbed |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        done, is_all_well = options.first, True
        while done < options.first + options.times:
            count = min(options.kills_per_run, options.first + options.times - done)
            is_all_well &= kill_a_run(base / f"seed{options.seed}-{done}", straight, options.engine, count, done, dice)
            done += count
    return 0 if is_all_well else 1


def kill_a_run(folder: Path, straight: Path, engine: str, count: int, first: int, dice: random.Random) -> bool:
    """Kills one run `count` times, lets it finish, and prints its rows; whether all is as it should be.

    Kills of an earlier call that was broken off count: they are in `folder`/kills.jsonl.
    """
    noted = folder / "kills.jsonl"
    for i in range(count):
        phase, rank, visit, moment = (
            PHASES[(first + i) % len(PHASES)],
            dice.randrange(NUM_RANKS),
            dice.randint(1, 2),
            dice.random(),
        )
        if noted.exists() and len(noted.read_text().splitlines()) > i:
            continue
        kill = kill_once(folder, engine, phase, rank, visit, moment)
        with noted.open("a") as file:
            file.write(json.dumps(asdict(kill)) + "\n")
    kills = [Kill(**json.loads(line)) for line in noted.read_text().splitlines()]
    code = wait(start(folder, engine), START_S)
    last = Path("run") / "checkpoints" / f"step_{STEPS:06d}"
    problems = [f"exit code {code}"] if code else list_differences(straight / last, folder / last)
    for i, kill in enumerate(kills):
        verdict = "yes" if not problems else f"NO: {problems[:2]}"
        print(
            f"| {first + i + 1} | {kill.rank} | {kill.where} | {kill.saved} | {kill.gone_s:.1f} s "
            f"(exit code {kill.code}) | {kill.left or 'nothing'} | {verdict} |",
            flush=True,
        )
    return not problems and all(not kill.left and kill.code != 0 for kill in kills)


def start(folder: Path, engine: str, **environ: str) -> subprocess.Popen[bytes]:
    """Starts the run, or starts it again, as `megarl train` would, with ranks that tell where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_job(folder)
    words = [
        *list_words(folder), f"rollout.name={engine}", f"trainer.n_gpus_per_node={NUM_RANKS}", "parallel.actor.pp=2",
        "rollout.n=4", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false", "trainer.resume_mode=auto", "trainer.timeout_s=60", "data.val_files=[]",
    ]  # fmt: skip
    return start_told(folder, words, NUM_RANKS, **environ)


def kill_once(folder: Path, engine: str, phase: str, rank: int, visit: int, moment: float) -> Kill:
    """Starts the run and has one rank killed in `phase` of its first or second step, early or late in it."""
    memory = set(os.listdir("/dev/shm"))
    if phase.removeprefix("save: ") in ALONE:
        rank = 0
    delay = moment * MOMENT_S.get(phase.partition(":")[0], LONG_MOMENT_S)
    (folder / "killed").unlink(missing_ok=True)
    code = wait(start(folder, engine, CHAOS_KILL=f"{rank};{phase};{visit};{delay}"), START_S)
    assert (folder / "killed").exists(), f"rank {rank} never came to {phase}:\n{(folder / 'log').read_text()[-3000:]}"
    time_text, _, where = (folder / "killed").read_text().partition(" ")
    while (alive := list_processes(folder)) and time.monotonic() - float(time_text) < GONE_S:
        time.sleep(0.05)
    gone_s = time.monotonic() - float(time_text)
    saved = len(list((folder / "run" / "checkpoints").glob("step_*/complete.json")))
    left = [f"process {each}" for each in alive] + sorted(set(os.listdir("/dev/shm")) - memory)
    return Kill(rank, where, saved, gone_s, code, ", ".join(left))


if __name__ == "__main__":
    sys.exit(main())
