"""Writes what is generated on the page ``symbolic.md``, the output of its example, and draws its picture.

``python docs/symbolic.py`` rewrites the page between its marks and draws ``images/symbolic.png``.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

if __name__ == "__main__":  # make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import alpa_lite as al
from examples import seven_b

HERE = Path(__file__).resolve().parent
PAGE = HERE / "symbolic.md"
PICTURE = HERE / "images" / "symbolic.png"
VALUES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def generated() -> dict[str, str]:
    """What stands between the marks of the page, by mark."""
    return {"output": f"```text\n{run_example()}```\n"}


def example() -> str:
    """The page's Python block."""
    return PAGE.read_text(encoding="utf-8").split("```python\n", 1)[1].split("```", 1)[0]


def run_example() -> str:
    """What the example prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example(), "symbolic.md", "exec"), {})
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def filled(text: str) -> str:
    """The page's text with everything generated in its place."""
    for mark, content in generated().items():
        head, rest = text.split(f"<!-- {mark} -->\n")
        text = f"{head}<!-- {mark} -->\n{content}<!-- end -->\n{rest.split('<!-- end -->' + chr(10), 1)[1]}"
    return text


def draw() -> None:
    """Memory and traffic of the 7B step over the number of workers."""
    cluster = al.Cluster.symbolic("n", device="v100-sxm2-16gb", devices_per_host=8, values=VALUES)
    options = al.PlanOptions(mesh_shape=("n",))
    plan = al.plan(seven_b.step, *seven_b.ARGS, cluster=cluster, donate_argnums=0, options=options)
    PICTURE.parent.mkdir(exist_ok=True)
    plan.plot(PICTURE, budget=0.9 * cluster.host.device.memory_bytes)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw()
