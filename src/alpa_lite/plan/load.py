"""Reading a plan file."""

from __future__ import annotations

from os import PathLike

from alpa_lite.errors import PlanFileError
from alpa_lite.plan.check import plan_faults
from alpa_lite.plan.decode import decode_fields
from alpa_lite.plan.files import as_path
from alpa_lite.plan.plan import Plan


def load_plan(path: str | PathLike[str]) -> Plan:
    """Reads and verifies a plan that ``Plan.save`` wrote.

    Raises:
        PlanFileError: if the file is missing, cut short, of another format version, or inconsistent.

    Example:
        >>> plan.save("plan.json")
        >>> assert load_plan("plan.json") == plan
    """
    file = as_path(path, 'al.load_plan("plan.json")', PlanFileError)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PlanFileError(
            f"cannot read the plan file {str(path)!r}: {error.strerror}. Plan files are written by `plan.save`."
            " Check the path."
        ) from error
    return read_plan(data, str(path))


def read_plan(data: bytes, name: str) -> Plan:
    """What ``encode_plan`` wrote; ``name`` is for messages.

    Raises:
        PlanFileError: it is cut short, of another format version, or inconsistent.
    """
    plan = Plan(**decode_fields(data, name))
    for fault in plan_faults(plan):
        raise PlanFileError(
            f"plan file {name!r} is inconsistent: {fault}. `plan.save` writes only plans that are consistent."
            " Make the plan again instead of editing the file."
        )
    return plan
