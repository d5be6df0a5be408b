"""How many layers of a step on one mesh are recomputed, where the plan may say so.

Layers that come first keep what they made for the longest time, so the first k layers are tried: none, all that can be, and
then fewer by bisection while plans fit the budget. The cheapest of the plans found is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from alpa_lite.errors import LayerError, MemoryBudgetError, MicrobatchError
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.budget import OVER_BUDGET
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import LIMITED
from alpa_lite.planner.stage_layers import layers_to_recompute
from alpa_lite.trace.auto_layers import LayerCuts
from alpa_lite.trace.program import Traced
from alpa_lite.trace.remat_step import all_recomputed, rematerialised_step
from alpa_lite.trace.staged import layers_of
from alpa_lite.units import numbers_text

Found = tuple[Traced, Plan]


def plan_recomputing(
    plan_traced: Callable[[Traced], Found],
    trace_with: Callable[[LayerCuts | None], Traced],
    options: PlanOptions,
    source: str,
) -> Found:
    """The plan of a step on one mesh with ``options.remat``, and the program that it is for.

    Args:
        plan_traced: plans a traced step.
        trace_with: traces the step, cut into layers as asked.
        options: the user's.
        source: the user's line.

    Raises:
        MicrobatchError, LayerError: layers are asked for and there are none to be found.
        MemoryBudgetError: nothing fits, recomputed or not.
    """
    chosen = options.remat
    if chosen == "none":
        return plan_traced(trace_with(None))
    kept, refused = None, None
    if chosen == "auto":
        try:
            kept = plan_traced(trace_with(None))
        except MemoryBudgetError as error:
            refused = error
        if kept is not None and not is_limited(kept[1]):
            return kept
    try:
        traced = trace_with(layers_to_recompute(at_least=1))
        assert traced.layered is not None
        saved = chosen if isinstance(chosen, tuple) else ()
        whole = all_recomputed(layers_of(traced.layered), saved, source)
    except (MicrobatchError, LayerError) as error:
        if chosen != "auto":
            raise type(error)(f"remat={chosen!r} recomputes layers of what al.value_and_grad marks: {error}") from error
        return _as_it_is(kept, refused)

    def plan_with(layers: tuple[int, ...]) -> Found:
        remat = replace(whole, layers=layers)
        rewritten, plan = plan_traced(rematerialised_step(traced, remat, options.rules))
        return rewritten, replace(plan, remat=remat)

    if chosen != "auto":
        return plan_with(whole.layers) if whole.layers else plan_traced(trace_with(None))
    useful = [k for k in whole.layers if k < whole.num_layers - 1]  # the last one's backward pass comes at once
    if not useful:
        return _as_it_is(kept, refused)
    return cheapest_recomputation(plan_with, useful, kept, whole.num_layers)


def _as_it_is(kept: Found | None, refused: MemoryBudgetError | None) -> Found:
    """The plan without recomputation, or why there is none."""
    if kept is None:
        assert refused is not None
        raise refused
    return kept


def is_limited(plan: Plan) -> bool:
    """Whether the memory budget rules out cheaper plans on the meshes that were tried, or all on one of them."""
    return any(LIMITED in c.reason or c.status == OVER_BUDGET for c in plan.mesh_table)


def cheapest_recomputation(
    plan_with: Callable[[tuple[int, ...]], Found],
    layers: Sequence[int],
    kept: Found | None,
    num_layers: int,
) -> Found:
    """The cheapest plan found.

    Args:
        plan_with: plans with some layers recomputed.
        layers: those that may be, in order.
        kept: the plan without any, if there is one.
        num_layers: of the step.

    Raises:
        MemoryBudgetError: nothing fits even if all of them are.
    """
    try:
        found = [plan_with(tuple(layers))]
    except MemoryBudgetError as error:
        if kept is not None:
            return kept
        error.args = (
            f"{error}\n  tried: every layer kept, and layers {numbers_text(layers)} of {num_layers} recomputed in the backward "
            "pass, for which the figures above hold.",
        )
        raise
    low, high = 0, len(layers)  # of low layers nothing is known to fit, with high recomputed it does
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found.append(plan_with(tuple(layers[:middle])))
            high = middle
        except MemoryBudgetError:
            low = middle
    return min([*found, *([] if kept is None else [kept])], key=lambda pair: pair[1].objective)
