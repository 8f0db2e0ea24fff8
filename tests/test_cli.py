"""The command line as a user meets it."""

import pytest

from blockdiff import cli


def test_usage_lists_the_verbs(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("train", "sample", "evaluate", "prepare", "sweep", "measure"))


def test_unknown_verb_suggests_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "unknown verb trian; did you mean train?" in capsys.readouterr().err


def test_bad_input_is_one_line_without_traceback(capsys):
    assert cli.main(["train", "block_size=48"]) == 2
    error = capsys.readouterr().err
    assert error == "blockdiff: block_size=48 must divide seq_len=256; nearest: 32, 64\n"


def test_full_error_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="must divide"):
        cli.main(["train", "block_size=48"])


def test_hydra_flags_work(capsys):
    assert cli.main(["train", "--cfg", "job", "block_size=4"]) == 0
    assert "block_size: 4" in capsys.readouterr().out


def test_bad_input_under_hydra_flags_is_refused_too(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "-m", "block_size=48"]) == 2
    assert "must divide seq_len=256" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sample", "evaluate"])
def test_missing_run_is_named(verb, capsys):
    assert cli.main([verb, "checkpoint=nowhere"]) == 2
    assert "checkpoint=nowhere does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "def ",
        "def add(a, b):<hole:24>return result",
        'print("hi", {1: [2]})',
        "it's = a,b # ${x}",
        "price \\${x} and $",
        "tail\\",
        'back\\"slash\\\\n',
        "two\nlines",
        "",
        "null",
        "0x1f",
    ],
)
def test_a_prompt_is_taken_as_it_stands(text, monkeypatch):
    seen = []
    monkeypatch.setitem(cli._VERBS, "sample", lambda config: seen.append(config.prompt) or 0)
    assert cli.main(["sample", "checkpoint=x", f"prompt={text}"]) == 0
    assert seen == [text]


def test_prompts_may_be_a_list_or_quoted(monkeypatch):
    seen = []
    monkeypatch.setitem(cli._VERBS, "sample", lambda config: seen.append(config.prompt) or 0)
    cli.main(["sample", "checkpoint=x", "prompt=[one,two]"])
    cli.main(["sample", "checkpoint=x", "prompt='one, two'"])
    assert seen == [["one", "two"], "one, two"]
