"""``alpa-lite buckets LENGTHS``: which buckets requests of these lengths want."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from alpa_lite.cli.paths import a_file
from alpa_lite.errors import AlpaLiteError

_BAD_INPUT = 2
_DIGITS = 40  # of a length: Python refuses to read thousands of them


def buckets(
    file: Annotated[
        Path, typer.Argument(metavar="LENGTHS", parser=a_file, help="a text of lengths in tokens, one per request")
    ],
    k: Annotated[int, typer.Option("--buckets", "-k", help="how many there may be")] = 4,
    multiple: Annotated[int, typer.Option("--multiple", help="sizes are multiples of this")] = 1,
    program_tokens: Annotated[
        float, typer.Option("--program-tokens", help="padded tokens that a program more must save")
    ] = 0.0,
    program_tokens_per_token: Annotated[
        float, typer.Option("--program-tokens-per-token", help="the same, per token of the bucket's size")
    ] = 0.0,
    program_bytes: Annotated[
        float | None,
        typer.Option("--program-bytes", help="memory that a compiled program keeps; needs --memory-bytes"),
    ] = None,
    memory_bytes: Annotated[
        float | None,
        typer.Option(
            "--memory-bytes",
            help="of a device, of which --program-bytes are a share; costs as much as that share of all tokens",
        ),
    ] = None,
) -> None:
    """Propose buckets that waste least on padding and on compiled programs, and print what each of them wastes."""
    from alpa_lite.serve.buckets import propose_buckets

    try:
        lengths = _lengths(file)
        _check(k, multiple, program_tokens, program_tokens_per_token, program_bytes, memory_bytes)
        advice = propose_buckets(
            lengths,
            k,
            multiple=multiple,
            program_tokens=program_tokens,
            program_tokens_per_token=program_tokens_per_token,
            program_bytes=program_bytes,
            memory_bytes=memory_bytes,
        )
    except AlpaLiteError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    typer.echo(str(advice), nl=False)
    typer.echo(f"--buckets {','.join(map(str, advice.buckets))}")


def _lengths(file: Path) -> list[int]:
    from alpa_lite.serve.buckets import LARGEST, WHOLE

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise AlpaLiteError(
            f"the lengths {str(file)!r} cannot be read: {reason}. It must be a text file of whole numbers. Correct the path."
        ) from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.replace(",", " ").split():
            length = int(word) if word.isdecimal() and len(word) <= _DIGITS else 0
            if not 1 <= length <= LARGEST:
                raise AlpaLiteError(
                    f"{word!r:.60} was found among the lengths. A length is {WHOLE}; they are separated by spaces, commas or "
                    f"new lines. In {str(file)!r}, line {number}. Correct it."
                )
            found.append(length)
    if not found:
        raise AlpaLiteError(
            f"there are no lengths in {str(file)!r}. At least one is needed. Write lengths of requests in tokens into it, "
            "separated by spaces, commas or new lines."
        )
    return found


def _check(
    k: int,
    multiple: int,
    program_tokens: float,
    program_tokens_per_token: float,
    program_bytes: float | None,
    memory_bytes: float | None,
) -> None:
    """As ``propose_buckets`` does, by the names of options.

    Raises:
        AlpaLiteError: a value is not allowed.
    """
    from alpa_lite.serve.buckets import LARGEST, WHOLE

    above, most = sys.float_info.min, sys.float_info.max
    for option, value, low, high, kind in (
        ("--buckets (-k)", k, 1, math.inf, "a whole number from 1"),
        ("--multiple", multiple, 1, LARGEST, WHOLE),
        ("--program-tokens", program_tokens, 0, most, "a number from 0"),
        ("--program-tokens-per-token", program_tokens_per_token, 0, most, "a number from 0"),
        ("--program-bytes", program_bytes or 0, 0, most, "a number from 0"),
        ("--memory-bytes", 1 if memory_bytes is None else memory_bytes, above, most, "a number above 0"),
    ):
        if not low <= value <= high:
            raise AlpaLiteError(f"{option} {value} was given. It must be {kind}. Correct it.")
    both = {"--program-bytes": program_bytes, "--memory-bytes": memory_bytes}
    given = [f"{option} {value:g}" for option, value in both.items() if value is not None]
    if len(given) == 1:
        raise AlpaLiteError(
            f"{given[0]} was given alone. Bytes of a program count as a share of a device's memory, so both must be given. "
            "Write for example --program-bytes 50e6 --memory-bytes 80e9 for a device of 80 GB."
        )
