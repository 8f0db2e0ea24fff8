"""The report of a sweep: report.html (self-contained), report.md, results.csv and plots, all from the same tables."""

from __future__ import annotations

import base64
import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from blockdiff.evaluation.config import Budget, SweepConfig
from blockdiff.evaluation.plots import draw_all
from blockdiff.evaluation.study import Study, collect
from blockdiff.evaluation.sweep import Model, Outcome
from blockdiff.evaluation.tables import (
    Table,
    coherence_table,
    failure_table,
    flat_rows,
    likelihood_table,
    speed_table,
)
from blockdiff.evaluation.verdict import verdict
from blockdiff.training.durable import write_text_durably


@dataclass
class Written:
    """The files of a report."""

    html: Path
    markdown: Path
    csv: Path
    plots: list[Path]


@dataclass
class Example:
    """What several samplers made of one prompt; `real` is how the text really went on."""

    prompt: str
    real: str | None
    texts: list[tuple[str, str]]


def write_report(config: SweepConfig, models: Sequence[Model], outcomes: Sequence[Outcome]) -> Written:
    """Writes the report of what is finished into the sweep's directory; failed cells are listed with their reasons."""
    study = collect(models, outcomes)
    directory = config.directory
    directory.mkdir(parents=True, exist_ok=True)
    plots = draw_all(study, directory)
    page = {
        "name": config.name,
        "verdict": verdict(study, config.tolerance),
        "facts": facts(config, study),
        "tables": _tables(study),
        "examples": examples(study),
    }
    written = Written(directory / "report.html", directory / "report.md", directory / "results.csv", plots)
    write_text_durably(written.html, _render("report.html.j2", page, [(p.stem, _inline(p)) for p in plots]))
    write_text_durably(written.markdown, _render("report.md.j2", page, [(p.stem, p.name) for p in plots]))
    write_text_durably(written.csv, _csv(flat_rows(study)))
    return written


def facts(config: SweepConfig, study: Study) -> list[str]:
    """What must be known to read any of the numbers."""
    said = [f"Written on {time.strftime('%Y-%m-%d')} by the sweep {config.name}."]
    numbers = [row.numbers for row in study.likelihoods] + [row.numbers for row in study.samples]
    if numbers:
        first = numbers[0]
        said.append(
            f"Corpus {first['corpus']}, vocabulary of {first['vocab_size']:,}, {first['parameters']:,} parameters, "
            f"seq_len {first['seq_len']}; a unigram model has {first['unigram_nats']:.3f} nats per token."
        )
    if config.checkpoints:
        said.append("The models were given as checkpoints; their budgets may differ.")
    elif config.budget is Budget.tokens:
        said.append("Equal tokens: all runs saw equally many windows; padding makes counted tokens differ a little.")
    else:
        said.append(
            "Equal compute: all runs took the operations of the smallest block size's run. Both streams are counted at "
            "block size 1 too, as they are computed here; a purely autoregressive trainer would need about half."
        )
    said.append("One training run a block size: what another seed would change is in no interval.")
    if study.samples:
        said.append(f"Prompts: {study.samples[0].numbers['passages']}.")
        judge = study.samples[0].numbers["config"]["judge"]
        if judge is None:
            said.append("There is no judge: no perplexity of samples was measured.")
        else:
            own = study.baseline is not None and study.baseline.path == judge
            mild = " It judges its own samples too, and mildly." if own else ""
            said.append(f"Judge: {study.judge or judge}.{mild}")
    shown = [row.model for row in study.likelihoods] + [row.model for row in study.samples]
    if any(model.block_size != model.trained_block_size for model in shown):
        said.append("Rows marked “trained at” use a block size that the model was not trained with.")
    return said


def examples(study: Study) -> list[Example]:
    """The first prompts and what became of them under each sampler, side by side."""
    if not study.samples:
        return []
    real = study.reference["prompted_examples"] if study.reference else []
    return [
        Example(
            first["prompt"],
            real[index]["text"] if index < len(real) else None,
            [
                (f"{row.model.label}, {row.sampler}", row.numbers["prompted_examples"][index]["text"])
                for row in study.samples
            ],
        )
        for index, first in enumerate(study.samples[0].numbers["prompted_examples"])
    ]


def _tables(study: Study) -> list[Table]:
    tables = []
    if study.likelihoods:
        tables.append(likelihood_table(study))
    if study.samples:
        tables += [coherence_table(study, "prompted"), coherence_table(study, "unprompted"), speed_table(study)]
    if study.failures:
        tables.append(failure_table(study))
    return tables


def _render(template: str, page: dict[str, Any], plots: list[tuple[str, str]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("blockdiff.evaluation"),
        autoescape=template.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _markdown_cell
    return environment.get_template(template).render(page, plots=plots)


def _markdown_cell(text: str) -> str:
    """Text that a Markdown table holds as it is."""
    return text.replace("|", "\\|").replace("\n", " ")


def _inline(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _csv(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
