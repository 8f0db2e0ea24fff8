"""blockdiff: train, sample and evaluate semi-autoregressive block diffusion language models.

    import blockdiff
    model = blockdiff.load("checkpoints/NAME")
    print(model.generate("def ", max_new_tokens=64)[0].text)

`load` needs neither Lightning nor Hydra. `generate`, `stream` and `score` are the same three things in one call, for a
model or the path of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdiff.api import LanguageModel, load
    from blockdiff.evaluation.likelihood import TextScore
    from blockdiff.sampling.batch import BlockEvent
    from blockdiff.sampling.report import Generation

__all__ = ["LanguageModel", "generate", "load", "score", "stream"]


def __getattr__(name: str) -> Any:
    """Loads PyTorch only when something is asked for, so that `blockdiff --help` answers at once."""
    if name in ("load", "LanguageModel"):
        from blockdiff import api

        return getattr(api, name)
    if name == "__version__":
        return metadata.version("blockdiff")
    raise AttributeError(f"module blockdiff has no attribute {name}")


def generate(model: LanguageModel | str, prompts: str | Sequence[str], **options: Any) -> list[Generation]:
    """`LanguageModel.generate` of a model or of the path of one."""
    return _model(model).generate(prompts, **options)


def stream(model: LanguageModel | str, prompt: str, **options: Any) -> Iterator[BlockEvent]:
    """`LanguageModel.stream` of a model or of the path of one."""
    return _model(model).stream(prompt, **options)


def score(model: LanguageModel | str, texts: str | Sequence[str], **options: Any) -> TextScore:
    """`LanguageModel.nelbo` of a model or of the path of one."""
    return _model(model).nelbo(texts, **options)


def _model(model: LanguageModel | str) -> LanguageModel:
    from blockdiff.api import LanguageModel, load

    return model if isinstance(model, LanguageModel) else load(model)
