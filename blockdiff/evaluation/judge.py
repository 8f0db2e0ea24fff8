"""A judge reads texts and says how likely it finds each token.

Legend: B batch, L text length, M judged tokens, D width.

By default it is an autoregressive model of this package (block size 1), trained on the same data. A model is a mild
judge of its own samples: the report says so where judge and judged are one. Any other causal model may judge too, in
tokens of its own (`blockdiff.evaluation.text_judge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blockdiff.core.objective import weighted_nll
from blockdiff.data.tokenizer import Tokenizer
from blockdiff.evaluation.passages import Passage, pad_passages
from blockdiff.model.denoiser import Denoiser


@dataclass
class Judgement:
    """What a judge says of one passage, in its own tokens.

    Attributes:
        nats_M: −log p of each judged token given all before it, in nats.
        place_M: the passage's token in which each judged token begins, counted from the first given one.
        byte_count: UTF-8 bytes of the judged text.
        feature_D: mean of the judge's last hidden states, those that predict the judged tokens; None where nothing was
            judged.
    """

    nats_M: NDArray[np.float64]
    place_M: NDArray[np.int64]
    byte_count: int
    feature_D: NDArray[np.float64] | None

    @classmethod
    def empty(cls) -> Judgement:
        """Of a passage without anything to judge."""
        return cls(np.zeros(0), np.zeros(0, np.int64), 0, None)


class Judge(Protocol):
    """Whatever can read passages of the vocabulary that the samples are made of."""

    @property
    def description(self) -> str:
        """Who judges, and in which tokens: what a table must say beside the numbers."""
        ...

    def read(self, passages: Sequence[Passage]) -> list[Judgement]:
        """One judgement a passage, in order; a judgement does not depend on the other passages."""
        ...


@dataclass
class DenoiserJudge:
    """A denoiser of block size 1.

    Attributes:
        denoiser: trained with block size 1.
        tokenizer: its own and the passages'.
        seq_len: longest text it was trained on.
        name: for reports.
        batch_size: texts a forward pass.
    """

    denoiser: Denoiser
    tokenizer: Tokenizer
    seq_len: int
    name: str = "a model of this package"
    batch_size: int = 16

    @property
    def description(self) -> str:
        """Who judges, and in which tokens."""
        return (
            f"{self.name}, a model of block size 1 with the tokenizer of the samples (vocabulary of "
            f"{self.tokenizer.vocab_size:,}), trained on texts of {self.seq_len:,} tokens"
        )

    def read(self, passages: Sequence[Passage]) -> list[Judgement]:
        """Judges passages.

        Raises:
            ValueError: a passage is longer than the judge's context.
        """
        longest = max((len(passage.tokens) for passage in passages), default=0)
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
        x0_BL, _, judged_BL = pad_passages(passages, self.denoiser.embedding.weight.device)
        chosen_M = judged_BL.flatten().nonzero().squeeze(-1)
        if not len(chosen_M):
            return [Judgement.empty() for _ in passages]
        # At block size 1 every position is predicted from clean tokens alone: all of them are masked at once.
        xt_B1L = torch.full_like(x0_BL, self.denoiser.mask_id)[:, None]
        plan = self.denoiser.plan(torch.zeros_like(x0_BL), 1)
        hidden_MD = self.denoiser.hidden(xt_B1L, x0_BL, plan, chosen_M)
        weight_M = torch.ones(len(chosen_M), device=x0_BL.device)
        _, nats_M = weighted_nll(hidden_MD, self.denoiser.head_VD, x0_BL.flatten()[chosen_M], weight_M)
        counts = [len(passage.new) for passage in passages]
        parts = zip(passages, nats_M.split(counts), hidden_MD.split(counts), strict=True)
        return [
            Judgement(
                nats_m.double().cpu().numpy(),
                len(passage.given) + np.arange(len(passage.new)),
                len(self.tokenizer.decode(passage.new).encode()),
                hidden_mD.double().mean(0).cpu().numpy(),
            )
            if passage.new
            else Judgement.empty()
            for passage, nats_m, hidden_mD in parts
        ]
