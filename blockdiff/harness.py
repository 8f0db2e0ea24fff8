"""blockdiff models in EleutherAI's lm-evaluation-harness (extra `eval`).

    import lm_eval, blockdiff.harness
    lm_eval.simple_evaluate(model=blockdiff.harness.BlockDiffusionLM("checkpoints/demo"), tasks=["lambada_openai"])

or, once this module is imported, by the name ``blockdiff`` with ``model_args={"checkpoint": "checkpoints/demo"}``.

Log-likelihoods are lower bounds (the negative ELBO, an estimate over `views` noise draws) except at block size 1, where
they are exact: choices of one task are compared by bounds that may be loose to different degrees, and perplexities are
upper bounds. `get_model_info` says so in the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from blockdiff.api import load
from blockdiff.core.blocks import check_block_size
from blockdiff.evaluation.likelihood import score_continuations
from blockdiff.evaluation.passages import Passage, rolling_windows
from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.report import Generation
from blockdiff.sampling.request import Request
from blockdiff.sampling.sampler import run


@register_model("blockdiff")
class BlockDiffusionLM(LM):
    """A run of blockdiff as the harness sees it."""

    def __init__(
        self,
        checkpoint: str,
        block_size: int | None = None,
        views: int = 16,
        batch_size: int | str | None = 16,
        device: str | None = "auto",
        greedy: bool = True,
        rule: str = "confidence",
        **sampler: Any,
    ) -> None:
        """Args:
            checkpoint: run directory or .ckpt file.
            block_size: None means the one trained with.
            views: noise draws of each likelihood, at least 2.
            batch_size: texts a forward pass; changes no result.
            device: ``auto``, ``cpu``, ``cuda`` …
            greedy: also find out whether each continuation is the one that greedy sampling from left to right gives,
                which takes a call a token; False says no to all.
            rule, sampler: how `generate_until` samples, as in `SamplerConfig`; at temperature 0, the harness's default,
                rules that draw no positions give one text.

        Raises:
            ValueError: as `blockdiff.load`, or a bad option.
        """
        super().__init__()
        if views < 2:
            raise ValueError(f"views={views} must be at least 2: one draw has no standard error")
        self.model = load(checkpoint, device or "auto")
        self.block_size = self.model.config.block_size if block_size is None else block_size
        check_block_size(self.block_size, self.model.config.seq_len)
        self.views, self.greedy = views, greedy
        self.rows = batch_size if isinstance(batch_size, int) else 16
        self._sampler = {"rule": rule, "batch_size": self.rows, **sampler}
        self.model.sampler(**self._sampler)

    def get_model_info(self) -> dict[str, Any]:
        """What stands in the results' header."""
        exact = self.block_size == 1
        kind = "exact" if exact else f"lower bound (negative ELBO, {self.views} noise draws)"
        return {
            "checkpoint": str(self.model.path),
            "block_size": self.block_size,
            "trained_block_size": self.model.config.block_size,
            "log_likelihood": kind,
            "perplexity": "exact" if exact else "upper bound",
        }

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(bound of log p(continuation | context) in nats, whether greedy sampling gives the continuation)."""
        passages = [self._pair(*request.args) for request in requests]
        nats = self._nats(passages)
        hits = self._greedy_hits(passages) if self.greedy else [False] * len(passages)
        return [(-value, hit) for value, hit in zip(nats, hits, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Bound of log p(text) in nats; behind seq_len tokens half a window at a time, with the half before given."""
        texts = [Passage([], self._encode(request.args[0])) for request in requests]
        windows = [rolling_windows(text, self.model.config.seq_len) for text in texts]
        nats = iter(self._nats([passage for passages in windows for passage in passages]))
        return [-sum(next(nats) for _ in passages) for passages in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues contexts up to the first of their stop strings; requests with equal settings share a batch."""
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        for indices in groups.values():
            for index, text in zip(indices, self._generate([requests[i] for i in indices]), strict=True):
                texts[index] = text
        return [texts[index] for index in range(len(requests))]

    def _generate(self, requests: Sequence[Instance]) -> list[str]:
        settings = requests[0].args[1]
        stop = settings.get("until") or []
        new = int(settings.get("max_gen_toks", 64))
        sampled = settings.get("do_sample", False) or float(settings.get("temperature", 0.0)) > 0
        temperature = float(settings.get("temperature", 1.0)) if sampled else 0.0
        sampler = self.model.sampler(
            **self._sampler,
            stop=[stop] if isinstance(stop, str) else list(stop),
            max_new_tokens=new,
            temperature=temperature,
        )
        room = max(self.model.config.seq_len - new, 0)
        prompts = [self._encode(request.args[0])[-room:] if room else [] for request in requests]
        return [generation.text for generation in self._run([Request(ids) for ids in prompts], sampler)]

    def _nats(self, passages: list[Passage]) -> list[float]:
        bounds = score_continuations(
            self.model.denoiser,
            passages,
            seq_len=self.model.config.seq_len,
            block_size=self.block_size,
            views=self.views,
            micro_batch_size=self.rows,
        )
        return [bound.nats for bound in bounds]

    def _greedy_hits(self, passages: list[Passage]) -> list[bool]:
        sampler = self.model.sampler(
            rule=Rule.fixed, order=Order.left_to_right, temperature=0.0, batch_size=self.rows, max_new_tokens=None
        )
        length = self.model.config.seq_len
        fitting = [i for i, p in enumerate(passages) if 0 < len(p.new) < length]
        asked = [
            Request(passages[i].given[-(length - len(passages[i].new)) :], new_tokens=len(passages[i].new))
            for i in fitting
        ]
        found = dict(zip(fitting, self._run(asked, sampler), strict=True))
        return [i in found and found[i].token_ids == passage.new for i, passage in enumerate(passages)]

    def _run(self, requests: list[Request], sampler: SamplerConfig) -> list[Generation]:
        if not requests:
            return []
        return run(
            self.model.denoiser,
            requests,
            sampler,
            block_size=self.block_size,
            seq_len=self.model.config.seq_len,
            tokenizer=self.model.tokenizer,
        ).generations

    def _pair(self, context: str, continuation: str) -> Passage:
        """Ids of both, cut where the context's own ids end; its trailing white space belongs to the continuation."""
        kept = context.rstrip()
        whole = self._encode(kept + context[len(kept) :] + continuation)
        cut = len(self._encode(kept))
        return Passage(whole[:cut], whole[cut:])

    def _encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text)
