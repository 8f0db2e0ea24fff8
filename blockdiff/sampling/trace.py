"""A page that replays the denoising: one file, no external parts."""

from __future__ import annotations

import html
import json
from pathlib import Path

from blockdiff.sampling.protocols import TokenizerLike
from blockdiff.sampling.record import Recorder, show_token
from blockdiff.sampling.request import Request


def check_trace(path: Path) -> None:
    """Raises a ValueError, worth having before any text is sampled, if the page's folder does not exist."""
    if not path.parent.is_dir():
        raise ValueError(f"trace={path}: the folder {path.parent} does not exist; make it first")


def write_trace(
    path: Path, recorder: Recorder, requests: list[Request], tokenizer: TokenizerLike, title: str = "blockdiff"
) -> None:
    """Writes the replay of a recorded run.

    Args:
        path: of the page.
        recorder: whose `step` the sampler called.
        requests: of the run, in order.
        tokenizer: to show tokens.
        title: of the page.

    Raises:
        ValueError: the folder does not exist.
    """
    check_trace(path)
    words: dict[int, str] = {}

    def word(token: int) -> str:
        if token not in words:
            words[token] = show_token(token, tokenizer)
        return words[token]

    data = {
        "given": [[None if free else word(t) for t, free in zip(r.tokens, r.free(), strict=True)] for r in requests],
        "frames": [
            {
                "r": frame.request,
                "s": frame.start,
                "c": [[None if cell.token is None else word(cell.token), cell.step] for cell in frame.cells],
                "n": frame.nfe,
                "t": round(frame.seconds, 4),
                "m": frame.tokens,
            }
            for frame in recorder.frames
        ],
    }
    # "</" would end the script; in JSON strings a solidus may be escaped.
    payload = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    path.write_text(_PAGE.replace("{title}", html.escape(title)).replace("{data}", payload), encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark; --line: #8884; }
body { margin: 0 auto; padding: 1.2rem; max-width: 70rem; font: 15px/1.5 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: center; }
h1 { font-size: 1.05rem; margin: 0; flex: 1; }
input[type=range] { width: 100%; }
#text { border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; min-height: 12rem; margin: .8rem 0;
  font: 15px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
#text span { border-radius: .2rem; }
.given { opacity: .75; }
.mask { background: #8886; color: transparent; margin-right: 1px; user-select: none; }
.now { outline: 1px solid currentColor; }
#legend span { padding: 0 .5rem; border-radius: .2rem; margin-right: .2rem; color: #111; }
.numbers { font-variant-numeric: tabular-nums; }
</style>
</head>
<body>
<header>
<h1>{title}</h1>
<label>text <select id="which"></select></label>
<button id="play">play</button>
<label>speed <select id="speed"><option>0.25</option><option>0.5</option><option selected>1</option><option>2</option>
<option>4</option><option>16</option></select></label>
</header>
<div id="text" aria-live="off"></div>
<input id="at" type="range" min="0" value="0" aria-label="step">
<p class="numbers" id="numbers"></p>
<p id="legend">fixed by step: </p>
<script type="application/json" id="data">{data}</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const id = name => document.getElementById(name);
const colour = step => `hsl(${(130 + Math.min((step - 1) / 12, 1) * 216) % 360} 70% 72%)`;
let frames = [], timer = null;
for (let r = 0; r < data.given.length; r++) id("which").add(new Option(String(r), String(r)));
for (let step = 1; step <= 12; step++) {
  const mark = document.createElement("span");
  mark.textContent = step < 12 ? step : "12+";
  mark.style.background = colour(step);
  id("legend").append(mark);
}
function show() {
  const at = +id("at").value, request = +id("which").value, cells = data.given[request].map(word => [word, 0]);
  let last = null, before = {};
  for (const frame of frames.slice(0, at + 1)) {
    before = frame === frames[at] ? cells.slice(frame.s, frame.s + frame.c.length) : {};
    frame.c.forEach((cell, place) => { cells[frame.s + place] = cell; });
    last = frame;
  }
  id("text").replaceChildren(...cells.map(([word, step], place) => {
    const mark = document.createElement("span");
    if (word === null) { mark.className = "mask"; mark.textContent = "\\u2591"; return mark; }
    mark.textContent = word;
    if (step === 0) { mark.className = "given"; return mark; }
    mark.style.background = colour(step);
    mark.style.color = "#111";
    mark.title = `position ${place}, step ${step}`;
    const old = last && before[place - last.s];
    if (last && place >= last.s && (!old || old[0] === null)) mark.className = "now";
    return mark;
  }));
  id("numbers").textContent = last === null ? "" :
    `NFE ${last.n} · ${last.m} tokens · ${(last.m / Math.max(last.n, 1)).toFixed(2)} a call · ` +
    `${(last.m / Math.max(last.t, 1e-9)).toFixed(1)} tokens/s · frame ${at + 1} of ${frames.length}`;
}
function pick() {
  frames = data.frames.filter(frame => frame.r === +id("which").value);
  id("at").max = Math.max(frames.length - 1, 0);
  id("at").value = 0;
  show();
}
function stop() { clearInterval(timer); timer = null; id("play").textContent = "play"; }
function play() {
  if (timer !== null) return stop();
  if (+id("at").value >= frames.length - 1) id("at").value = 0;
  id("play").textContent = "pause";
  timer = setInterval(() => {
    if (+id("at").value >= frames.length - 1) return stop();
    id("at").value = +id("at").value + 1;
    show();
  }, 250 / +id("speed").value);
}
id("which").onchange = () => { stop(); pick(); };
id("speed").onchange = () => { if (timer !== null) { stop(); play(); } };
id("at").oninput = () => { stop(); show(); };
id("play").onclick = play;
document.onkeydown = event => {
  if (event.target !== document.body) return;
  if (event.key === " ") { event.preventDefault(); play(); }
};
pick();
</script>
</body>
</html>
"""
