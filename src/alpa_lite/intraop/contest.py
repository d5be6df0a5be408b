"""Reads and writes problems in the format of the ASPLOS'25 IOPDDL contest (github.com/google/iopddl).

One JSON object ``problem``: per node an interval, costs and usages; per edge a pair of nodes and a flat row-major list
of costs; optionally ``usage_limit``. All numbers are non-negative 64-bit integers; 10**18 and above means forbidden.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alpa_lite.errors import AlpaLiteError
from alpa_lite.intraop.problem import FORBIDDEN, Array, Edge, IntraOpProblem, Usage

_EXACT = 2**53  # above this, float64 drops digits and the costs stay int64


class ProblemFileError(AlpaLiteError):
    """A problem file is not in the contest's format."""


def read_iopddl(source: str | Path) -> IntraOpProblem:
    """Reads a problem.

    Args:
        source: a path (``.json`` or ``.json.gz``), or the JSON text itself (starts with ``{``).

    Raises:
        ProblemFileError: naming the file and what is wrong in it.
    """
    where = "the given text" if isinstance(source, str) and source.lstrip().startswith("{") else str(source)
    try:
        data = json.loads(_text(source))
        return _parse(data["problem"])
    except OSError as error:
        raise _bad(where, f"it cannot be read ({error})") from None
    except (EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _bad(where, f"it is not complete JSON ({error})") from None
    except (KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
        raise _bad(where, f"a part is missing or of a wrong type ({type(error).__name__}: {error})") from None
    except ProblemFileError as error:
        raise _bad(where, str(error)) from None
    except ValueError as error:
        raise _bad(where, str(error)) from None


def write_iopddl(problem: IntraOpProblem, name: str = "alpa_lite") -> str:
    """The problem as contest JSON text.

    The format allows one interval per node, so every further usage becomes a one-to-one follower of its node.

    Raises:
        ProblemFileError: a cost is not a non-negative integer, or ``base_usage`` is set.
    """
    if problem.base_usage is not None and np.any(problem.base_usage):
        raise ProblemFileError("the contest's format has no base usage; expected a problem without it")
    costs = [_integers(c) for c in problem.node_costs]
    intervals = [[0, 0] for _ in costs]
    usages = [[0] * len(c) for c in costs]
    edges = [[e.u, e.v] for e in problem.edges]
    edge_costs = [_integers(e.costs.ravel()) for e in problem.edges]
    taken = [False] * len(costs)
    for usage in problem.usages:
        node = usage.node
        if taken[node]:
            k = len(costs[node])
            edges.append([node, len(costs)])
            edge_costs.append([0 if a == b else FORBIDDEN for a in range(k) for b in range(k)])
            node = len(costs)
            costs.append([0] * k)
            intervals.append([0, 0])
            usages.append([0] * k)
            taken.append(True)
        taken[node] = True
        intervals[node] = [usage.lo, usage.hi]
        usages[node] = [int(x) for x in usage.size_bytes]
    body: dict[str, Any] = {
        "name": name,
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": edges, "costs": edge_costs},
    }
    if problem.usage_limit is not None:
        body["usage_limit"] = int(problem.usage_limit)
    return json.dumps({"problem": body}, separators=(",", ":"))


def _text(source: str | Path) -> str:
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source
    data = Path(source).read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


def _bad(where: str, what: str) -> ProblemFileError:
    return ProblemFileError(
        f"cannot use the problem file {where}: {what}. Expected the IOPDDL contest's format: one JSON object "
        '{"problem": {"nodes": {"intervals", "costs", "usages"}, "edges": {"nodes", "costs"}, "usage_limit"?}}, '
        "plain or gzipped. Check that the file is complete."
    )


def _parse(body: dict[str, Any]) -> IntraOpProblem:
    nodes, edges = body["nodes"], body["edges"]
    lists = nodes["costs"], nodes["usages"], nodes["intervals"]
    if len({len(x) for x in lists}) != 1 or len(edges["nodes"]) != len(edges["costs"]):
        raise ProblemFileError("its lists of nodes (or of edges) differ in length")
    share: dict[Any, Array] = {}
    node_costs = tuple(_costs(values, share) for values in lists[0])
    usages, num_times = [], 0
    for node, (sizes, (lo, hi)) in enumerate(zip(lists[1], lists[2], strict=True)):
        if len(sizes) != len(node_costs[node]) or not sizes:
            raise ProblemFileError(f"node {node} has {len(node_costs[node])} costs and {len(sizes)} usages")
        num_times = max(num_times, hi)
        if lo < hi:
            usages.append(Usage(node=node, lo=lo, hi=hi, size_bytes=np.array(sizes, dtype=np.int64)))
    limit = body.get("usage_limit")
    return IntraOpProblem(
        node_costs=node_costs,
        edges=tuple(_edges(edges, node_costs, share)),
        usages=tuple(usages),
        usage_limit=None if limit is None else int(limit),
        num_times=num_times,
    )


def _edges(edges: dict[str, Any], node_costs: Sequence[Array], share: dict[Any, Array]) -> list[Edge]:
    result = []
    for index, (pair, values) in enumerate(zip(edges["nodes"], edges["costs"], strict=True)):
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= node < len(node_costs) for node in pair):
            raise ProblemFileError(f"edge {index} joins {pair}; two different nodes are needed")
        shape = len(node_costs[pair[0]]), len(node_costs[pair[1]])
        if len(values) != shape[0] * shape[1]:
            raise ProblemFileError(f"edge {index} has {len(values)} costs, its nodes have {shape} strategies")
        result.append(Edge(u=pair[0], v=pair[1], costs=_costs(values, share, shape)))
    return result


def _costs(values: list[int], share: dict[Any, Array], shape: tuple[int, ...] | None = None) -> Array:
    """Costs as an array, one object per distinct content."""
    exact = np.array(values, dtype=np.int64)
    shape = shape or exact.shape
    key = (shape, exact.tobytes())
    if key not in share:
        if exact.size and exact.min() < 0:
            raise ProblemFileError("it has a negative cost")
        forbidden = exact >= FORBIDDEN
        if np.any(~forbidden & (exact > _EXACT)):
            share[key] = exact.reshape(shape)
        else:
            share[key] = np.where(forbidden, np.inf, exact.astype(np.float64)).reshape(shape)
    return share[key]


def _integers(values: Array) -> list[int]:
    result = [FORBIDDEN if x == np.inf else int(x) for x in values.tolist()]
    if any(x != np.inf and (x < 0 or int(x) != x) for x in values.tolist()):
        raise ProblemFileError("the contest's format needs non-negative whole costs; scale and round them first")
    return result
