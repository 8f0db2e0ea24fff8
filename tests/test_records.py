from dataclasses import dataclass, field
from enum import Enum

import pytest

from blockdiff.records import difference, dump_yaml, from_plain, read_yaml, to_plain


class Colour(Enum):
    red = "red"
    green = "green"


@dataclass
class Inner:
    size: int | None = None
    colour: Colour = Colour.red


@dataclass
class Outer:
    name: str = "a"
    parts: list[int] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)


def test_round_trip_through_yaml(tmp_path):
    value = Outer("x", [1, 2], Inner(3, Colour.green))
    (tmp_path / "c.yaml").write_text(dump_yaml(value))
    assert from_plain(Outer, read_yaml(tmp_path / "c.yaml")) == value
    assert to_plain(value)["inner"] == {"size": 3, "colour": "green"}


def test_missing_keys_take_defaults():
    assert from_plain(Outer, {"inner": {"colour": "green"}}) == Outer(inner=Inner(None, Colour.green))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nam": 1}, "unknown key nam; did you mean name?"),
        ({"inner": {"colr": "red"}}, r"unknown key inner.colr; did you mean inner.colour\?"),
        ({"inner": {"colour": "blue"}}, "inner.colour=blue must be one of: red, green"),
    ],
)
def test_wrong_data_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        from_plain(Outer, data)


def test_difference_lists_dotted_keys():
    old, new = to_plain(Outer()), to_plain(Outer(inner=Inner(4)))
    assert difference(old, new) == [("inner.size", None, 4)]


@pytest.mark.parametrize(("text", "message"), [("", "empty"), ("a: [", "not readable"), ("- 1", "no mapping")])
def test_broken_files_are_named(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "c.yaml")
    with pytest.raises(ValueError, match="does not exist"):
        read_yaml(tmp_path / "other.yaml")
