"""What `blockdiff sample` does: prompts in from the command line, a file or standard input, texts out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from blockdiff.api import LanguageModel, load
from blockdiff.commands import trained_block_size, weights_name
from blockdiff.config import SampleConfig
from blockdiff.sampling.batch import BlockEvent
from blockdiff.sampling.infill import parse
from blockdiff.sampling.record import Recorder
from blockdiff.sampling.report import Generation, Report
from blockdiff.sampling.sampler import Run, run
from blockdiff.sampling.trace import check_trace, write_trace
from blockdiff.sampling.watch import Watch


def run_sample(config: SampleConfig) -> int:
    """Writes a text for each prompt to standard output or a file; figures go to standard error."""
    prompts = [prompt for prompt in read_prompts(config) for _ in range(config.count)]
    model = load(config.checkpoint, config.device, weights_name(config.weights), config.dtype)
    size = trained_block_size(model, config.block_size, config.allow_untrained_block_size)
    notes = Console(stderr=True)
    if size != model.config.block_size:
        notes.print(f"block_size={size} was not trained: this model knows blocks of {model.config.block_size}")
    result = _run(config, model, size, prompts, notes)
    if not config.watch or config.output:
        with _output(config.output) as file:
            for prompt, generation in zip(prompts, result.generations, strict=True):
                file.write(_line(config, model, prompt, generation))
    notes.print(_figures(result.report, config, model, size))
    return 0


def _run(config: SampleConfig, model: LanguageModel, block_size: int, prompts: list[str], notes: Console) -> Run:
    """Samples, with as much to look at as was asked for."""
    requests = [parse(prompt, model.tokenizer) for prompt in prompts]
    recorder = Recorder() if config.trace else None
    if config.trace:
        check_trace(Path(config.trace))
    if config.watch:
        with Watch(requests, model.tokenizer, recorder=recorder) as view:
            result = run(
                model.denoiser,
                requests,
                config.sampler,
                **model.place(block_size),
                on_step=view.step,
                progress=view.block,
                text_by_block=True,
            )
    else:
        on_step = recorder.step if recorder else None
        with _progress(notes, len(prompts)) as progress:
            result = run(
                model.denoiser,
                requests,
                config.sampler,
                **model.place(block_size),
                on_step=on_step,
                progress=progress,
            )
    if recorder is not None and config.trace:
        write_trace(Path(config.trace), recorder, requests, model.tokenizer, title=model.path.parent.name)
        notes.print(f"replay: {config.trace}")
    return result


def read_prompts(config: SampleConfig) -> list[str]:
    """The prompts of the command line, of a file (one a line, or JSON Lines with the key ``prompt``) or of stdin.

    Raises:
        ValueError: the file is missing or empty, or a line is no JSON object with a prompt; names file and line.
    """
    if config.prompts is None:
        given = config.prompt if isinstance(config.prompt, list) else [config.prompt]
        return [str(prompt) for prompt in given]
    if config.prompts == "-":
        name, text = "standard input", sys.stdin.read()
    else:
        path = Path(config.prompts)
        if not path.is_file():
            raise ValueError(
                f"prompts={path} does not exist: name a file with one prompt a line, or - for standard input"
            )
        try:
            name, text = str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts={path} is not UTF-8 at byte {error.start}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} holds no prompt: write one a line")
    if not name.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_json_prompt(name, number, line) for number, line in lines]


def _json_prompt(name: str, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(f'{name}, line {number}: {line[:60]} is no JSON object with a text under "prompt"')
    return prompt


def _line(config: SampleConfig, model: LanguageModel, prompt: str, generation: Generation) -> str:
    if config.format == "text":
        filled = bool(generation.holes)
        return f"{'' if filled else prompt}{generation.text}\n" + ("---\n" if _many(config) else "")
    record = {
        "prompt": prompt,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "new_tokens": generation.new_tokens,
        "nfe": generation.nfe,
        "commit_nfe": generation.commit_nfe,
        "ttft_s": generation.ttft_s,
        "seconds": generation.seconds,
        "checkpoint": str(model.path),
        "step": model.step,
    }
    if generation.logprobs is not None:
        record |= {"logprobs": generation.logprobs, "steps": generation.steps}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _many(config: SampleConfig) -> bool:
    return config.count > 1 or config.prompts is not None or isinstance(config.prompt, list)


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with Path(path).open("w", encoding="utf-8") as file:
        yield file


@contextmanager
def _progress(console: Console, prompts: int) -> Iterator[Callable[[BlockEvent], None] | None]:
    """A bar over many prompts; nothing where there is one, or no terminal to draw on."""
    if prompts < 2 or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=prompts)

        def advance(event: BlockEvent) -> None:
            if event.generation is not None:
                bar.advance(task)

        yield advance


def _figures(report: Report, config: SampleConfig, model: LanguageModel, block_size: int) -> Table:
    """What the run cost, under the conditions that it depends on."""
    weight = model.denoiser.embedding.weight
    where = f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}, block size {block_size}"
    table = Table("", "", show_header=False, title=f"{config.sampler.rule.name}, {where}", title_justify="left")
    for name, value in report.lines():
        table.add_row(name, value)
    return table
