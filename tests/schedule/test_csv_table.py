"""Tables as CSV: there and back, and strict about cells."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule import make_schedule, parse_schedule, read_schedule, schedule_csv, write_schedule
from tests.schedule.tables import TRAINING, random_tables, table


@settings(max_examples=50, deadline=None)
@given(random_tables)
def test_there_and_back(schedule):
    assert parse_schedule(schedule_csv(schedule), name="random") == schedule


@pytest.mark.parametrize("name", [*TRAINING, "inference"])
def test_files_there_and_back(name, tmp_path):
    schedule = table(name, 2, 4, recompute=[0] if name == "gpipe" else ())
    path = tmp_path / f"{name}.csv"
    write_schedule(path, schedule)
    assert read_schedule(path) == schedule
    assert make_schedule(str(path), schedule.num_stages, 4) == schedule


def test_the_form_is_pytorchs():
    """Rows are ranks, idle slots are empty cells, lines may end in CRLF and rows may be padded."""
    text = "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n\r\n"
    schedule = parse_schedule(text, name="torch")
    assert schedule_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_meshes) == (2, 2, 2)


@pytest.mark.parametrize(
    ("text", "problem", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", "action", ("the cell '1X0'", "row 2 (mesh 1), column 2")),
        ("0F0,0F0SEND\n", "action", ("'0F0SEND'", "row 1 (mesh 0), column 2")),
        ("0F,0B0\n", "action", ("'0F', but F is done once per microbatch", "column 1")),
        ("0F0,0UPDATE1\n", "action", ("UPDATE is done once per step",)),
        ("0F-1\n", "action", ("'0F-1' is no action",)),
        ("", "file", ("is empty",)),
        (",,\n\n", "file", ("is empty",)),
        ("0F0,0B0\n,,\n1F0,1B0\n", "range", ("empty column", "Mesh 1")),
        ("0F0,0F1,0B0\n", "missing", ("has no 0B1",)),
        ("0F0,0F0,0B0\n", "double", ("0F0 2 times",)),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock", ("0F1 (mesh 0, place 3) comes after 0B0",)),
    ],
)
def test_what_is_refused(text, problem, words):
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text, name="mine")
    assert caught.value.problem == problem and "'mine'" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_table_for_other_counts_is_refused(tmp_path):
    path = tmp_path / "mine.csv"
    write_schedule(path, table("1f1b", 2, 4))
    with pytest.raises(ScheduleError, match="'mine' has no 0F4"):
        make_schedule(str(path), 2, 5)
    with pytest.raises(ScheduleError, match="'mine' holds the action 0F3"):
        make_schedule(str(path), 2, 3)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ScheduleError, match=r"none\.csv' cannot be read"):
        make_schedule(str(tmp_path / "none.csv"), 2, 2)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match=r"binary\.csv' cannot be read"):
        read_schedule(tmp_path / "binary.csv")
