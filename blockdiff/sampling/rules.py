"""Step rules: which of the masked positions a step fixes, and with which tokens.

A rule is a pure function (logits, masked, state, noise) -> (tokens, accepted, log-probabilities). It reads
nothing back from the device, and accepts at least one position of each row that has a masked one.

Legend: B batch, M chosen positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.logit_rules import NEVER, min_p, top_k, top_p


@dataclass
class StepState:
    """What a rule knows beside logits.

    Attributes:
        config: the rule's parameters.
        quota_B: int64, how many positions rule=fixed takes of each row; None for the other rules.
        progress_B: share of each row's block that is fixed, float in [0, 1); needed where the temperature
            moves.
    """

    config: SamplerConfig
    quota_B: Tensor | None = None
    progress_B: Tensor | None = None


class Decision(NamedTuple):
    """What a step does.

    Attributes:
        token_BM: int64, a token for each position, accepted or not.
        accepted_BM: bool, a part of `masked`.
        logp_BM: log-probability of each token, in nats, by the model at temperature 1 with nothing cut off.
    """

    token_BM: Tensor
    accepted_BM: Tensor
    logp_BM: Tensor


def decide(logits_BMV: Tensor, masked_BM: Tensor, state: StepState, noise_BMV: Tensor | None) -> Decision:
    """The decision of `state.config.rule`.

    Args:
        logits_BMV: float32 or float64.
        masked_BM: bool, positions that this step may fix. Rules that plan their positions beforehand
            (ancestral, first_hitting, random, left to right) take them all.
        state: see `StepState`.
        noise_BMV: Gumbel noise, or None to take the likeliest tokens.
    """
    config = state.config
    token_BM = draw_tokens(logits_BMV, state, noise_BMV)
    lse_BM = logits_BMV.logsumexp(-1)
    logp_BM = logits_BMV.gather(-1, token_BM[..., None]).squeeze(-1) - lse_BM
    match config.rule:
        case Rule.ancestral | Rule.first_hitting:
            accepted_BM = masked_BM
        case Rule.confidence:
            accepted_BM = accept_threshold(logp_BM.exp(), masked_BM, config.threshold)
        case Rule.factor:
            accepted_BM = accept_factor(logp_BM.exp(), masked_BM, config.factor)
        case Rule.entropy_bound:
            accepted_BM = accept_entropy_bound(entropy(logits_BMV, lse_BM), masked_BM, config.entropy_bound)
        case Rule.fixed:
            accepted_BM = _accept_fixed(logits_BMV, lse_BM, logp_BM, masked_BM, state)
    return Decision(token_BM, accepted_BM, logp_BM)


def _accept_fixed(logits_BMV: Tensor, lse_BM: Tensor, logp_BM: Tensor, masked_BM: Tensor, state: StepState) -> Tensor:
    if state.config.order in (Order.random, Order.left_to_right):
        return masked_BM
    assert state.quota_B is not None, "rule=fixed is told how many positions to take"
    match state.config.order:
        case Order.margin:
            score_BM = margin(logits_BMV, lse_BM)
        case Order.entropy:
            score_BM = -entropy(logits_BMV, lse_BM)
        case _:
            score_BM = logp_BM
    return accept_best(score_BM, masked_BM, state.quota_B)


def draw_tokens(logits_BMV: Tensor, state: StepState, noise_BMV: Tensor | None) -> Tensor:
    """Draws a token (B, M) of each position by the largest of logits / temperature + Gumbel noise."""
    config = state.config
    if noise_BMV is None:
        return logits_BMV.argmax(-1)
    temperature = _temperature(logits_BMV, state)
    scaled_BMV = logits_BMV if temperature is None else logits_BMV / temperature
    if config.top_k is not None:
        scaled_BMV = top_k(scaled_BMV, config.top_k)
    scaled_BMV = min_p(top_p(scaled_BMV, config.top_p), config.min_p)
    return (scaled_BMV + noise_BMV).argmax(-1)


def _temperature(logits_BMV: Tensor, state: StepState) -> float | Tensor | None:
    """The temperature of each row, None for 1; where the schedule ends at 0, it stops short of dividing by it."""
    start, end = state.config.temperature, state.config.temperature_end
    if end is None:
        return None if start == 1 else start
    assert state.progress_B is not None, "a temperature that moves needs to know the progress"
    moved_B = start + (end - start) * state.progress_B.to(logits_BMV.dtype)
    return moved_B.clamp(min=1e-4)[:, None, None]


def entropy(logits_BMV: Tensor, lse_BM: Tensor) -> Tensor:
    """Entropy in nats (B, M); tokens of probability 0 add nothing."""
    logp_BMV = logits_BMV - lse_BM[..., None]
    return -(logp_BMV.exp() * logp_BMV.clamp(min=torch.finfo(logp_BMV.dtype).min)).sum(-1)


def margin(logits_BMV: Tensor, lse_BM: Tensor) -> Tensor:
    """Probability of the likeliest token less that of the second (B, M); 1 with a single token."""
    best = logits_BMV.topk(min(2, logits_BMV.shape[-1]), -1).values
    probability = (best - lse_BM[..., None]).exp()
    return probability[..., 0] - probability[..., 1:].sum(-1)


def accept_best(score_BM: Tensor, masked_BM: Tensor, quota_B: Tensor) -> Tensor:
    """The masked positions of highest score, `quota_B` of each row; the leftmost among equals."""
    order = on_grid(score_BM).masked_fill(~masked_BM, NEVER).argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(score_BM.shape[-1], device=score_BM.device).expand_as(order)
    return _by_rank(order, rank < quota_B[:, None]) & masked_BM


def accept_threshold(probability_BM: Tensor, masked_BM: Tensor, threshold: float) -> Tensor:
    """Masked positions of at least this probability, and in any case the likeliest one."""
    one_B = torch.ones(len(probability_BM), dtype=torch.int64, device=probability_BM.device)
    return accept_best(probability_BM, masked_BM, one_B) | (masked_BM & (probability_BM >= threshold))


def accept_factor(probability_BM: Tensor, masked_BM: Tensor, factor: float) -> Tensor:
    """The n likeliest masked positions, n the largest with (n + 1)(1 − p_n) < factor, at least one."""
    order = on_grid(probability_BM).masked_fill(~masked_BM, NEVER).argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probability_BM.shape[-1], device=probability_BM.device)
    # The left side grows with n, so the positions that satisfy it are the first n.
    enough = (rank + 2) * (1 - probability_BM.gather(-1, order)) < factor
    return _by_rank(order, enough | (rank == 0)) & masked_BM


def accept_entropy_bound(entropy_BM: Tensor, masked_BM: Tensor, bound: float) -> Tensor:
    """Masked positions by rising entropy, as long as their sum less its largest term is within the bound."""
    order = on_grid(entropy_BM).masked_fill(~masked_BM, float("inf")).argsort(dim=-1, stable=True)
    rising = entropy_BM.gather(-1, order)
    # The largest term is the last one: what counts is the sum before it, which is 0 for the first position.
    return _by_rank(order, rising.cumsum(-1) - rising <= bound) & masked_BM


def on_grid(score_BM: Tensor) -> Tensor:
    """Scores rounded to a grid a little wider than rounding errors.

    Masks without a prefix all look alike: their scores differ by rounding only, which depends on the batch.
    Rounded, they tie, and the leftmost is taken.
    """
    steps = 2.0**36 if score_BM.dtype == torch.float64 else 2.0**18
    return (score_BM * steps).round() / steps


def _by_rank(order: Tensor, keep: Tensor) -> Tensor:
    """`keep` said of sorted positions, brought back to the positions' own order."""
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, keep)
