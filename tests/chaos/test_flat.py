"""A hundred steps use no more memory, file descriptors or threads at their end than at their beginning."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

from tests.chaos.start import list_processes, read_phase, start_told, wait
from tests.tiny_task import list_words, write_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WARM_UP, STEPS, NUM_RANKS = 65, 165, 2  # the allocator's pools grow in jumps until then
WORDS = [
    "trainer.total_epochs=50", f"trainer.total_training_steps={STEPS}", f"trainer.n_gpus_per_node={NUM_RANKS}",
    "parallel.actor.pp=2", "trainer.save_freq=5", "trainer.max_ckpt_to_keep=1", "trainer.async_save=true",
    "trainer.val_before_train=false", "data.val_files=[]",
]  # fmt: skip


def sample(pid: int) -> tuple[int, int, int]:
    """Resident bytes, open files, threads of a process."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))


def test_memory_files_and_threads_are_flat(tmp_path: Path) -> None:
    write_job(tmp_path)
    process = start_told(tmp_path, [*list_words(tmp_path), *WORDS], NUM_RANKS)
    metrics, seen = tmp_path / "run" / "metrics.jsonl", 0
    samples: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(NUM_RANKS)}
    while process.poll() is None:
        steps = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        if steps > seen:
            seen = steps
            for rank, rows in samples.items():
                rows.append(sample(read_phase(tmp_path, rank)[0]))
        time.sleep(0.02)
    assert wait(process, 1) == 0, (tmp_path / "log").read_text()[-3000:]
    assert list_processes(tmp_path) == []
    for rank, rows in samples.items():
        rows = rows[WARM_UP:]
        assert len(rows) > 30, f"only {len(rows)} samples"
        resident, files, threads = (list(column) for column in zip(*rows, strict=True))
        slope = statistics.linear_regression(range(len(resident)), resident).slope
        print(f"rank {rank}: {slope / 1024:.1f} KiB a step, files {min(files)}..{max(files)}, threads {set(threads)}")
        assert slope < 128 * 1024, f"rank {rank} grows by {slope / 1024:.0f} KiB a step"
        third = len(files) // 3
        assert max(files[-third:]) <= max(files[:third]), f"rank {rank}: open files {files}"
        assert max(threads[-third:]) <= max(threads[:third]), f"rank {rank}: threads {threads}"
