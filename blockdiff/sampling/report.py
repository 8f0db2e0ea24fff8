"""What a request cost: counted where it happens, never estimated.

NFE counts every call of the denoiser that the row took part in. `commit_nfe` of them only wrote keys and
values (prefill); a pass that commits one block and denoises the next is one call and counts once. The last
block of a row is never committed: nobody reads it. A row whose block is settled while others go on takes part
in no call. Tokens a second leave out the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Finish(Enum):
    eos = "eos"
    """The end of text was drawn."""
    stop = "stop"
    """A stop string was met."""
    length = "length"
    """All tokens asked for are made."""
    window = "window"
    """seq_len is full, and no number of tokens was asked for."""
    cancelled = "cancelled"
    """The caller went away."""


@dataclass
class Generation:
    """One finished text.

    Attributes:
        text: of the new tokens; of a text with holes, the whole of it.
        token_ids: the new tokens (of a text with holes, all of it), end of text and stop string left out; a
            token that straddles the beginning of the stop string stays.
        nfe: calls of the denoiser that the row took part in.
        finish_reason: eos | stop | length | window | cancelled.
        prompt_tokens: given tokens.
        new_tokens: tokens made.
        commit_nfe: calls that only committed.
        holes: ids that fill each hole.
        logprobs: on request, log-probability of each new token when it was fixed, in nats, by the model at
            temperature 1.
        steps: on request, the how-many-th call of its block fixed each new token.
        queue_s: seconds from being handed in to a place in the batch.
        ttft_s: seconds from a place in the batch to the first finished block.
        block_seconds: seconds of each block, prefill included.
    """

    text: str
    token_ids: list[int]
    nfe: int
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    commit_nfe: int = 0
    holes: list[list[int]] = field(default_factory=list)
    logprobs: list[float] | None = None
    steps: list[int] | None = None
    queue_s: float = 0.0
    ttft_s: float = 0.0
    block_seconds: list[float] = field(default_factory=list)

    @property
    def denoise_nfe(self) -> int:
        """Calls that denoised, whether or not they committed the block before."""
        return self.nfe - self.commit_nfe

    @property
    def tokens_per_forward(self) -> float:
        """New tokens a call, commits included."""
        return self.new_tokens / max(self.nfe, 1)

    @property
    def seconds(self) -> float:
        """Seconds in the batch."""
        return sum(self.block_seconds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second in the batch; the prompt counts as time, not as tokens."""
        return self.new_tokens / max(self.seconds, 1e-12)


@dataclass
class Report:
    """All requests of one run together.

    Attributes:
        requests: their number.
        prompt_tokens: given tokens.
        new_tokens: tokens made.
        nfe: sum over rows of the calls each took part in.
        commit_nfe: those that only committed.
        calls: calls that were really made: one call serves many rows.
        seconds: wall time.
        cache_bytes: of the preallocated keys and values, the peak.
        ttft_s: of each request, queue left out.
        block_seconds: of all blocks of all requests.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    nfe: int
    commit_nfe: int
    calls: int
    seconds: float
    cache_bytes: int
    ttft_s: list[float]
    block_seconds: list[float]

    @property
    def tokens_per_forward(self) -> float:
        """New tokens a row-call."""
        return self.new_tokens / max(self.nfe, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows a second of wall time."""
        return self.new_tokens / max(self.seconds, 1e-12)

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each figure, for a table."""
        return [
            ("requests", f"{self.requests:,}"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("new tokens", f"{self.new_tokens:,}"),
            ("NFE, denoise + commit", f"{self.nfe - self.commit_nfe:,} + {self.commit_nfe:,}"),
            ("calls of the denoiser", f"{self.calls:,}"),
            ("tokens a forward", f"{self.tokens_per_forward:.2f}"),
            ("tokens a second", f"{self.tokens_per_second:,.1f}"),
            ("first block, median", f"{median(self.ttft_s) * 1e3:,.0f} ms"),
            ("a block, median", f"{median(self.block_seconds) * 1e3:,.0f} ms"),
            ("KV cache", f"{self.cache_bytes / 2**20:,.1f} MiB"),
        ]


def report(generations: Sequence[Generation], *, calls: int, seconds: float, cache_bytes: int) -> Report:
    """Adds up a run."""
    return Report(
        requests=len(generations),
        prompt_tokens=sum(g.prompt_tokens for g in generations),
        new_tokens=sum(g.new_tokens for g in generations),
        nfe=sum(g.nfe for g in generations),
        commit_nfe=sum(g.commit_nfe for g in generations),
        calls=calls,
        seconds=seconds,
        cache_bytes=cache_bytes,
        ttft_s=[g.ttft_s for g in generations],
        block_seconds=[s for g in generations for s in g.block_seconds],
    )


def median(values: Sequence[float]) -> float:
    """The upper median; 0 of nothing."""
    return sorted(values)[len(values) // 2] if values else 0.0
