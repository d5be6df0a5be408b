"""``alpa-lite buckets``: advice from a file of lengths, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import alpa_lite as al
from alpa_lite.cli import main


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["buckets", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_it_prints_the_advice_and_the_option_for_the_server(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12 15\n100, 900\n\n1000\n")
    text = run(file, "-k", 3)
    assert text == str(al.serve.propose_buckets([12, 15, 100, 900, 1000], 3)) + "--buckets 15,100,1000\n"
    assert run(file, "-k", 3, "--multiple", 128).endswith("--buckets 128,1024\n")
    assert run(file, "-k", 3, "--program-tokens", 1e6).endswith("--buckets 1000\n")
    assert run(file, "-k", 3, "--program-tokens-per-token", 10).endswith("--buckets 15,1000\n")
    assert run(file, "-k", 3, "--program-bytes", 8e9, "--memory-bytes", 80e9).endswith("--buckets 100,1000\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["-k", 0], "--buckets (-k) 0 was given. It must be a whole number from 1."),
        (["--multiple", 0], "--multiple 0 was given"),
        (["--multiple", 2**62], f"--multiple {2**62} was given. It must be a whole number from 1 to 2**40."),
        (["--program-tokens", -1], "--program-tokens -1.0 was given. It must be a number from 0."),
        (["--program-tokens-per-token", "nan"], "--program-tokens-per-token nan was given"),
        (["--program-bytes", -1, "--memory-bytes", 8e9], "--program-bytes -1.0 was given"),
        (["--memory-bytes", 0], "--memory-bytes 0.0 was given. It must be a number above 0."),
        (["--program-bytes", 1e6], "--program-bytes 1e+06 was given alone. Bytes of a program count as a share"),
        (["--memory-bytes", 8e9], "--memory-bytes 8e+09 was given alone. Bytes of a program count as a share"),
    ],
)
def test_options_that_cannot_be_are_named_as_they_are_written(tmp_path: Path, given: list[object], words: str) -> None:
    (tmp_path / "lengths.txt").write_text("12 15")
    text = run(tmp_path / "lengths.txt", *given, code=2)
    assert words in text and "propose_buckets" not in text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("12\nmany\n", "'many' was found among the lengths"),
        ("12\n-3\n", "'-3' was found among the lengths"),
        ("\n", "there are no lengths in "),
        ("12\n0\n", "'0' was found among the lengths"),
        (
            f"12\n{2**40 + 1}\n",
            f"'{2**40 + 1}' was found among the lengths. A length is a whole number from 1 to 2**40",
        ),
        ("9" * 5000, f"'{'9' * 59} was found among the lengths"),
    ],
)
def test_files_without_lengths_are_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    assert match in run(file, code=2)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "No such file" in run(tmp_path / "none.txt", code=2)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "it is no text" in run(tmp_path / "bytes", code=2)
