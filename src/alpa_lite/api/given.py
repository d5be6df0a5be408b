"""What was given to a public function, checked once and brought into one form."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

import jax

from alpa_lite.errors import AlpaLiteError, ArgumentsError, user_line
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.trace.paths import argument_paths

_CALLS = {
    "al.parallelize": "al.parallelize(fn, ...), or @al.parallelize(...) above the function",
    "al.plan": "al.plan(fn, *args, cluster=...)",
    "al.graph": "al.graph(fn, *args)",
}


def check_function(fn: Any, call: str) -> Callable[..., Any]:
    """What is parallelized or planned; ``call``: the user's."""
    if not callable(fn):
        raise AlpaLiteError(
            f"{call} was given {fn!r:.60}, which cannot be called. It takes a function of arrays first, and all settings by "
            f"name. At {user_line()}. Write {_CALLS[call]}."
        )
    return fn


def checked_options(options: Any) -> PlanOptions:
    """The options; their own fields check themselves."""
    if options is None:
        return PlanOptions()
    if not isinstance(options, PlanOptions):
        raise AlpaLiteError(
            f"options={options!r:.60} was given. Allowed is an al.PlanOptions, or None for its defaults. At {user_line()}. "
            "Write for example options=al.PlanOptions(mesh_shape=(2, 4))."
        )
    return options


def checked_plan(plan: Any) -> Plan | None:
    """A plan to run, if one was given."""
    if plan is not None and not isinstance(plan, Plan):
        raise AlpaLiteError(
            f"plan={plan!r:.60} was given. Allowed is a plan that al.plan made or al.load_plan read. At {user_line()}. For a "
            "file write plan=al.load_plan(path); of a symbolic plan take plan.specialize(n=...)."
        )
    return plan


def refuse_deleted(args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception | None = None) -> None:
    """Says which argument is gone; with an ``error`` of JAX, if that is what it is about."""
    if error is not None and "deleted" not in str(error):
        return
    if not any(getattr(leaf, "is_deleted", bool)() for leaf in jax.tree_util.tree_leaves((args, kwargs))):
        return
    path = next(path for path, leaf in argument_paths(args, kwargs) if getattr(leaf, "is_deleted", bool)())
    raise ArgumentsError(
        f"the argument {path!r} was deleted, or donated to a step that ran since: donate_argnums= gives its memory away. At "
        f"{user_line()}. Give what that step returned in its place, or a copy."
    ) from error


def check_keywords(fn: Callable[..., Any], given: Iterable[str], settings: Iterable[str]) -> None:
    """Refuses a keyword that the function does not take and that is a setting in the wrong place, or nearly one.

    Args:
        fn: what the keywords would be passed to; any other that it does not take, tracing reports.
        given: their names.
        settings: names of the settings beside which they were given.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    options = [field.name for field in fields(PlanOptions)]
    for name in given:
        if name in taken:
            continue
        close = get_close_matches(name, [*settings, *options], n=1)
        if close:
            meant = f"options=al.PlanOptions({close[0]}=...)" if close[0] in options else f"{close[0]}=..."
            raise AlpaLiteError(
                f"the keyword {name!r} was given, which {getattr(fn, '__qualname__', repr(fn))} does not take. Allowed are "
                f"the function's own arguments and {', '.join(settings)}. At {user_line()}. Did you mean {meant}?"
            )


def argnums(fn: Callable[..., Any], name: str, value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Positions of arguments, counted from the start; as in ``jax.jit`` they may be counted from the end, and None is none."""
    if value is None:
        return ()
    count = _num_positional(fn)
    listed = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for n in listed:
        known = isinstance(n, int) and not isinstance(n, bool)
        if not known or (n < 0 if count is None else not -count <= n < count):
            allowed = "positions from 0 on" if count is None else f"its {count} positions, 0 to {count - 1}"
            shown = getattr(fn, "__qualname__", repr(fn))
            raise AlpaLiteError(
                f"{name}={value!r:.60} was given for {shown}. Allowed are {allowed}, as one number or a tuple. At {user_line()}. "
                "Correct the position; arguments passed by name have none."
            )
    return tuple(n + (count or 0) if n < 0 else n for n in listed)


def argnames(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of arguments; as in ``jax.jit`` None is none.

    Raises:
        AlpaLiteError: something is no name.
    """
    if value is None:
        return ()
    listed = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(name, str) for name in listed):
        raise AlpaLiteError(
            f"static_argnames={value!r:.60} was given. Allowed are names of arguments, as one string or a tuple of them. At "
            f"{user_line()}. Write for example static_argnames='training', or () for none."
        )
    return listed


def _num_positional(fn: Callable[..., Any]) -> int | None:
    """How many arguments the function takes by position; None where that is open."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # not every callable has a signature
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def checked_executor(executor: Any, address: str | None) -> RayExecutor | None:
    """Settings of the Ray executor; None for the local one.

    Raises:
        AlpaLiteError: another executor, or an address for the local one; the extra ``ray`` is missing.
    """
    if executor == "local" and address is None:
        return None
    if not (isinstance(executor, RayExecutor) or executor in ("ray", "local")):
        raise AlpaLiteError(
            f"executor={executor!r:.60} was given. It must be 'local', 'ray' or an al.RayExecutor(...). At {user_line()}. "
            "Leave it out to run on the devices of this process."
        )
    if executor == "local":
        raise AlpaLiteError(
            f"address={address!r:.60} was given without executor='ray'. It names a Ray cluster, which no other executor uses. "
            f"At {user_line()}. Give executor='ray' beside it, or leave it out."
        )
    if importlib.util.find_spec("ray") is None:
        raise AlpaLiteError(
            f"executor='ray' was given, and Ray is not installed. At {user_line()}. Install it: pip install 'alpa-lite[ray]'."
        )
    settings = RayExecutor() if executor == "ray" else executor
    return settings if address is None else replace(settings, address=address)
