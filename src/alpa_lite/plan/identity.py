"""Which program a plan is for: fingerprint, and what differs when it is another one.

The fingerprint is a digest of the program's text (ops, shapes, sharding rules, paths, donation) and of the ops' keys.
It holds no file names or line numbers, so moving a function in its file does not make its plans useless; nor literals
and scalar parameters (a learning rate, an exponent), which do not change how a step can be split.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from alpa_lite.core.program import Op, Program, Value
from alpa_lite.errors import PlanFileError

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan
    from alpa_lite.plan.records import Leaf

SHOWN_DIFFERENCES = 3


def fingerprint(program: Program) -> str:
    """Digest of what the program computes, the same on every machine: "sha256:" and 64 hex digits."""
    digest = hashlib.sha256(str(program).encode())
    digest.update(f"aliases {program.aliases}\n".encode())
    for path, _, op in program.walk():
        digest.update(f"{path} {op.key} {op.num_consts} {op.num_carry} {op.pinned}\n".encode())
        if op.layout is not None:
            digest.update(f"{op.layout}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def op_text(program: Program, op: Op) -> str:
    """One op with its shapes, e.g. ``dot_general(float32[8,4], float32[4,2]) -> float32[8,2]``."""

    def name(value: int) -> str:
        return str(program.values[value]) if value >= 0 else "_"

    trips = f" x{op.trip_count}" if op.bodies and op.trip_count != 1 else ""
    return f"{op.primitive}{trips}({', '.join(map(name, op.inputs))}) -> {', '.join(map(name, op.outputs))}"


def verify_identity(plan: Plan, program: Program, *, jax_version: str) -> tuple[str, ...]:
    """Checks that the plan is for this program.

    Args:
        plan: e.g. read from a file.
        program: the traced function that is to run under it.
        jax_version: the JAX that traced it.

    Returns:
        Warnings: none, or one sentence when another JAX version traced the same program.

    Raises:
        PlanFileError: if the program is another one, with the first differences.
    """
    if fingerprint(program) != plan.identity.fingerprint:
        differences = [*_input_differences(plan, program), *_output_differences(plan, program)]
        differences += _op_differences(plan, program)
        differences = differences or ["shapes and ops agree, but how they are connected or may be split does not"]
        if jax_version != plan.identity.jax_version:
            differences.append(_version_text(plan, jax_version))
        raise PlanFileError(
            "this plan belongs to another program: " + "; ".join(differences) + ". A plan holds for exactly the"
            " function, argument tree and shapes it was made for. Make a new plan with `al.plan`, or load the one for"
            " this function."
        )
    if jax_version != plan.identity.jax_version:
        return (f"{_version_text(plan, jax_version)}; the traced program is the same, so the plan is used.",)
    return ()


def _version_text(plan: Plan, jax_version: str) -> str:
    return f"the plan was made with JAX {plan.identity.jax_version}, this is JAX {jax_version}"


def _input_differences(plan: Plan, program: Program) -> Iterator[str]:
    values = [program.values[i] for i in program.inputs]
    yield from _leaf_differences("argument", plan.inputs, program.input_paths, values)


def _output_differences(plan: Plan, program: Program) -> Iterator[str]:
    # A literal result has no value in the program, hence no shape to compare.
    values = [program.values[i] if i >= 0 else None for i in program.outputs]
    yield from _leaf_differences("result", plan.outputs, program.output_paths, values)


def _leaf_differences(
    word: str, leaves: Sequence[Leaf], paths: Sequence[str], values: Sequence[Value | None]
) -> Iterator[str]:
    planned, given = [leaf.path for leaf in leaves], list(paths)
    if planned == given:
        pairs = zip(leaves, values, strict=True)
        changed = [(leaf, value) for leaf, value in pairs if value is not None and value != leaf.value]
        if changed:
            leaf, value = changed[0]
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            yield f"{word} {leaf.path!r} was {leaf.value} and is {value}{more}"
        return
    missing, new = sorted(set(planned) - set(given)), sorted(set(given) - set(planned))
    if missing:
        yield f"{word}s gone: {some(missing)}"
    if new:
        yield f"{word}s new: {some(new)}"
    if not missing and not new:
        yield f"{word}s stand in another order"


def _op_differences(plan: Plan, program: Program) -> Iterator[str]:
    planned = [(d.path, d.op) for stage in plan.stages for d in stage.decisions]
    if plan.pipeline is not None or not all(text for _, text in planned):
        return
    given = [(path, op_text(owner, op)) for path, owner, op in program.walk()]
    if len(planned) != len(given):
        yield f"{len(planned)} ops were planned, the program has {len(given)}"
    for (planned_path, planned_text), (path, text) in zip(planned, given, strict=False):
        if (planned_path, planned_text) != (path, text):
            yield f"first op that differs is op {path}: {text} (planned: op {planned_path}: {planned_text})"
            return


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - SHOWN_DIFFERENCES
    return ", ".join(map(repr, names[:SHOWN_DIFFERENCES])) + (f" and {rest} more" if rest > 0 else "")


def close_matches(name: str, known: Sequence[str]) -> str:
    """A sentence with up to three known names that look like ``name``, or "" if none does."""
    found = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Close: {', '.join(map(repr, found))}." if found else ""
