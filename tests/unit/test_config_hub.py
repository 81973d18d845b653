"""Models by name: the local cache, the download, and what is said when there is neither."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megarl.config.hub import load_run
from megarl.config.validate import find_problems

NAME = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture
def hub(monkeypatch, tmp_path) -> dict[str, Any]:
    """A hub of which `cached` and `online` say what it has; `asked` collects the calls."""
    state: dict[str, Any] = {"cached": [], "online": [], "asked": []}

    def snapshot_download(name: str, local_files_only: bool = False, **_: Any) -> str:
        state["asked"].append((name, local_files_only))
        if name not in state["cached" if local_files_only else "online"]:
            raise LocalEntryNotFoundError("no network\nand more")
        return str(tmp_path / name.replace("/", "--"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return state


def test_a_name_in_the_cache_is_its_folder_for_every_role_and_nothing_is_downloaded(hub, tmp_path):
    hub["cached"] = [NAME]
    config, not_found = load_run(None, [f"actor.model_path={NAME}", f"critic.model_path={NAME}"])
    folder = str(tmp_path / NAME.replace("/", "--"))
    assert (config.actor.model_path, config.critic.model_path, config.actor.tokenizer_path) == (folder,) * 3
    assert (not_found, hub["asked"]) == ({}, [(NAME, True)])


def test_a_name_that_is_not_in_the_cache_is_downloaded(hub, tmp_path):
    hub["online"] = [NAME]
    config, _ = load_run(None, [f"actor.model_path={NAME}"])
    assert config.actor.model_path == str(tmp_path / NAME.replace("/", "--"))


def test_a_folder_of_that_name_comes_first(hub, tmp_path):
    Path(tmp_path / NAME).mkdir(parents=True)
    config, _ = load_run(None, [f"actor.model_path={NAME}"])
    assert (config.actor.model_path, hub["asked"]) == (NAME, [])


@pytest.mark.parametrize("path", ["models/a/b", "/models/a", "./models/a", "../a/b", "a", "~user/a", "a/"])
def test_what_is_no_name_of_the_hub_is_left_alone(hub, path):
    config, not_found = load_run(None, [f"actor.model_path={path}"])
    assert (config.actor.model_path, not_found, hub["asked"]) == (path, {}, [])


def test_what_is_nowhere_is_one_problem_beside_the_others_with_the_way_out(hub):
    config, not_found = load_run(None, [f"actor.model_path={NAME}", "trainer.seed=-1"])
    problems = find_problems(config, 1, not_found=not_found)
    (line,) = [problem for problem in problems if problem.startswith("actor.model_path")]
    assert f"{NAME}: no such folder" in line and "(no network)" in line and f"`hf download {NAME} --local-dir" in line
    assert any(problem.startswith("trainer.seed") for problem in problems)


def test_offline_is_respected(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub["online"] = [NAME]
    _, not_found = load_run(None, [f"actor.model_path={NAME}"])
    assert "HF_HUB_OFFLINE forbids" in not_found[NAME] and hub["asked"] == [(NAME, True)]
