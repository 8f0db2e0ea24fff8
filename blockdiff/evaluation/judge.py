"""A judge reads texts and says how likely it finds each token.

Legend: B batch, L text length, M judged tokens, D width.

The judge is an autoregressive model of this package (block size 1), by default one trained on the same data. A model is
a mild judge of its own samples: the sweep says so where judge and judged are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdiff.core.objective import weighted_nll
from blockdiff.model.denoiser import Denoiser


@dataclass
class Passage:
    """A text to be judged.

    Attributes:
        given: ids that are read but not judged.
        new: ids that are judged.
    """

    given: list[int]
    new: list[int]


@dataclass
class Judgement:
    """What a judge says of one passage.

    Attributes:
        nats_M: −log p of each judged token given all before it, in nats.
        feature_D: mean of the judge's last hidden states over the judged tokens; None where nothing was judged.
    """

    nats_M: NDArray[np.float64]
    feature_D: NDArray[np.float64] | None


class Judge(Protocol):
    """Whatever can read passages of the vocabulary that the samples are made of."""

    def read(self, passages: Sequence[Passage]) -> list[Judgement]:
        """One judgement a passage, in order; a judgement does not depend on the other passages."""
        ...


@dataclass
class DenoiserJudge:
    """A denoiser of block size 1.

    Attributes:
        denoiser: trained with block size 1.
        seq_len: longest text it was trained on.
        batch_size: texts a forward pass.
    """

    denoiser: Denoiser
    seq_len: int
    batch_size: int = 16

    def read(self, passages: Sequence[Passage]) -> list[Judgement]:
        """Judges passages.

        Raises:
            ValueError: a passage is longer than the judge's context.
        """
        longest = max((len(p.given) + len(p.new) for p in passages), default=0)
        if longest > self.seq_len:
            raise ValueError(
                f"a text of {longest} tokens does not fit into the judge's seq_len={self.seq_len}: "
                "lower samples.prompt_tokens or samples.new_tokens, or take a judge with a longer context"
            )
        judgements: list[Judgement] = []
        for start in range(0, len(passages), self.batch_size):
            judgements += self._read_batch(passages[start : start + self.batch_size])
        return judgements

    @torch.no_grad()
    def _read_batch(self, passages: Sequence[Passage]) -> list[Judgement]:
        x0_BL, judged_BL = _pad(passages, self.denoiser.embedding.weight.device)
        chosen_M = judged_BL.flatten().nonzero().squeeze(-1)
        if not len(chosen_M):
            return [Judgement(np.zeros(0), None) for _ in passages]
        # At block size 1 every position is predicted from clean tokens alone: all of them are masked at once.
        xt_B1L = torch.full_like(x0_BL, self.denoiser.mask_id)[:, None]
        plan = self.denoiser.plan(torch.zeros_like(x0_BL), 1)
        hidden_MD = self.denoiser.hidden(xt_B1L, x0_BL, plan, chosen_M)
        weight_M = torch.ones(len(chosen_M), device=x0_BL.device)
        _, nats_M = weighted_nll(hidden_MD, self.denoiser.head_VD, x0_BL.flatten()[chosen_M], weight_M)
        counts = [len(passage.new) for passage in passages]
        return [
            Judgement(nats_m.double().cpu().numpy(), hidden_mD.double().mean(0).cpu().numpy() if len(nats_m) else None)
            for nats_m, hidden_mD in zip(nats_M.split(counts), hidden_MD.split(counts), strict=True)
        ]


def _pad(passages: Sequence[Passage], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens filled up behind each text, where nobody looks, and which of them are judged."""
    length = max(len(p.given) + len(p.new) for p in passages) or 1
    x0_BL = torch.zeros(len(passages), length, dtype=torch.int64)
    judged_BL = torch.zeros(len(passages), length, dtype=torch.bool)
    for row, passage in enumerate(passages):
        tokens = [*passage.given, *passage.new]
        x0_BL[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        judged_BL[row, len(passage.given) : len(tokens)] = True
    return x0_BL.to(device), judged_BL.to(device)
