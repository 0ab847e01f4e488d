"""What commands print of rows: columns below each other, and facts that stay on the screen."""

import pytest

from pretraining.runtime.table import Column, aligned, facts, write_table


def test_a_column_writes_its_cells_and_says_what_is_missing():
    """By key or function, in a format or in words; None is a dash. Names read from the left, numbers from the right."""
    columns = (
        Column("name", "name"),
        Column("tokens", "tokens", ","),
        Column("of all", lambda row: row["tokens"] and row["tokens"] / 4000, "{:.0%}".format),
    )
    rows = [{"name": "a", "tokens": 1000}, {"name": "longer", "tokens": None}]
    assert write_table(columns, rows).splitlines() == [
        "name    tokens  of all",
        "a        1,000     25%",
        "longer       -       -",
    ]
    assert write_table(columns, []) == "name  tokens  of all"
    assert write_table(columns, rows, left=3).splitlines()[1] == "a       1,000   25%"


def test_a_line_of_another_length_than_the_header_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        aligned([["one", "two"], ["one"]])


def test_long_facts_go_on_below_their_start():
    """No line is wider than the screen, and a label without a value keeps its line."""
    text = facts([("label", "word " * 40), ("", ""), ("x", "y")], line_width=40).splitlines()
    assert all(len(line) <= 40 for line in text)
    assert text[0].startswith("label  word") and text[1].startswith("       word")
    assert [line.strip() for line in text[-2:]] == ["", "x      y"]
