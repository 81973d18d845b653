"""GAE of a packed batch against the per-step loop on the padded batch, and against a memcpy of its bytes.

    python -m benchmarks.gae [--sequences 1024] [--longest 8192]

Lengths are long-tailed: their logarithm is uniform from 16 to the longest. The loop is the one that verl runs
(`compute_gae_advantage_return`, without its whitening), restated: all sequences side by side, one step at a time. The
memcpy moves as many bytes in all as the op has to: rewards, values, mask in, advantages and returns out. `full_*`: all
sequences of the longest length, where the loop wastes nothing on padding.

The memcpy writes to memory that is there. So that the op does too, the C library is told to keep what was freed: else
every call would wait for the system to clear new pages, as `full_gae_new_pages_ms` shows.
"""

from __future__ import annotations

import argparse
import ctypes
import math

import torch
from torch import Tensor

from benchmarks.measure import num_threads, report, time_in_turns
from megarl import device
from megarl.algo.advantages import compute_gae
from megarl.ops import dispatch
from megarl.ops.gae import gae
from megarl.ops.moments import whiten

BYTES_PER_TOKEN = 2 * 4 + 1 + 2 * 4
GAMMA, LAM = 1.0, 0.95

Figures = dict[str, float | int | str]


def run_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """GAE step by step over [B, longest]; `mask` in the dtype of the values."""
    next_values: Tensor | float = 0.0
    running: Tensor | float = 0.0
    reversed_advantages: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        new = delta + GAMMA * LAM * running
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        running = new * mask[:, t] + (1 - mask[:, t]) * running
        reversed_advantages.append(running)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def draw_lengths(count: int, longest: int) -> Tensor:
    """[count] int64 with uniform logarithms from 16 to `longest`, both reached."""
    spread = torch.linspace(math.log(16), math.log(longest), count).exp().round().long()
    return spread[torch.randperm(count)]


def pack(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards, values, mask [T] and cu_seqlens: a random first part of every sequence is its prompt."""
    where = device.device()
    total = int(lengths.sum())
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    prompts = (lengths * torch.rand(lengths.numel()) * 0.3).long()
    place = torch.arange(total) - cu_seqlens[:-1].repeat_interleave(lengths)
    mask = place >= prompts.repeat_interleave(lengths)
    rewards = torch.zeros(total)
    rewards[cu_seqlens[1:] - 1] = torch.rand(lengths.numel())
    return rewards.to(where), torch.randn(total).to(where), mask.to(where), cu_seqlens.to(where)


def pad(x: Tensor, lengths: Tensor) -> Tensor:
    """[B, longest] fp32 of [T]."""
    return torch.nn.utils.rnn.pad_sequence(list(x.split(lengths.tolist())), batch_first=True).float()


def measure(lengths: Tensor, loop_rounds: int) -> dict[str, float]:
    """Seconds of each rival; `loop` only where it has rounds."""
    rewards, values, mask, cu_seqlens = pack(lengths)
    half = torch.ones(BYTES_PER_TOKEN * values.numel() // 2, dtype=torch.uint8, device=values.device)
    other = torch.zeros_like(half)
    seconds = time_in_turns(
        {
            "gae": lambda: gae(rewards, values, mask, cu_seqlens, GAMMA, LAM),
            "memcpy": lambda: other.copy_(half),
            "whiten": lambda: whiten(values, mask),
        },
        rounds=15,
        warm_ups=3,
    )
    if loop_rounds:
        seconds |= time_in_turns(
            {"torch": lambda: compute_gae(rewards, values, mask, cu_seqlens, GAMMA, LAM)}, rounds=2
        )
        padded = [pad(x, lengths) for x in (rewards, values, mask)]
        seconds |= time_in_turns({"loop": lambda: run_loop(*padded)}, rounds=loop_rounds)
        check_equal(gae(rewards, values, mask, cu_seqlens, GAMMA, LAM)[0], run_loop(*padded)[0], mask, lengths)
    return seconds


def keep_freed_memory() -> None:
    """The C library hands freed memory out again, of any size, instead of giving it back to the system."""
    libc = ctypes.CDLL("libc.so.6")
    trim_threshold, mmap_threshold = -1, -3
    for option in (mmap_threshold, trim_threshold):
        assert libc.mallopt(option, 1 << 30) == 1, f"mallopt({option}) failed"


def check_equal(packed: Tensor, padded: Tensor, mask: Tensor, lengths: Tensor) -> None:
    """Both computed the same: the loop carries fp32, and values a masked token too."""
    is_real = torch.arange(padded.shape[1]) < lengths[:, None]
    torch.testing.assert_close(packed[mask], padded[is_real.to(mask.device)][mask], rtol=1e-3, atol=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=8192)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    print(dispatch.choose_implementation(require_extension=True))
    lengths = draw_lengths(arguments.sequences, arguments.longest)
    full = torch.full_like(lengths, arguments.longest)
    torch.set_num_threads(1)
    new_pages = measure(full, loop_rounds=0)
    keep_freed_memory()
    one, one_full = measure(lengths, loop_rounds=1), measure(full, loop_rounds=0)
    torch.set_num_threads(num_threads())
    many = measure(lengths, loop_rounds=1)
    figures: Figures = {
        "speedup_over_loop": many["loop"] / many["gae"],
        "speedup_over_loop_one_thread": one["loop"] / one["gae"],
        "time_over_memcpy": many["gae"] / many["memcpy"],
        "time_over_memcpy_one_thread": one["gae"] / one["memcpy"],
        "speedup_over_torch_one_thread": one["torch"] / one["gae"],
        "full_speedup_over_loop_one_thread": one["loop"] / one_full["gae"],
        "full_time_over_memcpy_one_thread": one_full["gae"] / one_full["memcpy"],
        "full_gae_one_thread_ms": one_full["gae"] * 1e3,
        "full_gae_new_pages_ms": new_pages["gae"] * 1e3,
        "gae_ms": many["gae"] * 1e3,
        "gae_one_thread_ms": one["gae"] * 1e3,
        "loop_ms": many["loop"] * 1e3,
        "loop_one_thread_ms": one["loop"] * 1e3,
        "memcpy_ms": many["memcpy"] * 1e3,
        "whiten_ms": many["whiten"] * 1e3,
        "sequences": arguments.sequences,
        "tokens": int(lengths.sum()),
        "threads": torch.get_num_threads(),
    }
    report("gae", figures)


if __name__ == "__main__":
    main()
