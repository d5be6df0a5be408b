"""The memory page keeps its text when its tables are measured anew."""

from __future__ import annotations

import pytest

from benchmarks.memory_table import HEAD, Row, with_rows

PAGE = f"""# Page

Text above.

<!-- table: cpu -->

{HEAD}
| mlp | (x=8) | 1.00 | 1.00 | 1.000 | 3 | 0 | 0 | 2.1 |
| moe | (x=8) | 2.00 | 2.00 | 1.000 | 3 | 0 | 0 | 2.1 |

<!-- end of table -->

Text between.

<!-- table: gpu -->
<!-- end of table -->

Text below.
"""


def row(name: str, mesh: str, predicted: int) -> str:
    made = Row(
        name=name,
        mesh=mesh,
        predicted_bytes=predicted * 2**20,
        actual_bytes=2**21,
        unplanned=0,
        missing=0,
        planned=3,
        compile_s=1.0,
    )
    return str(made)


def test_rows_replace_their_own_kind_and_nothing_else():
    new = row("mlp", "(x=8)", 3)
    assert "| 1.500 |" in new
    assert with_rows(PAGE, "cpu", [new]) == PAGE.replace("| mlp | (x=8) | 1.00 | 1.00 | 1.000 | 3 | 0 | 0 | 2.1 |", new)


def test_new_rows_come_last_and_an_empty_table_gets_its_head():
    page = with_rows(with_rows(PAGE, "gpu", [row("lstm", "(x=8)", 2)]), "cpu", [row("mlp", "(x=2, y=4)", 2)])
    lines = page.splitlines()
    table = lines[lines.index("<!-- table: gpu -->") + 1 : lines.index("Text below.")]
    assert table == ["", *HEAD.splitlines(), row("lstm", "(x=8)", 2), "", "<!-- end of table -->", ""]
    assert lines.index(row("mlp", "(x=2, y=4)", 2)) == next(i for i, x in enumerate(lines) if x.startswith("| moe")) + 1
    assert [x for x in lines if x.startswith("Text")] == ["Text above.", "Text between.", "Text below."]


def test_measuring_twice_changes_nothing():
    once = with_rows(PAGE, "cpu", [row("mlp", "(x=8)", 3)])
    assert with_rows(once, "cpu", [row("mlp", "(x=8)", 3)]) == once


def test_a_page_without_the_table_is_refused():
    with pytest.raises(ValueError, match="no table 'cpu'"):
        with_rows("# Page\n", "cpu", [row("mlp", "(x=8)", 3)])
