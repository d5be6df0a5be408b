"""Reading a plan file."""

from __future__ import annotations

from os import PathLike

from alpa_lite.errors import PlanFileError, user_line
from alpa_lite.plan.check import plan_faults
from alpa_lite.plan.decode import decode_document, decode_fields
from alpa_lite.plan.files import as_path
from alpa_lite.plan.plan import Plan


def load_plan(path: str | PathLike[str]) -> Plan:
    """Reads and verifies a plan that ``Plan.save`` wrote.

    Raises:
        PlanFileError: if the file is missing, cut short, of another format version, inconsistent, or changed by hand.

    Example:
        >>> plan.save("plan.json")
        >>> assert load_plan("plan.json") == plan
    """
    file = as_path(path, 'al.load_plan("plan.json")', PlanFileError)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PlanFileError(
            f"cannot read the plan file {str(path)!r}: {error.strerror}. Plan files are written by `plan.save`. At "
            f"{user_line()}. Check the path."
        ) from error
    return read_plan(data, str(path))


def read_plan(data: bytes, name: str) -> Plan:
    """What ``encode_plan`` wrote; ``name`` is for messages.

    Raises:
        PlanFileError: it is cut short, of another format version, inconsistent, or not as it was written.
    """
    document = decode_document(data, name)
    plan = Plan(**decode_fields(document, name))
    for fault in plan_faults(plan):
        raise PlanFileError(
            f"plan file {name!r} is inconsistent: {fault}. `plan.save` writes only plans that are consistent."
            " Make the plan again instead of editing the file."
        )
    if document.digest and document.digest != document.with_digest().digest:
        raise PlanFileError(
            f"plan file {name!r} was changed after `plan.save` wrote it: its digest is another one. A plan is planned, priced and"
            " checked as a whole. Make the plan again, with pins for what should be otherwise."
        )
    return plan
