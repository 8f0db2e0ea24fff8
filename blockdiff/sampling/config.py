"""How text is sampled: the step rule, the logit rules, where a row stops, how rows are batched."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Rule(Enum):
    """Which masked positions of a block a step fixes. Each rule fixes at least one a call of the denoiser."""

    ancestral = "ancestral"
    """The reverse process on a uniform grid of `steps` times: an exact sampler as the grid grows finer."""
    first_hitting = "first_hitting"
    """One uniformly chosen position a step (Zheng et al., 2024): the exact sampler of the continuous-time
    process."""
    confidence = "confidence"
    """All positions whose token has a probability of at least `threshold`, and the best one (Wu et al.,
    2025)."""
    fixed = "fixed"
    """`tokens_per_step` positions, in the order that `order` says."""
    factor = "factor"
    """The n most confident positions, the largest n with (n + 1)(1 − p_n) < `factor` (Fast-dLLM, Wu et al.,
    2025)."""
    entropy_bound = "entropy_bound"
    """The positions of lowest entropy, as long as Σ H − max H ≤ `entropy_bound` nats (Ben-Hamu et al.,
    2025)."""


class Order(Enum):
    """Which positions `rule=fixed` takes first."""

    confidence = "confidence"
    margin = "margin"
    entropy = "entropy"
    random = "random"
    left_to_right = "left_to_right"


class Precision(Enum):
    fast = "fast"
    """Softmax and Gumbel noise in the logits' precision, at least single."""
    exact = "exact"
    """Both in double precision over the whole vocabulary."""


class Window(Enum):
    error = "error"
    """Refuse, before any work, what does not fit into seq_len."""
    sliding = "sliding"
    """Forget the oldest blocks when the window is full; see `SamplerConfig.window_keep`."""


@dataclass
class SamplerConfig:
    """How text is sampled.

    Attributes:
        rule: which positions a step fixes.
        threshold: of rule=confidence, a probability.
        order: of rule=fixed.
        tokens_per_step: of rule=fixed; None means 1, or what `steps` asks for.
        steps: steps a block: the time grid of rule=ancestral (None: one a position), or what rule=fixed
            spreads a block's masked positions over.
        factor: of rule=factor; larger is faster.
        entropy_bound: of rule=entropy_bound, in nats; larger is faster.
        temperature: logits are divided by it before a token is drawn; 0 takes the likeliest token.
        temperature_end: temperature when a block's last token is fixed; linear in the share of fixed
            positions. None: constant.
        top_k: draw from the k likeliest tokens; None: all.
        top_p: draw from the smallest set of tokens that holds this mass, the crossing token included.
        min_p: leave out tokens less likely than this share of the likeliest one.
        repetition_penalty: divides (multiplies, where negative) the logits of tokens in the row's text
            (Keskar et al., 2019); 1 is off.
        banned_tokens: ids that are never drawn.
        remask: η in [0, 1): tokens fixed in this block are masked and drawn again
            (`blockdiff.sampling.remask`); 0 is off.
        max_new_tokens: where a row stops; None: at seq_len.
        stop: strings that end a row; the text is cut before the first one.
        batch_size: rows that are denoised together.
        seed: of all noise.
        precision: of softmax and noise.
        window: what happens when prompt and new tokens exceed seq_len.
        window_keep: tokens, a multiple of block_size, that window=sliding keeps when the window is full: they
            are read again as positions 0, 1, …, and generation goes on behind them. None: half of seq_len.
        logprobs: report each token's log-probability, and step, when it was fixed.
        compile: run the denoiser's cached pass through torch.compile.
        pack: keep a second copy of the weights, in the layout of the CPU's kernels, while sampling in single precision
            on an x86 CPU: faster, but twice the memory for weights. Elsewhere, and with `compile`, it does nothing.
    """

    rule: Rule = Rule.confidence
    threshold: float = 0.9
    order: Order = Order.confidence
    tokens_per_step: int | None = None
    steps: int | None = None
    factor: float = 1.0
    entropy_bound: float = 0.1
    temperature: float = 1.0
    temperature_end: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned_tokens: list[int] = field(default_factory=list)
    remask: float = 0.0
    max_new_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    batch_size: int = 16
    seed: int = 0
    precision: Precision = Precision.fast
    window: Window = Window.error
    window_keep: int | None = None
    logprobs: bool = False
    compile: bool = False
    pack: bool = True

    def check(self, block_size: int, seq_len: int, vocab_size: int) -> None:
        """Raises a ValueError that names key, value, rule and remedy."""
        self._check_rule()
        self._check_logit_rules(vocab_size)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1; null means up to seq_len")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1 row")
        if any(not text for text in self.stop):
            raise ValueError(f"stop={self.stop} holds an empty string, which would stop every row at once")
        self._check_window(block_size, seq_len)

    def _check_rule(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold={self.threshold} is a probability: it must lie in [0, 1], such as 0.9")
        for key, users in (("steps", (Rule.ancestral, Rule.fixed)), ("tokens_per_step", (Rule.fixed,))):
            value = getattr(self, key)
            if value is None:
                continue
            if value < 1:
                raise ValueError(f"{key}={value} must be at least 1")
            if self.rule not in users:
                names = " or ".join(f"rule={rule.value}" for rule in users)
                raise ValueError(
                    f"{key}={value} has no effect with rule={self.rule.value}; leave it out or set {names}"
                )
        if self.steps is not None and self.tokens_per_step is not None:
            raise ValueError(
                f"steps={self.steps} and tokens_per_step={self.tokens_per_step} both pace rule=fixed; set one"
            )
        if self.factor <= 0:
            raise ValueError(f"factor={self.factor} must be positive; 1.0 is a cautious start")
        if self.entropy_bound < 0:
            raise ValueError(f"entropy_bound={self.entropy_bound} must be at least 0 nats; 0 fixes one token a step")
        if not 0.0 <= self.remask < 1.0:
            raise ValueError(f"remask={self.remask} must lie in [0, 1): at 1 a block would never end")

    def _check_logit_rules(self, vocab_size: int) -> None:
        for key in ("temperature", "temperature_end"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value < float("inf"):
                raise ValueError(f"{key}={value} must be at least 0; 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; null keeps all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 keeps all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]; 0 keeps all tokens")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive; 1 is off")
        for token in self.banned_tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"banned_tokens holds {token}, but token ids go from 0 to {vocab_size - 1}")
        if len(set(self.banned_tokens)) == vocab_size:
            raise ValueError(f"banned_tokens bans all {vocab_size} tokens of the vocabulary; leave at least one")

    def _check_window(self, block_size: int, seq_len: int) -> None:
        if self.window is Window.error:
            if self.window_keep is not None:
                raise ValueError(
                    f"window_keep={self.window_keep} has no effect with window=error; leave it out or use sliding"
                )
            return
        if self.max_new_tokens is None:
            raise ValueError("window=sliding has no end of its own: set max_new_tokens")
        if seq_len // block_size < 2:
            raise ValueError(
                f"window=sliding needs at least two blocks in seq_len={seq_len}, but block_size={block_size}; "
                "use a smaller block_size"
            )
        keep = self.kept_tokens(block_size, seq_len)
        if not 0 < keep < seq_len or keep % block_size:
            raise ValueError(
                f"window_keep={keep} must be a multiple of block_size={block_size} between {block_size} and "
                f"{seq_len - block_size}"
            )

    def kept_tokens(self, block_size: int, seq_len: int) -> int:
        """Tokens that a full sliding window keeps."""
        if self.window_keep is not None:
            return self.window_keep
        return max(seq_len // 2 // block_size, 1) * block_size
