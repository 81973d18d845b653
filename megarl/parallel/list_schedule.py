"""Finds a schedule by letting the stages work through what is ready: an event-driven list scheduler. Pure.

Whenever a stage is free it takes the best task that is ready: an optimizer step, else an input gradient, else a forward
pass (as long as fewer than `max_live` micro-batches' activations lie on the stage), else a weight gradient. The order
among forwards, and among input gradients, is a `Policy`. Micro-batches of one chunk are always taken in rising order,
so gradients are added up in the same order as without a pipeline, to the last bit.

`search` tries the policies that do best on equal stages, then seeded random ones, and keeps the best; it stops when a
lower bound is reached. The same arguments give the same schedule on every rank.

    actor V, critic reversed V, 8 stages, 8 micro-batches, weight gradients apart: 3.0 % idle with the first policy,
    9 micro-batches' activations a stage for both models together
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.parallel.costs import Costs
from megarl.parallel.policy import Policy, list_policies
from megarl.parallel.schedule import Action, Instruction, ModelPlan, Orders

UNKNOWN = float("inf")
TASKS_PER_SECOND = 2500  # a search may take about 2 % of the time that it plans
RANK: dict[Action, float] = {"BACKWARD": 0.0, "FORWARD": 100.0, "WGRAD": 200.0}  # more than scores and noise


@dataclass(frozen=True)
class Found:
    """A schedule's orders by stage, how long they take, and the most activations on a stage.

    `peak_live` counts micro-batches of whole stages: a chunk's activations are one over the chunks of a stage, held
    from its forward until its last gradient is computed.
    """

    orders: Orders
    makespan: float
    peak_live: float


@dataclass
class _Queue:
    """The tasks of one kind of one chunk, taken in order; `ready[m]` is when task m can start at the earliest."""

    model: int
    action: Action
    chunk: int
    stage: int
    base: float
    slope: float
    seconds: list[float]
    ready: list[float]
    next: int = 0
    feeds: _Queue | None = None  # whose task of the same micro-batch becomes ready after this one
    feeds_weights: _Queue | None = None
    returns: _Queue | None = None  # of forwards: the chunk's backwards


@dataclass
class _Stage:
    """One stage while the schedule is made; `free_at` is unknown while it waits for the others at a step."""

    queues: list[_Queue] = field(default_factory=list)
    free_at: float = 0.0
    live: float = 0.0
    peak: float = 0.0
    order: list[Instruction] = field(default_factory=list)
    steps_taken: int = 0


@dataclass
class _MiniBatch:
    """What is left of a model's mini-batch before its optimizer step, and when the last of it ends."""

    left: int
    end: float = 0.0


@dataclass
class _Step:
    """An optimizer step that is due on every stage; they take the steps in one order, and each waits for the last."""

    model: int
    mini_batch: int
    due: float
    num_arrived: int = 0


@dataclass
class _State:
    models: Sequence[ModelPlan]
    costs: Costs
    max_live: float
    policy: Policy
    stages: list[_Stage]
    events: list[tuple[float, int]]  # heap of (time, stage to look at)
    first: list[_Queue] = field(default_factory=list)  # by model, the first chunk's forwards
    mini_batches: list[list[_MiniBatch]] = field(default_factory=list)
    mini_batch_of: list[list[int]] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    num_left: int = 0
    makespan: float = 0.0


def run_policy(models: Sequence[ModelPlan], costs: Costs, max_live: float, policy: Policy) -> Found:
    """One run of the list scheduler.

    Args:
        models: on the same stages.
        costs: of these models.
        max_live: micro-batches' activations a stage may hold; exceeded only where nothing could go on otherwise.
        policy: the order among ready tasks.
    """
    num_stages = models[0].num_stages
    assert all(model.num_stages == num_stages for model in models), "models on different numbers of stages"
    stages = [_Stage() for _ in range(num_stages)]
    state = _State(models, costs, max_live, policy, stages, [(0.0, stage) for stage in range(num_stages)])
    scores = policy.scores(models)
    for number, model in enumerate(models):
        _add_queues(state, number, scores)
        state.mini_batches.append([_MiniBatch(count * model.num_chunks) for count in model.mini_batches])
        state.mini_batch_of.append([i for i, count in enumerate(model.mini_batches) for _ in range(count)])
    now = 0.0
    while state.num_left or any(stage.steps_taken < len(state.steps) for stage in stages):
        if not state.events:
            _force_forward(state, now)
        now, number = heapq.heappop(state.events)
        if stages[number].free_at <= now:
            _take(state, number, now)
    return Found([stage.order for stage in stages], state.makespan, max(stage.peak for stage in stages))


def _add_queues(state: _State, number: int, scores: dict[tuple[str, Action, int], tuple[float, float]]) -> None:
    """All queues of a model, each knowing which one its tasks feed."""
    model = state.models[number]
    costs = state.costs.models[model.name]
    count = model.num_micro_batches
    work = list(costs.work) or [1.0] * count
    assert len(work) == count, f"{model.name}: {len(work)} costs for {count} micro-batches"

    def add(action: Action, chunk: int, cost: float) -> _Queue:
        stage = model.chunk_stages[chunk]
        base, slope = scores[model.name, action, chunk]
        seconds = [cost * each for each in work]
        queue = _Queue(number, action, chunk, stage, RANK[action] + base, slope, seconds, [UNKNOWN] * count)
        state.stages[stage].queues.append(queue)
        state.num_left += count
        return queue

    chunks = range(model.num_chunks)
    forwards = [add("FORWARD", chunk, costs.forward[chunk]) for chunk in chunks]
    for one, following in itertools.pairwise(forwards):
        one.feeds = following
    state.first.append(forwards[0])
    first_end = model.mini_batches[0] if model.steps else count
    forwards[0].ready[:first_end] = [0.0] * first_end
    if not model.trains:
        return
    at_once = [0.0 if model.splits else cost for cost in costs.weight_grad]
    backwards = [add("BACKWARD", chunk, costs.input_grad[chunk] + at_once[chunk]) for chunk in chunks]
    forwards[-1].feeds = backwards[-1]
    for following, one in itertools.pairwise(backwards):
        one.feeds = following
    for one, back in zip(forwards, backwards, strict=True):
        one.returns = back
    if model.splits:
        for chunk in chunks:
            backwards[chunk].feeds_weights = add("WGRAD", chunk, costs.weight_grad[chunk])


def _take(state: _State, number: int, now: float) -> None:
    """Gives a free stage the best ready task, if there is one."""
    stage = state.stages[number]
    if stage.steps_taken < len(state.steps) and state.steps[stage.steps_taken].due <= now:
        _join_step(state, stage, now)
        return
    best, lowest = None, UNKNOWN
    for queue in stage.queues:
        m = queue.next
        if m < len(queue.ready) and queue.ready[m] <= now:
            score = queue.base + queue.slope * m
            if score < lowest and (queue.action != "FORWARD" or _has_room(state, queue, stage)):
                best, lowest = queue, score
    if best is not None and not _waits_for_backward(state, stage, best, now):
        _start(state, best, now)


def _waits_for_backward(state: _State, stage: _Stage, queue: _Queue, now: float) -> bool:
    """Whether to stay idle instead: a backward becomes ready so soon that this task would hold it up for longer."""
    if queue.action == "BACKWARD" or not state.policy.patience:
        return False
    soon = now + state.policy.patience * queue.seconds[queue.next]
    return any(
        other.action == "BACKWARD" and other.next < len(other.ready) and now < other.ready[other.next] < soon
        for other in stage.queues
    )


def _has_room(state: _State, queue: _Queue, stage: _Stage) -> bool:
    model = state.models[queue.model]
    if not model.trains:
        return True
    if queue.returns is not None and state.policy.taper:
        if queue.next - queue.returns.next >= max(1.0, state.policy.taper * (model.num_chunks - queue.chunk)):
            return False
    return stage.live + 1.0 / model.chunks_per_stage <= state.max_live + 1e-9


def _start(state: _State, queue: _Queue, now: float) -> None:
    """Takes the next task of a queue: from now on its stage is busy, and what it feeds knows when it is ready."""
    model, stage, m = state.models[queue.model], state.stages[queue.stage], queue.next
    end = now + queue.seconds[m]
    queue.next += 1
    state.num_left -= 1
    stage.order.append(Instruction(queue.action, model.name, m, queue.chunk))
    stage.free_at = end
    state.makespan = max(state.makespan, end)
    heapq.heappush(state.events, (end, queue.stage))
    if queue.feeds is not None:
        arrival = end if queue.feeds.stage == queue.stage else end + state.costs.transfer
        queue.feeds.ready[m] = arrival
        heapq.heappush(state.events, (arrival, queue.feeds.stage))
    if queue.feeds_weights is not None:
        queue.feeds_weights.ready[m] = end
    if not model.trains:
        return
    share = 1.0 / model.chunks_per_stage
    if queue.action == "FORWARD":
        stage.live += share
        stage.peak = max(stage.peak, stage.live)
    elif queue.action == "WGRAD" or not model.splits:
        stage.live -= share
        _count_down(state, queue.model, state.mini_batch_of[queue.model][m], end)


def _count_down(state: _State, model: int, number: int, end: float) -> None:
    """One chunk has a micro-batch's gradients; after the last one the optimizer step is due on every stage."""
    mini_batch = state.mini_batches[model][number]
    mini_batch.left -= 1
    mini_batch.end = max(mini_batch.end, end)
    if not mini_batch.left and state.models[model].steps:
        state.steps.append(_Step(model, number, mini_batch.end))
        for stage in range(len(state.stages)):
            heapq.heappush(state.events, (mini_batch.end, stage))


def _join_step(state: _State, stage: _Stage, now: float) -> None:
    """A stage comes to the optimizer step and waits; the last one to come starts it on all of them."""
    step = state.steps[stage.steps_taken]
    model = state.models[step.model]
    last = sum(model.mini_batches[: step.mini_batch + 1]) - 1
    stage.order.append(Instruction("STEP", model.name, last, model.num_chunks - 1))
    stage.steps_taken += 1
    stage.free_at = UNKNOWN
    step.num_arrived += 1
    if step.num_arrived < len(state.stages):
        return
    end = now + state.costs.models[model.name].step
    state.makespan = max(state.makespan, end)
    if step.mini_batch + 1 < len(model.mini_batches):
        count = model.mini_batches[step.mini_batch + 1]
        state.first[step.model].ready[last + 1 : last + 1 + count] = [end] * count
    for number, each in enumerate(state.stages):
        each.free_at = end
        heapq.heappush(state.events, (end, number))


def _force_forward(state: _State, now: float) -> None:
    """Every stage is full and waits: the forward nearest to its end may go over the limit, and things move on."""
    waiting = [
        queue
        for stage in state.stages
        for queue in stage.queues
        if queue.action == "FORWARD" and queue.next < len(queue.ready) and queue.ready[queue.next] <= now
    ]
    assert waiting, "the list scheduler is stuck: nothing is ready on any stage"
    _start(
        state, max(waiting, key=lambda queue: (queue.chunk / state.models[queue.model].num_chunks, -queue.next)), now
    )


def lower_bound(models: Sequence[ModelPlan], costs: Costs) -> float:
    """A makespan that no order of these models can beat: on some stage, the way of the first work there, then all of
    the stage's work."""
    bound = 0.0
    for stage in range(models[0].num_stages):
        reached, work = UNKNOWN, 0.0
        for model in models:
            own = costs.models[model.name]
            sizes = own.work or (1.0,) * model.num_micro_batches
            first = model.chunk_stages.index(stage)
            hops = sum(a != b for a, b in itertools.pairwise(model.chunk_stages[: first + 1]))
            reached = min(reached, sum(own.forward[:first]) * min(sizes) + hops * costs.transfer)
            kinds = (own.forward, own.input_grad, own.weight_grad) if model.trains else (own.forward,)
            work += sum(kind[chunk] for kind in kinds for chunk in model.chunks_of(stage)) * sum(sizes)
            work += own.step * len(model.mini_batches) if model.steps else 0.0
        bound = max(bound, reached + work)
    return bound


def search(models: Sequence[ModelPlan], costs: Costs, max_live: float, num_tasks: int = 40_000, seed: int = 0) -> Found:
    """The best schedule of many policies; ends early at the lower bound.

    Args:
        models, costs, max_live: as for `run_policy`.
        num_tasks: how much to try, in tasks placed: about a quarter of a second of a CPU core for the default; less
            where costs are seconds and the schedule is short.
        seed: of the random policies.

    Returns:
        The one of least makespan among those within `max_live`; where none is, the one that holds least.
    """
    size = sum(
        model.num_micro_batches * model.num_chunks * (2 + model.splits if model.trains else 1) for model in models
    )
    bound = lower_bound(models, costs) * (1.005 if costs.are_seconds else 1 + 1e-9)
    if costs.are_seconds:
        num_tasks = min(num_tasks, int(TASKS_PER_SECOND * bound))
    best: Found | None = None
    for policy in itertools.islice(
        list_policies(seed, any(model.trains for model in models)), max(2, num_tasks // size)
    ):
        found = run_policy(models, costs, max_live, policy)
        if best is None or _rank(found, max_live) < _rank(best, max_live):
            best = found
        if best.makespan <= bound and best.peak_live <= max_live + 1e-9:
            break
    assert best is not None
    return best


def _rank(found: Found, max_live: float) -> tuple[float, float, float]:
    return max(0.0, found.peak_live - max_live - 1e-9), found.makespan, found.peak_live
