"""The live view, its plain twin, and the replay."""

import io
import json
import re
from pathlib import Path

import pytest
from oracle import ByteTokenizer, OracleDenoiser, says
from rich.console import Console

from blockdiff.sampling.config import Order, Rule, SamplerConfig
from blockdiff.sampling.record import Recorder, show_token
from blockdiff.sampling.request import Request
from blockdiff.sampling.sampler import run
from blockdiff.sampling.trace import write_trace
from blockdiff.sampling.watch import Watch, step_style

TEXT = list(b"def f(x):\n    return [x, <x>]\n   ")
LEFT_TO_RIGHT = SamplerConfig(rule=Rule.fixed, order=Order.left_to_right, tokens_per_step=4, temperature=0.0)


def oracle() -> OracleDenoiser:
    return OracleDenoiser(says(TEXT, [0.9] * len(TEXT), 256), 256)


def watched(console: Console, requests: list[Request], recorder: Recorder | None = None) -> Watch:
    config = SamplerConfig(**{**vars(LEFT_TO_RIGHT), "max_new_tokens": 24})
    with Watch(requests, ByteTokenizer(), console, recorder) as view:
        run(
            oracle(),
            requests,
            config,
            block_size=8,
            seq_len=32,
            tokenizer=ByteTokenizer(),
            on_step=view.step,
            progress=view.block,
            text_by_block=True,
        )
    return view


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=60, height=24, color_system="truecolor"), file


def test_the_live_view_shows_masks_colours_and_figures() -> None:
    console, file = terminal()
    view = watched(console, [Request(TEXT[:6])])
    shown = file.getvalue()
    assert "░" in shown, "masked cells"
    first, second = step_style(1), step_style(2)
    assert first != second
    for style in (first, second):
        red, green, blue = re.findall(r"\d+", style)
        assert f"38;2;{red};{green};{blue}m" in shown
    last = Console(file=io.StringIO(), width=60, height=24, record=True)
    last.print(view.render())
    plain = last.export_text()
    assert "return [x, <x>]" in plain
    assert "░" not in plain
    assert "0: length, NFE 7, 24 tokens, 3.43 a call" in plain
    assert "1 of 1 texts done" in plain


def test_without_a_terminal_the_plain_text_is_written() -> None:
    file = io.StringIO()
    watched(Console(file=file, force_terminal=False), [Request(TEXT[:6])])
    assert file.getvalue() == bytes(TEXT[6:30]).decode() + "\n"
    file = io.StringIO()
    watched(Console(file=file, force_terminal=False), [Request(TEXT[:6]), Request(TEXT[:7])])
    assert f"[1] {bytes(TEXT[7:31]).decode()}\n" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def replayed(path: Path) -> dict[str, list[dict[str, object]]]:
    page = path.read_text(encoding="utf-8")
    assert "http" not in page, "nothing is fetched"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return json.loads(data[1])


def test_the_replay_holds_every_step(tmp_path: Path) -> None:
    recorder = Recorder()
    requests = [Request(TEXT[:6]), Request([60, 0, 47, 115], [(1, 1)], 0)]
    texts = {100: TEXT, 60: list(b"<\xe2/s....")}

    def answer(prefix: list[int], block: list[int], place: int) -> list[float]:
        text = texts[(prefix + block)[0]]
        return [5.0 if token == text[len(prefix) + place] else 0.0 for token in range(256)]

    config = SamplerConfig(**{**vars(LEFT_TO_RIGHT), "max_new_tokens": 10})
    result = run(OracleDenoiser(answer, 256), requests, config, block_size=8, seq_len=32, on_step=recorder.step)
    path = tmp_path / "trace.html"
    write_trace(path, recorder, requests, ByteTokenizer(), title="a < b")
    data = replayed(path)
    assert "<title>a &lt; b</title>" in path.read_text(encoding="utf-8")
    assert data["given"] == [list("def f("), ["<", None, "/", "s"]]
    first = [frame for frame in data["frames"] if frame["r"] == 0]
    # Blocks of 2, 8 and 0 positions: one and two calls, each block begun by a frame with masks only.
    assert [(f["s"], f["n"], f["m"]) for f in first] == [(0, 0, 0), (0, 1, 2), (8, 1, 2), (8, 2, 6), (8, 3, 10)]
    assert result.generations[0].nfe == 3
    assert first[0]["c"] == [[word, 0] for word in "def f("] + [[None, 0]] * 2
    assert first[3]["c"] == [[word, 1] for word in ":\n  "] + [[None, 0]] * 4
    assert first[4]["c"] == [[word, 1] for word in ":\n  "] + [[word, 2] for word in "  re"]
    second = [frame for frame in data["frames"] if frame["r"] == 1]
    assert second[-1]["c"] == [["<", 0], ["‹e2›", 1], ["/", 0], ["s", 0]]


def test_a_replay_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        write_trace(tmp_path / "none" / "trace.html", Recorder(), [], ByteTokenizer())


def test_bytes_that_are_no_character_are_shown_in_brackets() -> None:
    assert show_token(0x41, ByteTokenizer()) == "A"
    assert show_token(0xC3, ByteTokenizer()) == "‹c3›"
