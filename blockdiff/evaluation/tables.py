"""The tables of a report: built once, shown as HTML and as Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from blockdiff.evaluation.intervals import Interval
from blockdiff.evaluation.study import LikelihoodRow, SampleRow, Study, interval, perplexity

NOTHING = "–"


@dataclass
class Table:
    """A table.

    Attributes:
        title: above it.
        note: what a reader must know to read it.
        header: names of the columns.
        rows: as many cells each.
        emphasis: indices of rows that are no models: real and shuffled text.
    """

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]
    emphasis: list[int] = field(default_factory=list)


def likelihood_table(study: Study) -> Table:
    """Bounds, what they hide, and where blocks break."""
    header = [
        "model",
        "block size",
        "bound, nats/token",
        "noise ±, nats/token",
        "bound, bits/byte",
        "bound less autoregressive, nats/token",
        "true NLL, nats/token",
        "bound − true, nats/token",
        "border jump, nats",
        "left to right, nats/token",
        "training tokens",
        "training PFLOP",
        "training, s",
    ]
    true = study.likelihoods[0].numbers["true"] if study.likelihoods else None
    note = (
        "Brackets are 95 % intervals over validation windows. The bound is exact at block size 1. “True NLL” and "
        f"“bound − true” are on {true['windows']} of the windows: one number is exact, two are the ends of a bracket. "
        "The border jump is the left-to-right nats at the first token of a block less those inside, above the "
        "autoregressive model's at the same tokens."
        if true
        else ""
    )
    return Table("Likelihood", note, header, [_likelihood_cells(row, study) for row in study.likelihoods])


def _likelihood_cells(row: LikelihoodRow, study: Study) -> list[str]:
    numbers, seconds = row.numbers, study.training.get(row.model.label)
    exact = numbers["true"]["exact"]
    return [
        row.model.label,
        _block_size(row.model.block_size, row.model.trained_block_size),
        spread(row.nelbo, 4),
        number(numbers["noise_error"], 4),
        number(numbers["bits_per_byte"], 4),
        spread(row.difference, 4),
        spread(row.true_low, 4) if exact else f"{row.true_low.value:.4f} to {row.true_high.value:.4f}",
        spread(row.looseness, 4),
        spread(row.jump.to_interior if row.jump else None, 3),
        number(numbers["left_to_right"]["value"], 4),
        f"{numbers['train_tokens']:,}",
        f"{numbers['train_flops'] / 1e15:.3g}",
        number(seconds, 0),
    ]


def coherence_table(study: Study, kind: str) -> Table:
    """Every measure of samples in one row each, real and shuffled text in the same columns.

    Args:
        study: of the sweep.
        kind: ``prompted`` or ``unprompted``.
    """
    header = ["model", "sampler", "texts", "empty texts", "ended by end token", "judge perplexity, per judge token"]
    header += ["judge, bits/byte", "repeated 4-grams", "tokens in loops", "distinct 1- / 2- / 3-grams"]
    header += ["unigram entropy, nats", "4-gram overlap of samples", "copied tokens: mean, longest"]
    header += ["judge's border jump, nats", "the same in real text", "energy distance from real text"]
    python = any(row.numbers[kind]["parses"] is not None for row in study.samples)
    header += ["parses", "to last statement"] if python else []
    rows = []
    if study.reference is not None:
        rows.append(["real text", NOTHING, *_coherence_cells(study.reference[f"real_{kind}"], None, None, python)])
    for row in study.samples:
        ended, real = row.numbers[f"{kind}_ended"], row.numbers.get(f"{kind}_real_border_nats")
        cells = _coherence_cells(row.numbers[kind], ended, real, python)
        rows.append([row.model.label, row.sampler, *cells])
    if study.reference is not None:
        rows.append(["shuffled", NOTHING, *_coherence_cells(study.reference[f"shuffled_{kind}"], None, None, python)])
    note = (
        f"{_judge_note(study)}Real text is the ceiling, its shuffled tokens the floor. Nothing was filtered or drawn "
        "again. A model that repeats itself has a low judge perplexity, so read that column with the next ones. "
        "Distinct n-grams and overlap depend on how much text there is: compare rows, not reports. The energy distance "
        "is from other real text and may fall below 0 by chance."
    )
    return Table(f"Coherence, {kind}", note, header, rows, [0, len(rows) - 1] if study.reference is not None else [])


def _judge_note(study: Study) -> str:
    """Who judged: a perplexity means nothing without the tokens it is of."""
    if not study.judge:
        return ""
    return (
        f"Judge: {study.judge}. Its perplexity is per token of its own and compares under this judge only; bits per "
        "byte are one unit for all judges. "
    )


def _coherence_cells(row: dict[str, Any], ended: float | None, real: dict[str, Any] | None, python: bool) -> list[str]:
    nats = interval(row["judge_nats"])
    judged = Interval(perplexity(nats.value), perplexity(nats.low), perplexity(nats.high))
    cells = [
        str(row["texts"]),
        str(row["empty"]),
        share(ended),
        spread(judged, 2),
        # Cells of older versions lack it; a sweep is not measured again for one column.
        spread(interval(row["judge_bits_per_byte"]) if "judge_bits_per_byte" in row else None, 3),
        share(row["repeated_4"]),
        share(row["loops"]),
        " / ".join(number(row[f"distinct_{order}"], 3) for order in (1, 2, 3)),
        number(row["unigram_entropy"], 2),
        number(row["self_overlap"], 4),
        f"{number(row['match_mean'], 1)}, {row['match_longest']}",
        spread(interval(row["border_nats"]), 2),
        spread(None if real is None else interval(real), 2),
        number(row["energy_distance"], 3),
    ]
    return [*cells, share(row["parses"]), share(row["parses_to_last"])] if python else cells


def speed_table(study: Study) -> Table:
    """Speed of each sampler at each batch size, with the protocol in the note."""
    header = ["model", "sampler", "batch size", "output tokens/s", "one stream, tokens/s", "first block, ms"]
    header += ["request p50 / p95, ms", "NFE a request (commits)", "tokens a forward", "KV cache, MiB"]
    header += ["peak memory, MiB"]
    rows = [
        _speed_cells(row, speed)
        for row in study.samples
        for speed in sorted(row.numbers["speed"], key=lambda speed: speed["batch_size"])
    ]
    protocols = {protocol_line(row.numbers["protocol"]) for row in study.samples}
    note = " | ".join(sorted(protocols))
    if len(protocols) > 1:
        note = f"Rows were measured under {len(protocols)} different protocols and must not be compared: {note}"
    return Table("Speed", note, header, rows)


def protocol_line(protocol: dict[str, Any]) -> str:
    """The speed protocol in one line: what two reports must share to be compared."""
    return (
        f"{protocol['device']} ({protocol['device_type']}), {protocol['precision']}, {protocol['threads']} threads, "
        f"torch {protocol['torch']}; {protocol['prompts']} prompts of {protocol['shortest_prompt']} to "
        f"{protocol['longest_prompt']} tokens (not counted), {protocol['new_tokens']} new tokens each, seq_len "
        f"{protocol['seq_len']}; median of {protocol['repeats']} runs (smallest to largest)"
    )


def _speed_cells(row: SampleRow, speed: dict[str, Any]) -> list[str]:
    low, high = speed["tokens_per_second_spread"]
    return [
        row.model.label,
        row.sampler,
        str(speed["batch_size"]),
        f"{speed['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})",
        f"{speed['stream_tokens_per_second']:,.0f}",
        number(speed["ttft_ms"], 1),
        f"{speed['latency_p50_ms']:,.0f} / {speed['latency_p95_ms']:,.0f}",
        f"{speed['nfe']:.1f} ({speed['commit_nfe']:.1f})",
        number(speed["tokens_per_forward"], 2),
        number(speed["cache_mib"], 1),
        number(speed["peak_mib"], 0),
    ]


def failure_table(study: Study) -> Table:
    """Cells that have no numbers, and why."""
    rows = [[outcome.cell.name, outcome.failure or "not run"] for outcome in study.failures]
    return Table("Failed cells", "They are tried again when the same command is given again.", ["cell", "reason"], rows)


def flat_rows(study: Study) -> list[dict[str, Any]]:
    """One flat row a model and sampler for results.csv, in full precision: likelihood, coherence and speed."""
    rows = []
    likelihood = {row.model.label: row for row in study.likelihoods}
    for sample in study.samples:
        row: dict[str, Any] = {
            "model": sample.model.label,
            "block_size": sample.model.block_size,
            "trained_block_size": sample.model.trained_block_size,
            "sampler": sample.sampler,
        }
        if found := likelihood.get(sample.model.label):
            row |= _flat_likelihood(found)
        for kind in ("prompted", "unprompted"):
            row |= _flat(sample.numbers[kind], f"{kind}_")
        for speed in sample.numbers["speed"]:
            row |= _flat({k: v for k, v in speed.items() if k != "batch_size"}, f"batch_{speed['batch_size']}_")
        rows.append(row)
    return rows


def _flat_likelihood(row: LikelihoodRow) -> dict[str, Any]:
    numbers = row.numbers
    flat = _flat({key: numbers[key] for key in ("nelbo", "noise_error", "bits_per_byte", "true", "left_to_right")}, "")
    flat |= {key: numbers[key] for key in ("train_tokens", "train_flops", "parameters")}
    if row.difference is not None:
        flat |= _flat({"less_autoregressive": vars(row.difference)}, "")
    if row.jump is not None:
        flat |= _flat({"border_jump": vars(row.jump.to_interior)}, "")
    return flat


def _flat(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}_")
        elif isinstance(value, list):
            flat |= {f"{prefix}{key}_{index}": item for index, item in enumerate(value)}
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """A share in per cent."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.1%}"


def spread(value: Interval | None, digits: int) -> str:
    """A value with its interval."""
    if value is None or not math.isfinite(value.value):
        return NOTHING
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _block_size(size: int, trained: int) -> str:
    return str(size) if size == trained else f"{size} (trained at {trained})"
