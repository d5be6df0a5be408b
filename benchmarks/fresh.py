"""Cases measured in a process of their own, so that a peak resident set or a cold start is theirs alone."""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import alpa_lite


def child(script: str, verb: str, name: str) -> dict[str, Any]:
    """Runs ``script --verb name`` in a fresh process and returns the figures of its last line."""
    # As pip does with what it installs: no user waits for the compilation of Python sources.
    compileall.compile_dir(Path(alpa_lite.__file__).parent, quiet=2)
    command = [sys.executable, script, f"--{verb}", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def answered(argv: Sequence[str], verbs: Mapping[str, Callable[[str], dict[str, Any]]]) -> bool:
    """Whether this process is such a child; then it has printed its figures."""
    if not argv or argv[0].removeprefix("--") not in verbs:
        return False
    print(json.dumps(verbs[argv[0].removeprefix("--")](argv[1])))
    return True
