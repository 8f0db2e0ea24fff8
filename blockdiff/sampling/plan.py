"""Plans of the rules that choose positions without looking at logits: worked out on the host, block by block.

With the plan in hand a step asks for the logits of the positions that it fixes, and of no others; nothing is
read back from the device, and steps that would fix nothing make no call (the denoiser has no time input, so
its answer would be the same).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdiff.core.randomness import uniform
from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.noise import Draw, plan_words
from blockdiff.sampling.remask import owed_on_host


@dataclass
class RowPlan:
    """What the calls of one block do to one row.

    Attributes:
        reveals: for each call, the positions within the block that it fixes; never empty.
        remasks: for each call, the positions that are masked again after it.
    """

    reveals: list[list[int]] = field(default_factory=list)
    remasks: list[list[int]] = field(default_factory=list)


def is_planned(config: SamplerConfig) -> bool:
    """Whether the rule chooses positions without looking at logits."""
    match config.rule:
        case Rule.ancestral | Rule.first_hitting:
            return True
        case Rule.fixed:
            return config.order in (Order.random, Order.left_to_right)
        case _:
            return False


def quotas(count: int, config: SamplerConfig) -> list[int]:
    """How many of `count` masked positions each step of rule=fixed takes: k a step, or spread evenly over
    `steps`."""
    if config.steps is None:
        size = config.tokens_per_step or 1
        return [min(size, count - done) for done in range(0, count, size)]
    steps = min(config.steps, count)
    return [count // steps + (step < count % steps) for step in range(steps)]


def plan_block(
    config: SamplerConfig, open_by_row: list[list[int]], key_B: Tensor, position_BS: Tensor
) -> list[RowPlan]:
    """Plans one block of every row.

    Args:
        config: a planned rule.
        open_by_row: each row's positions within the block that are to be fixed, rising.
        key_B: int64 keys of the rows' noise, on the host.
        position_BS: int64 absolute positions, on the host.
    """
    if config.remask:
        return [
            _simulate(config, open_, key_B[row : row + 1], position_BS[row : row + 1])
            for row, open_ in enumerate(open_by_row)
        ]
    alone = all(len(open_) <= 1 for open_ in open_by_row)  # at block size 1 there is nothing to choose
    if alone or (config.rule is Rule.fixed and config.order is Order.left_to_right):
        return [_in_order(config, open_) for open_ in open_by_row]
    words_BS = plan_words(Draw.REVEAL, key_B, position_BS, 0)
    if config.rule is Rule.ancestral:
        level_BS = uniform(words_BS, torch.float64).tolist()
        return [_on_grid(config, open_, level_S) for open_, level_S in zip(open_by_row, level_BS, strict=True)]
    return [
        _in_order(config, sorted(open_, key=word_S.__getitem__))
        for open_, word_S in zip(open_by_row, words_BS.tolist(), strict=True)
    ]


def _in_order(config: SamplerConfig, ordered: list[int]) -> RowPlan:
    one_by_one = config.rule is not Rule.fixed
    sizes = [1] * len(ordered) if one_by_one else quotas(len(ordered), config)
    reveals, start = [], 0
    for size in sizes:
        reveals.append(sorted(ordered[start : start + size]))
        start += size
    return RowPlan(reveals, [[] for _ in reveals])


def _on_grid(config: SamplerConfig, open_: list[int], level_S: list[float]) -> RowPlan:
    """The reverse process on a uniform grid of times t_j = 1 − j / steps, with a linear schedule.

    From t to s a masked position is revealed with probability (t − s) / t, so its step is uniform over the
    grid: one draw a position says it all, and the number revealed at each step is binomial as it should be.
    """
    steps = config.steps or len(level_S)
    by_step: dict[int, list[int]] = {}
    for position in open_:
        by_step.setdefault(int(level_S[position] * steps), []).append(position)
    reveals = [by_step[step] for step in sorted(by_step)]
    return RowPlan(reveals, [[] for _ in reveals])


def _simulate(config: SamplerConfig, open_: list[int], key_1: Tensor, position_1S: Tensor) -> RowPlan:
    """Plans with remasking, step by step."""
    if config.rule is Rule.ancestral:
        return _simulate_grid(config, open_, key_1, position_1S)
    plan, masked, fixed = RowPlan(), list(open_), list[int]()
    sizes, accepted, remasked = quotas(len(open_), config), 0, 0
    while masked:
        step = len(plan.reveals)
        if config.rule is Rule.first_hitting:
            size = 1
        else:
            size = sizes[step] if step < len(sizes) else sizes[0]
        if config.order is Order.left_to_right and config.rule is Rule.fixed:
            ordered = masked
        else:
            ordered = _shuffled(masked, Draw.REVEAL, key_1, position_1S, step)
        taken = sorted(ordered[:size])
        masked = [position for position in masked if position not in taken]
        accepted += len(taken)
        owed = owed_on_host(len(masked), len(fixed), accepted, remasked, config.remask)
        again = sorted(_shuffled(fixed, Draw.REMASK, key_1, position_1S, step)[:owed])
        remasked += len(again)
        fixed = [position for position in fixed if position not in again] + taken
        masked = sorted(masked + again)
        plan.reveals.append(taken)
        plan.remasks.append(again)
    return plan


def _simulate_grid(config: SamplerConfig, open_: list[int], key_1: Tensor, position_1S: Tensor) -> RowPlan:
    """ReMDM's reverse process with σ = min(η, (1 − α_s) / α_t) (Wang, G. et al., 2025, eq. 7 and
    "ReMDM-cap").

    With α_t = 1 − t, from t to s each fixed position is masked with probability σ, and each masked one
    revealed with probability (α_s − (1 − σ) α_t) / (1 − α_t). At the last step s = 0 nothing is masked and
    everything revealed.
    """
    steps = config.steps or position_1S.shape[1]
    plan, masked, fixed = RowPlan(), set(open_), set[int]()
    for step in range(steps):
        alpha_t, alpha_s = step / steps, (step + 1) / steps
        sigma = min(config.remask, (1 - alpha_s) / alpha_t) if alpha_t else 0.0
        reveal = 1.0 if step == steps - 1 else (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        level_S = uniform(plan_words(Draw.REVEAL, key_1, position_1S, step), torch.float64)[0].tolist()
        taken = sorted(position for position in masked if level_S[position] < reveal)
        again = sorted(position for position in fixed if level_S[position] < sigma)
        masked = (masked - set(taken)) | set(again)
        fixed = (fixed - set(again)) | set(taken)
        if taken:
            plan.reveals.append(taken)
            plan.remasks.append(again)
        elif plan.reveals:
            # No call is made, so what is masked here belongs to the call before.
            plan.remasks[-1] = sorted({*plan.remasks[-1], *again})
    return plan


def _shuffled(positions: list[int], draw: Draw, key_1: Tensor, position_1S: Tensor, step: int) -> list[int]:
    word_S = plan_words(draw, key_1, position_1S, step)[0].tolist()
    return sorted(positions, key=word_S.__getitem__)
