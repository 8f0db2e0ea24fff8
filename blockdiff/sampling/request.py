"""What is asked for: a prompt that is continued, or a text with holes that are filled."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockdiff.sampling.config import SamplerConfig, Window


@dataclass
class Request:
    """One text to be made.

    Attributes:
        tokens: the given tokens; what stands in a hole is ignored.
        holes: (start, length) of each hole, rising and apart.
        new_tokens: tokens to make behind the given ones; None: as the sampler's `max_new_tokens` says.
        seed: of this request alone; None: the sampler's.
    """

    tokens: list[int]
    holes: list[tuple[int, int]] = field(default_factory=list)
    new_tokens: int | None = None
    seed: int | None = None

    @property
    def last_given(self) -> int:
        """Position of the last given token, −1 without one: text may end only behind it."""
        return max((position for position, free in enumerate(self.free()) if not free), default=-1)

    def free(self) -> list[bool]:
        """For each token whether it stands in a hole."""
        free = [False] * len(self.tokens)
        for start, length in self.holes:
            free[start : start + length] = [True] * length
        return free


def end_of(request: Request, config: SamplerConfig, seq_len: int) -> int:
    """Position behind the last token that is to be made."""
    if request.new_tokens is not None:
        new = request.new_tokens
    elif config.max_new_tokens is None:
        return max(seq_len, len(request.tokens))
    else:
        new = config.max_new_tokens
    if new:
        return len(request.tokens) + new
    return max((start + length for start, length in request.holes), default=0)


def check_request(request: Request, config: SamplerConfig, *, vocab_size: int, seq_len: int, index: int) -> None:
    """Raises a ValueError that says which prompt cannot be served, and why."""
    free = request.free()
    for position, token in enumerate(request.tokens):
        if not free[position] and not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt {index}: token {token} at position {position} is none of {vocab_size} known ones; "
                "was it encoded with another tokenizer?"
            )
    behind = 0
    for start, length in request.holes:
        if length < 1 or start < behind or start + length > len(request.tokens):
            raise ValueError(f"prompt {index}: hole ({start}, {length}) is empty, overlaps another or leaves the text")
        behind = start + length
    if request.holes and config.stop:
        raise ValueError(f"prompt {index}: stop strings do not apply to a text with holes; leave stop out")
    if not request.holes and request.new_tokens is not None and request.new_tokens < 1:
        raise ValueError(f"prompt {index}: new_tokens={request.new_tokens} must be at least 1 where there is no hole")
    if config.window is Window.error:
        _check_length(request, config, seq_len, index)


def _check_length(request: Request, config: SamplerConfig, seq_len: int, index: int) -> None:
    given, end = len(request.tokens), end_of(request, config, seq_len)
    if max(given, end) > seq_len:
        new = f" + max_new_tokens={end - given}" if end > given else ""
        what = f"prompt of {given} tokens{new} exceeds seq_len={seq_len}"
        raise ValueError(
            f"prompt {index}: {what}; shorten one of them, or set window=sliding to forget the oldest blocks"
        )
    if end == given and not request.holes:
        raise ValueError(
            f"prompt {index}: prompt of {given} tokens fills seq_len={seq_len} and leaves no room for new ones; "
            "shorten it, or set window=sliding"
        )
