"""Checkpoints on disk: what is complete, what is current, what is cleared away, and what is never touched."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from megarl.trainer import checkpoint_files as files


def make(root: Path, step: int) -> Path:
    writing = files.begin(root, step)
    (writing / "actor").mkdir()
    (writing / "actor" / "weights").write_bytes(bytes(step))
    return files.complete(writing)


def test_the_newest_complete_one_is_found_and_is_the_current_one(tmp_path: Path) -> None:
    for step in (1, 2, 1_000_000):
        make(tmp_path, step)
    found = files.find_newest(tmp_path)
    assert found.path == tmp_path / "step_1000000" and found.step == 1_000_000 and found.skipped == ()
    assert (tmp_path / "latest").read_text() == "step_1000000\n"
    assert files.step_of(tmp_path / "step_1000000") == 1_000_000


def test_nothing_is_found_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert files.find_newest(tmp_path) == files.find_newest(tmp_path / "no") == files.Found(None, 0, ())


def break_by_truncation(path: Path) -> None:
    (path / "actor" / "weights").write_bytes(b"")


def break_by_missing_file(path: Path) -> None:
    (path / "actor" / "weights").unlink()


def break_manifest(path: Path) -> None:
    (path / "complete.json").write_text('{"files":')


def break_format(path: Path) -> None:
    (path / "complete.json").write_text(json.dumps({"format": 99, "files": {}}))


def break_by_removing_the_manifest(path: Path) -> None:
    (path / "complete.json").unlink()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (break_by_truncation, "weights has 0 bytes instead of 20"),
        (break_by_missing_file, "weights is missing"),
        (break_manifest, "cannot be read"),
        (break_format, "format 99"),
        (break_by_removing_the_manifest, "never completed"),
    ],
)
def test_a_broken_one_is_passed_over_with_its_reason(tmp_path: Path, how, reason: str) -> None:
    make(tmp_path, 10)
    how(make(tmp_path, 20))
    found = files.find_newest(tmp_path)
    assert found.step == 10
    assert len(found.skipped) == 1 and "step_000020" in found.skipped[0] and reason in found.skipped[0]


def test_one_that_was_begun_is_told_only_when_it_is_newer(tmp_path: Path) -> None:
    files.begin(tmp_path, 5)
    make(tmp_path, 10)
    assert files.find_newest(tmp_path).skipped == ()
    files.begin(tmp_path, 15)
    (line,) = files.find_newest(tmp_path).skipped
    assert ".step_000015.writing" in line and "never completed" in line


def test_the_pointer_is_the_last_thing_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1)
    writing = files.begin(tmp_path, 2)

    def check(final: Path) -> None:
        assert files.why_incomplete(final) == "" and not writing.exists()
        assert (tmp_path / "latest").read_text() == "step_000001\n"

    monkeypatch.setattr(files, "point_to", check)
    files.complete(writing)


def test_old_ones_go_and_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    removed = files.prune(tmp_path, keep=2)
    assert sorted(path.name for path in removed) == ["step_000001", "step_000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000003", "step_000004"]


def test_a_broken_one_does_not_count_as_one_to_keep_and_is_left_to_be_looked_at(tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    break_by_truncation(make(tmp_path, 3))
    files.prune(tmp_path, keep=1)
    assert files.find_newest(tmp_path).step == 2


def test_what_killed_runs_left_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    files.begin(tmp_path, 7)
    for foreign in ("step_000001", ".step_000002.writing", "notes"):
        (tmp_path / foreign).mkdir()
        (tmp_path / foreign / "mine.txt").write_text("keep me")
    make(tmp_path, 8)
    files.prune(tmp_path, keep=1)
    assert not (tmp_path / ".step_000007.writing").exists()
    for foreign in ("step_000001", ".step_000002.writing", "notes"):
        assert (tmp_path / foreign / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize("name", ["step_000003", ".step_000003.writing"])
def test_a_foreign_folder_in_the_way_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match="in the way"):
        files.begin(tmp_path, 3)
    assert (tmp_path / name / "mine.txt").exists()


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    break_by_truncation(make(tmp_path, 20))
    shutil.rmtree(files.begin(tmp_path, 20))
    assert files.why_incomplete(make(tmp_path, 20)) == ""
    assert not list(tmp_path.glob(".step*"))


def test_a_run_that_starts_earlier_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make(root, step)
    assert files.set_aside(root, step=3) is None
    assert files.set_aside(root, step=1) == tmp_path / "checkpoints.1"
    assert files.find_newest(root).step == 1 and (root / "latest").read_text() == "step_000001\n"
    assert files.find_newest(tmp_path / "checkpoints.1").step == 3
    assert files.set_aside(root, step=0) == tmp_path / "checkpoints.2"
    assert files.find_newest(root).path is None and not (root / "latest").exists()


OPERATIONS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open")


def save_and_die(root: Path, last_operation: int) -> bool:
    """Saves step 2, keeping one, in a child that is killed at its n-th operation on files; whether it came so far."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(function):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == last_operation:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for name in OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
        make(root, 2)
        files.prune(root, keep=1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:  # case F1
    steps: list[int] = []
    for moment in itertools.count(1):
        root = tmp_path / str(moment)
        make(root, 1)
        was_killed = save_and_die(root, moment)
        found = files.find_newest(root)
        assert found.path is not None and files.why_incomplete(found.path) == ""
        steps.append(found.step)
        make(root, 3)
        files.prune(root, keep=1)
        assert sorted(path.name for path in root.iterdir() if path.name != ".latest.writing") == [
            "latest",
            "step_000003",
        ]
        if not was_killed:
            break
    assert len(steps) > 20, f"only {len(steps)} moments were tried"
    assert steps == sorted(steps) and set(steps) == {1, 2}, "first the old one is found, then for good the new one"
