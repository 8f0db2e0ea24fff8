"""The state of one block in every row of a batch, and what a step does to it without waiting for the device.

Legend: B batch, S block size, M chosen positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdiff.sampling.config import Precision, SamplerConfig
from blockdiff.sampling.logit_rules import NEVER, LogitContext, LogitRule, penalise_repetition
from blockdiff.sampling.noise import token_gumbel
from blockdiff.sampling.remask import least_probable, owed_remasks
from blockdiff.sampling.rules import Decision, StepState, decide


@dataclass
class Block:
    """One block a row, on the device; written in place.

    Attributes:
        x_BS: int64 tokens, the mask's id where undecided.
        open_BS: bool, positions still to be fixed.
        free_BS: bool, positions that were to be fixed when the block began; the others are given, or beyond
            the end.
        position_BS: int64 absolute positions.
        key_B: int64, key of each row's noise.
        mask_id: the mask's id.
        eos_id: None where nothing ends a row.
        eos_allowed_BS: bool, where the end of text may be drawn; None: everywhere.
        seen_BV: bool (B, V + 1), tokens in each row's text before the block; None without repetition penalty.
            The last column stands for the mask and is never read.
        banned_V: bool, tokens that are never drawn; None where there are none.
        step_BS: int64, the how-many-th call of the block fixed a token, from 1; 0 where given.
        logp_BS: log-probability of each token when it was fixed; 0 where given.
        accepted_B: int64, acceptances in this block.
        remasked_B: int64, tokens masked again in this block.
    """

    x_BS: Tensor
    open_BS: Tensor
    free_BS: Tensor
    position_BS: Tensor
    key_B: Tensor
    mask_id: int
    eos_id: int | None
    eos_allowed_BS: Tensor | None
    seen_BV: Tensor | None
    banned_V: Tensor | None
    step_BS: Tensor
    logp_BS: Tensor
    accepted_B: Tensor
    remasked_B: Tensor


@dataclass
class Turn:
    """Where a step acts.

    Attributes:
        step: calls that the block has seen before this one.
        chosen_BM: int64 positions within the block whose logits the denoiser gives; distinct in each row.
        live_BM: bool, those that the step may fix.
        quota_B: int64, how many rule=fixed takes; None for the others.
        remask_BS: bool, what a plan masks again after this step; None where no plan does.
    """

    step: int
    chosen_BM: Tensor
    live_BM: Tensor
    quota_B: Tensor | None = None
    remask_BS: Tensor | None = None


def masked_first(open_BS: Tensor, width: int) -> Tensor:
    """int64 (B, width): the open positions of each row from the left, then others; `width` is known to the
    host."""
    return (~open_BS).to(torch.uint8).argsort(dim=-1, stable=True)[:, :width]


def take_step(
    block: Block,
    turn: Turn,
    logits_BMV: Tensor,
    config: SamplerConfig,
    *,
    logit_rule: LogitRule | None = None,
    stop_at_eos: bool = False,
    planned: bool = False,
) -> Decision:
    """Fixes what the rule accepts, and masks again what remasking asks for. Never reads from the device.

    Args:
        block: changed in place.
        turn: where to act.
        logits_BMV: of the chosen positions.
        config: rule and logit rules.
        logit_rule: the caller's own.
        stop_at_eos: close the positions right of a fixed end of text: they are never read.
        planned: what is masked again is in the turn (`blockdiff.sampling.plan`).
    """
    chosen_BM = turn.chosen_BM
    position_BM = block.position_BS.gather(1, chosen_BM)
    logits_BMV = _shape(block, turn, logits_BMV, position_BM, config, logit_rule)
    state = StepState(config, turn.quota_B, _progress(block) if config.temperature_end is not None else None)
    noise_BMV = None
    if config.temperature or config.temperature_end:
        vocab = logits_BMV.shape[-1]
        noise_BMV = token_gumbel(block.key_B, position_BM, turn.step, vocab, logits_BMV.dtype)
    decision = decide(logits_BMV, turn.live_BM, state, noise_BMV)
    _write(block, chosen_BM, decision, turn.step)
    _reopen(block, stop_at_eos)
    if config.remask:
        _mask_again(block, turn, config, planned)
        _reopen(block, stop_at_eos)
    return decision


def _shape(
    block: Block,
    turn: Turn,
    logits_BMV: Tensor,
    position_BM: Tensor,
    config: SamplerConfig,
    logit_rule: LogitRule | None,
) -> Tensor:
    """What the model is taken to say: logits in the right precision, after bans, penalty and the caller's
    rule."""
    match config.precision:
        case Precision.exact:
            logits_BMV = logits_BMV.to(torch.float64)
        case Precision.fast:
            logits_BMV = logits_BMV.to(torch.promote_types(logits_BMV.dtype, torch.float32))
    if block.seen_BV is not None:
        seen_BV = block.seen_BV.scatter(1, block.x_BS, True)[:, :-1]
        logits_BMV = penalise_repetition(logits_BMV, seen_BV, config.repetition_penalty)
    if logit_rule is not None:
        logits_BMV = logit_rule(logits_BMV, LogitContext(position_BM, block.x_BS, turn.step))
    if block.banned_V is not None:
        logits_BMV = logits_BMV.masked_fill(block.banned_V, NEVER)
    if block.eos_allowed_BS is not None:
        assert block.eos_id is not None, "without an end of text there is nothing to forbid"
        allowed_BM = block.eos_allowed_BS.gather(1, turn.chosen_BM)
        eos_BM = logits_BMV[..., block.eos_id].masked_fill(~allowed_BM, NEVER)
        logits_BMV = logits_BMV.clone()
        logits_BMV[..., block.eos_id] = eos_BM
    return logits_BMV


def _progress(block: Block) -> Tensor:
    free_B = block.free_BS.sum(-1).clamp(min=1)
    return 1 - block.open_BS.sum(-1) / free_B


def _write(block: Block, chosen_BM: Tensor, decision: Decision, step: int) -> None:
    token_BM, accepted_BM, logp_BM = decision
    block.x_BS.scatter_(1, chosen_BM, torch.where(accepted_BM, token_BM, block.x_BS.gather(1, chosen_BM)))
    block.step_BS.scatter_(1, chosen_BM, torch.where(accepted_BM, step + 1, block.step_BS.gather(1, chosen_BM)))
    old_BM = block.logp_BS.gather(1, chosen_BM)
    block.logp_BS.scatter_(1, chosen_BM, torch.where(accepted_BM, logp_BM.to(old_BM.dtype), old_BM))


def _reopen(block: Block, stop_at_eos: bool) -> None:
    """Open is what is free and masked; right of a fixed end of text nothing is read, so nothing there needs
    calls."""
    block.open_BS = block.free_BS & (block.x_BS == block.mask_id)
    if stop_at_eos and block.eos_id is not None:
        ended_BS = ((block.x_BS == block.eos_id) & block.free_BS).cumsum(1) > 0
        block.open_BS &= ~ended_BS


def _mask_again(block: Block, turn: Turn, config: SamplerConfig, planned: bool) -> None:
    if planned:
        assert turn.remask_BS is not None, "a plan says what is masked again"
        again_BS = turn.remask_BS
    else:
        fixed_BS = block.free_BS & (block.x_BS != block.mask_id)
        earlier_BS = fixed_BS & (block.step_BS <= turn.step)
        block.accepted_B += (fixed_BS & (block.step_BS == turn.step + 1)).sum(-1)
        owed_B = owed_remasks(block.open_BS, earlier_BS, block.accepted_B, block.remasked_B, config.remask)
        block.remasked_B += owed_B
        again_BS = least_probable(block.logp_BS, earlier_BS, owed_B)
    block.x_BS.masked_fill_(again_BS, block.mask_id)
