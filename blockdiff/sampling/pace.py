"""Where each step of a block acts, and when the block is done: what the host has to know, and what it costs
to know it.

* A plan (ancestral, first_hitting, random, left to right) knows positions and counts: it reads nothing from
the device.
* A count (rule=fixed by confidence, margin or entropy) knows how many positions are left: it reads nothing
either.
* An adaptive rule (confidence, factor, entropy_bound) decides on the device how many it accepts: the host
reads the number of
  open positions of each row once a step, between steps.

Each pace yields turns, and counts in `calls` the turns in which a row took part.

Legend: B batch, S block size, M chosen positions, J turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import torch
from torch import Tensor

from blockdiff.model.cache import send
from blockdiff.sampling.block import Block, Turn, masked_first
from blockdiff.sampling.config import Rule, SamplerConfig
from blockdiff.sampling.plan import RowPlan, is_planned, plan_block, quotas
from blockdiff.sampling.remask import owed_on_host


class Pace(Enum):
    planned = "planned"
    counted = "counted"
    adaptive = "adaptive"


def pace_of(config: SamplerConfig) -> Pace:
    """What the host knows of the rule's steps beforehand."""
    if is_planned(config):
        return Pace.planned
    return Pace.counted if config.rule is Rule.fixed else Pace.adaptive


def turns(
    block: Block,
    open_by_row: list[list[int]],
    config: SamplerConfig,
    key_B: Tensor,
    position_BS: Tensor,
    calls: list[int],
) -> Iterator[Turn]:
    """The turns of one block; between two of them the caller takes the step.

    Args:
        block: read once a step by adaptive rules, by no others.
        open_by_row: each row's open positions within the block.
        config: the rule.
        key_B: keys of the rows' noise, on the host.
        position_BS: absolute positions, on the host.
        calls: one number a row, raised in each turn that the row takes part in.
    """
    match pace_of(config):
        case Pace.planned:
            plans = plan_block(config, open_by_row, key_B, position_BS)
            return _planned_turns(plans, position_BS.shape[1], block.x_BS.device, bool(config.remask), calls)
        case Pace.counted:
            return _counted_turns(block, [len(open_) for open_ in open_by_row], config, calls)
        case Pace.adaptive:
            return _adaptive_turns(block, [len(open_) for open_ in open_by_row], calls)


def _planned_turns(
    plans: list[RowPlan], block_size: int, device: torch.device, remask: bool, calls: list[int]
) -> Iterator[Turn]:
    steps = max(len(plan.reveals) for plan in plans)
    # One upload a block: the tables of all turns end to end.
    chosen: list[int] = []
    live: list[bool] = []
    widths = []
    for step in range(steps):
        taken = [plan.reveals[step] if step < len(plan.reveals) else [] for plan in plans]
        width = max(len(positions) for positions in taken)
        widths.append(width)
        for positions in taken:
            chosen += _padded(positions, width, block_size)
            live += [True] * len(positions) + [False] * (width - len(positions))
    sizes = [width * len(plans) for width in widths]
    chosen_by_step = send(chosen, torch.int64, device).split(sizes)
    live_by_step = send(live, torch.bool, device).split(sizes)
    remask_JBS = _remask_table(plans, steps, block_size, device) if remask else None
    for step, width in enumerate(widths):
        for row, plan in enumerate(plans):
            calls[row] += step < len(plan.reveals)
        yield Turn(
            step,
            chosen_by_step[step].view(len(plans), width),
            live_by_step[step].view(len(plans), width),
            remask_BS=None if remask_JBS is None else remask_JBS[step],
        )


def _padded(positions: list[int], width: int, block_size: int) -> list[int]:
    """Positions filled up with others, all distinct: a position written twice would hold either value."""
    if len(positions) == width:
        return positions
    others = [position for position in range(block_size) if position not in positions]
    return positions + others[: width - len(positions)]


def _remask_table(plans: list[RowPlan], steps: int, block_size: int, device: torch.device) -> Tensor:
    table = torch.zeros(steps, len(plans), block_size, dtype=torch.bool)
    for row, plan in enumerate(plans):
        for step, positions in enumerate(plan.remasks):
            table[step, row, positions] = True
    table = table.pin_memory() if device.type == "cuda" else table
    return table.to(device, non_blocking=True)


def _counted_turns(block: Block, total: list[int], config: SamplerConfig, calls: list[int]) -> Iterator[Turn]:
    quota_by_step, left_by_step = _count(total, config)
    quota_JB = send(quota_by_step, torch.int64, block.x_BS.device)
    for step, left in enumerate(left_by_step):
        for row, count in enumerate(left):
            calls[row] += count > 0
        yield _open_turn(block, step, max(left), quota_JB[step])


def _count(total: list[int], config: SamplerConfig) -> tuple[list[list[int]], list[list[int]]]:
    """Quotas, and open positions before the step, of each step and row."""
    quota_by_row, left_by_row = [], []
    for count in total:
        sizes = quotas(count, config)
        quota: list[int] = []
        lefts: list[int] = []
        left, accepted, remasked = count, 0, 0
        while left:
            size = min(left, sizes[len(quota)] if len(quota) < len(sizes) else sizes[0])
            quota.append(size)
            lefts.append(left)
            earlier, left, accepted = count - left, left - size, accepted + size
            again = owed_on_host(left, earlier, accepted, remasked, config.remask)
            left, remasked = left + again, remasked + again
        quota_by_row.append(quota)
        left_by_row.append(lefts)
    steps = max(len(quota) for quota in quota_by_row)
    fill = lambda rows: [[row[j] if j < len(row) else 0 for row in rows] for j in range(steps)]  # noqa: E731
    return fill(quota_by_row), fill(left_by_row)


def _adaptive_turns(block: Block, left: list[int], calls: list[int]) -> Iterator[Turn]:
    step = 0
    while any(left):
        for row, count in enumerate(left):
            calls[row] += count > 0
        yield _open_turn(block, step, max(left), None)
        left = block.open_BS.sum(-1).tolist()
        step += 1


def _open_turn(block: Block, step: int, width: int, quota_B: Tensor | None) -> Turn:
    chosen_BM = masked_first(block.open_BS, width)
    return Turn(step, chosen_BM, block.open_BS.gather(1, chosen_BM), quota_B)
