"""What a run tells: the console line, metrics.jsonl, phases, dumped answers, tables, the picture."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from megarl.obs.dump import write_rollouts
from megarl.obs.log import quiet_environment, setup_logging
from megarl.obs.metrics import MetricsLogger, PhaseTimer, format_step_line, read_metrics
from megarl.obs.plot import choose_panels, plot_run, read_curve
from megarl.obs.report import Accuracy, PhaseCost, SampleAnswer, print_samples, print_summary, shorten

STEP = {
    "actor/pg_loss": -0.01234,
    "critic/vf_loss": 0.5,
    "actor/reward_kl_penalty": 0.00125,
    "critic/score/mean": 0.4167,
    "response_length/mean": 11.25,
    "perf/throughput": 712.4,
    "actor/grad_norm": 1.0,
}


def text_console(is_terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=is_terminal)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers, root.level, logging.getLogger("megarl").level
    yield
    root.handlers = before[0]
    root.setLevel(before[1])
    logging.getLogger("megarl").setLevel(before[2])


def test_step_line_is_in_the_manner_users_know() -> None:
    assert format_step_line(3, 1, STEP) == (
        "Epoch 1 | Step 3 | Actor Loss: -0.0123 | Critic Loss: 0.5000 | KL: 0.0013 | Reward: 0.417 | Len: 11.2 | "
        "tok/s: 712"
    )


def test_step_line_leaves_out_what_was_not_measured() -> None:
    assert format_step_line(0, 0, {"val/accuracy_greedy": 0.44}) == "Epoch 0 | Step 0 | Held-out greedy: 0.440"


def test_each_logged_step_is_one_flat_line_of_json(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, ["jsonl"], total_steps=2) as logger:
        logger.log(1, 1, STEP)
        first = (tmp_path / "metrics.jsonl").read_text()  # on disk before the run ends
        logger.log(2, 1, STEP)
    assert json.loads(first) == {"step": 1, "epoch": 1} | STEP
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_value_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, ["jsonl"], total_steps=1) as logger:
        logger.log(1, 1, {"actor/pg_loss": float("nan")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["actor/pg_loss"] is None


def test_without_a_terminal_the_console_gets_plain_lines(tmp_path: Path) -> None:
    console = text_console()
    with MetricsLogger(tmp_path, ["console"], total_steps=2, console=console) as logger:
        logger.log(1, 1, STEP)
        logger.note("[not markup] and a line that is longer than the console is wide " + "x" * 100)
    assert printed(console) == (
        format_step_line(1, 1, STEP)
        + "\n[not markup] and a line that is longer than the console is wide "
        + "x" * 100
        + "\n"
    )


def test_on_a_terminal_a_bar_counts_the_steps(tmp_path: Path) -> None:
    console = text_console(is_terminal=True)
    with MetricsLogger(tmp_path, ["console"], total_steps=7, first_step=2, console=console) as logger:
        logger.log(3, 1, STEP)
    assert "2/7" in printed(console) and "3/7" in printed(console)


def test_tensorboard_gets_every_metric(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLogger(tmp_path, ["tensorboard"], total_steps=1) as logger:
        logger.log(4, 1, STEP)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(STEP)
    assert events.Scalars("perf/throughput")[0].step == 4


def test_an_unknown_sink_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.logger=.*'swandb'.*console, jsonl, tensorboard, wandb"):
        MetricsLogger(tmp_path, ["console", "swandb"], total_steps=1)


def test_wandb_without_its_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install wandb, or take wandb out of trainer\.logger"):
        MetricsLogger(tmp_path, ["wandb"], total_steps=1)


def log_reward(folder: Path, step: int, reward: float, first_step: int) -> None:
    with MetricsLogger(folder, ["jsonl"], total_steps=9, first_step=first_step) as logger:
        logger.log(step, 1, {"critic/score/mean": reward})


def test_a_resumed_run_continues_the_file_and_its_later_values_win(tmp_path: Path) -> None:
    log_reward(tmp_path, step=1, reward=0.1, first_step=0)
    log_reward(tmp_path, step=2, reward=0.2, first_step=1)
    log_reward(tmp_path, step=2, reward=0.3, first_step=1)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["critic/score/mean"]) for row in rows] == [(1, 0.1), (2, 0.3)]


def test_a_new_run_does_not_keep_the_steps_of_an_older_one(tmp_path: Path) -> None:
    log_reward(tmp_path, step=8, reward=0.1, first_step=0)
    log_reward(tmp_path, step=1, reward=0.2, first_step=0)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_cut_line_of_metrics_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "a')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of JSON"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_phases_add_up_and_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("megarl.obs.metrics.time.perf_counter", lambda: next(clock))
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("gen"):
            pass
    assert timer.take() == {"timing_s/gen": 5.0}
    assert timer.take() == {}


def test_an_error_carries_the_innermost_phase() -> None:
    timer = PhaseTimer()
    with pytest.raises(RuntimeError) as caught, timer.phase("step"), timer.phase("update_actor"):
        raise RuntimeError("no")
    assert caught.value.__notes__ == ["phase: update_actor"]


def test_dumped_answers_are_read_back_with_tensors_as_lists(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1 =", "response": "½", "reward": 1.0, "advantages": torch.tensor([0.5, -0.5])}]
    path = write_rollouts(tmp_path, 3, rows)
    assert path == tmp_path / "rollouts" / "step_000003.jsonl"
    assert json.loads(path.read_text()) == rows[0] | {"advantages": [0.5, -0.5]}


def test_a_dump_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, float]]:
        yield {"reward": 1.0}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_rollouts(tmp_path, 3, rows())
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_summary_shows_accuracy_and_speed(tmp_path: Path) -> None:
    console = text_console()
    phases = {"rollout": PhaseCost(10.0, 7000), "reward": PhaseCost(0.5)}
    print_summary(console, Accuracy(0.44, 0.19), Accuracy(0.75, 0.5), phases, total_s=20.0, run_dir=tmp_path)
    rows = [line.replace("│", " ").split() for line in printed(console).splitlines()]
    assert ["greedy", "0.440", "0.750", "+0.310"] in rows
    assert ["sampled", "0.190", "0.500", "+0.310"] in rows
    assert ["rollout", "10.0", "50%", "700"] in rows
    assert ["reward", "0.5", "2%"] in rows
    assert str(tmp_path) in printed(console)


def test_summary_without_a_first_validation_shows_no_change(tmp_path: Path) -> None:
    console = text_console()
    print_summary(console, None, Accuracy(0.75), {}, total_s=1.0, run_dir=tmp_path)
    rows = [line.replace("│", " ").split() for line in printed(console).splitlines()]
    assert ["greedy", "-", "0.750"] in rows


def test_summary_of_a_run_that_never_validated_shows_where_the_time_went(tmp_path: Path) -> None:
    console = text_console()
    print_summary(console, None, None, {"gen": PhaseCost(1.0, 10)}, total_s=2.0, run_dir=tmp_path)
    assert "held-out" not in printed(console)
    assert ["gen", "1.0", "50%", "10"] in [line.replace("│", " ").split() for line in printed(console).splitlines()]


def test_sample_answers_are_shown_as_they_are() -> None:
    console = text_console()
    print_samples(console, [SampleAnswer("4 - 1 = ?", "[bold]5", "3")])
    assert "[bold]5" in printed(console)


def test_a_long_text_tells_how_much_is_missing() -> None:
    assert shorten("a" * 50 + "b" * 60, 20) == "a" * 10 + " …(90 more)… " + "b" * 10


def test_the_picture_is_a_png_of_some_size(tmp_path: Path) -> None:
    rows = [{"step": 0, "epoch": 0, "val/accuracy_greedy": 0.4}, {"step": 1, "epoch": 1, "critic/score/mean": 0.2}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png", title="ppo")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.png"]


@pytest.mark.parametrize(
    ("measured", "panels"),
    [
        ({"critic/score/mean": 0.2}, ["Reward", "Length of the answers", "Held-out accuracy"]),
        ({"actor/kl_loss": 0.2}, ["Reward", "KL to the reference", "Held-out accuracy"]),
        (
            {"actor/reward_kl_penalty": 0.2, "cost/mean": 0.1, "lagrange/cost_limit": 0.2, "lagrange/multiplier": 1.0},
            ["Reward", "KL to the reference", "Held-out accuracy", "Cost", "Multiplier of the cost"],
        ),
        ({"preference/loss": 0.7, "val/loss": 0.6}, ["Loss", "Accuracy", "Margin"]),
    ],
)
def test_the_picture_has_panels_for_what_the_run_measured(
    tmp_path: Path, measured: dict[str, float], panels: list[str]
) -> None:
    rows = [{"step": step, "epoch": 1} | measured for step in (1, 2)]
    assert [panel.name for panel in choose_panels(rows)] == panels
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png")
    header = (tmp_path / "run.png").read_bytes()[16:24]
    width, height = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
    num_rows = 2 if len(panels) > 3 else 1
    assert width == pytest.approx(4.3 * 140 * 3, abs=2) and height == pytest.approx(3.6 * 140 * num_rows, abs=2)


def test_the_limit_of_a_cost_is_drawn_beside_the_cost() -> None:
    from matplotlib.figure import Figure

    from megarl.obs.plot import COST, draw_panel

    rows = [{"step": step, "cost/mean": cost, "lagrange/cost_limit": 0.2} for step, cost in ((1, 0.7), (2, 0.1))]
    axes = Figure().subplots()
    draw_panel(axes, COST, rows)
    drawn = {
        str(line.get_label()): (np.asarray(line.get_ydata()).tolist(), line.get_linestyle())
        for line in axes.get_lines()
    }
    assert drawn == {"mean of the step's answers": ([0.7, 0.1], "-"), "limit": ([0.2, 0.2], "--")}


def test_a_curve_takes_the_first_metric_there_is_and_skips_null() -> None:
    rows = [{"step": 1, "b": 1.0}, {"step": 2, "b": None}, {"step": 3, "b": 3.0}]
    assert read_curve(rows, ("a", "b")) == ([1, 3], [1.0, 3.0])


def test_only_rank_zero_speaks_by_default(capsys: pytest.CaptureFixture[str], restored_logging: None) -> None:
    setup_logging(rank=1)
    logging.getLogger("megarl.trainer").info("quiet")
    logging.getLogger("megarl.trainer").warning("loud")
    assert capsys.readouterr().err == "[rank 1] W megarl.trainer: loud\n"


def test_a_line_tells_rank_and_place(capsys: pytest.CaptureFixture[str], restored_logging: None) -> None:
    setup_logging(rank=1, all_ranks=True, place="actor tp0 pp1 dp0")
    logging.getLogger("megarl.trainer").info("here")
    assert capsys.readouterr().err == "[rank 1 actor tp0 pp1 dp0] I megarl.trainer: here\n"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    monkeypatch.setattr("megarl.obs.log.os.environ", environ)
    quiet_environment()
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["TOKENIZERS_PARALLELISM"] == "false"
