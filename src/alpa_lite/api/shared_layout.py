"""``SharedLayout``: one layout of what several graphs share, with their plans and what sharing costs each; text and file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from alpa_lite.api.bound import Trees
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import PlanFileError, user_line
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.document import LAYOUT_FORMAT
from alpa_lite.plan.encode import encode_plan
from alpa_lite.plan.files import as_path, saved_file
from alpa_lite.plan.grouping import group_paths
from alpa_lite.plan.json_text import json_text
from alpa_lite.plan.load import read_plan
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.plan.summary import Section, pins_shown
from alpa_lite.plan.text import section_lines
from alpa_lite.units import format_bytes, format_cost

FORMAT, FORMAT_VERSION = LAYOUT_FORMAT, 1
AS_SHARED = "the shared layout"  # what plans call the pins that hold their leaves in it
_PRICE_DIGITS = 2
_ROUNDING = 1e-12  # of an objective: sums in another order differ by less


class _Header(msgspec.Struct):
    """What files of all versions begin with."""

    format: str = ""
    format_version: int = 0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A file; plans are as in plan files, ``shared`` has the paths of the shared leaves in every graph."""

    format: str
    format_version: int
    weights: dict[str, float]
    own: dict[str, float]
    lower_bound: float
    shared: dict[str, list[str]]
    plans: dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayout:
    """What ``al.plan_shared`` found.

    Attributes:
        plans: graph -> its plan under the layout, an ordinary ``al.Plan``.
        weights: graph -> how much its cost counts.
        own: graph -> cost of the best plan that is known of it alone.
        lower_bound: no layout has a smaller weighted sum of costs, of graphs that pad dims and recompute layers as they do alone.
        shared: graph -> paths of the shared leaves, in one order.
    """

    plans: Mapping[str, Plan]
    weights: Mapping[str, float]
    own: Mapping[str, float]
    lower_bound: float
    shared: Mapping[str, tuple[str, ...]]

    @property
    def mesh(self) -> DeviceMesh:
        """Of all plans."""
        return self._first.mesh

    @property
    def parameter_layout(self) -> dict[str, tuple[int, Any]]:
        """Path of every shared leaf, as in the first graph, to (stage, ``PartitionSpec``), as ``Plan.parameter_layout``."""
        return {leaf.path: (leaf.stage, partition_spec(leaf.spec)) for leaf in self.shared_leaves}

    @property
    def shared_leaves(self) -> tuple[Leaf, ...]:
        """The shared leaves, as in the first graph's plan."""
        shared = set(next(iter(self.shared.values())))
        return tuple(leaf for leaf in self._first.inputs if leaf.path in shared)

    @property
    def costs(self) -> dict[str, float]:
        """Graph -> cost of a step under the layout, in the plans' unit."""
        return {name: plan.objective for name, plan in self.plans.items()}

    @property
    def price(self) -> dict[str, float]:
        """Graph -> the price of sharing: cost under the layout over the graph's own optimum, less 1; inf if that is free."""
        return {
            name: cost / self.own[name] - 1 if self.own[name] else math.inf if cost else 0.0
            for name, cost in self.costs.items()
        }

    @property
    def objective(self) -> float:
        """Weighted sum of the costs."""
        return math.fsum(self.weights[name] * cost for name, cost in self.costs.items())  # rounded once, in any order

    @property
    def gap(self) -> float:
        """(objective - lower bound) / objective."""
        difference = self.objective - self.lower_bound
        return difference / self.objective if difference > _ROUNDING * self.objective else 0.0

    def save(self, path: str | PathLike[str]) -> None:
        """Writes layout and plans as one JSON file, whole or not at all; equal layouts give equal bytes.

        Raises:
            PlanFileError: the file cannot be written.
        """
        target = as_path(path, 'layout.save("layout.json")', PlanFileError)
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "weights": dict(self.weights),
            "own": dict(self.own),
            "lower_bound": self.lower_bound,
            "shared": {name: list(paths) for name, paths in self.shared.items()},
            "plans": {name: msgspec.json.decode(encode_plan(plan)) for name, plan in self.plans.items()},
        }
        with saved_file("the layout", target, PlanFileError) as file:
            file.write(json_text(document).encode())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> SharedLayout:
        """Reads what ``save`` wrote.

        Raises:
            PlanFileError: the file is missing, damaged, or of another version.
        """
        file = as_path(path, 'al.SharedLayout.load("layout.json")', PlanFileError)
        try:
            data = file.read_bytes()
            header = msgspec.json.decode(data, type=_Header)
            if header.format == FORMAT and header.format_version != FORMAT_VERSION:
                raise PlanFileError(
                    f"the layout {str(path)!r} has format version {header.format_version}; this version of alpa_lite reads "
                    f"version {FORMAT_VERSION}. At {user_line()}. Make the layout again."
                )
            found = msgspec.json.decode(data, type=_File)
            if found.format != FORMAT:
                raise msgspec.ValidationError(f"its format is {found.format!r:.60}")
        except OSError as error:
            raise PlanFileError(
                f"cannot read the layout {str(path)!r}: {error.strerror}. Layouts are written by `layout.save`. At "
                f"{user_line()}. Check the path."
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if _is_plan(file):
                raise PlanFileError(
                    f"{str(path)!r} is a plan, of one function. A layout is of the graphs that share it. At {user_line()}. Read "
                    "it with al.load_plan, or make a layout with al.plan_shared."
                ) from None
            raise PlanFileError(
                f"{str(path)!r} is no layout file: {error}. Layouts are written by `layout.save`; plans are read by "
                "al.load_plan. Save the layout again instead of editing the file."
            ) from error
        layout = cls(
            plans={
                name: replace(read_plan(bytes(text), f"{path}, plan {name!r}"), trees=Trees())
                for name, text in found.plans.items()
            },
            weights=found.weights,
            own=found.own,
            lower_bound=found.lower_bound,
            shared={name: tuple(paths) for name, paths in found.shared.items()},
        )
        for fault in layout.faults():
            raise PlanFileError(
                f"{str(path)!r} is inconsistent: {fault}. `layout.save` writes only what is consistent. Make the layout again "
                "instead of editing the file."
            )
        return layout

    def faults(self) -> Iterator[str]:
        """What is wrong with the layout, each a sentence."""
        names = list(self.plans)
        for word in ("weights", "own", "shared"):
            if not names or list(getattr(self, word)) != names:
                yield f"{word} is of the graphs {list(getattr(self, word))}, the plans are of {names}"
                return
        first = self._leaves(names[0])
        for name in names:
            leaves = self._leaves(name)
            weight, own, cost = self.weights[name], self.own[name], self.plans[name].objective
            if not 0 < weight < math.inf:
                yield f"the weight of {name!r} is {weight}"
            if not 0 <= own <= cost:
                yield f"the own optimum of {name!r} is {own}, and its plan costs {cost}"
            if not self.shared[name] or len(set(self.shared[name])) < len(self.shared[name]):
                yield f"{name!r} shares no leaf, or one twice: {', '.join(self.shared[name])}"
            if self.plans[name].identity.cluster != self._first.identity.cluster:
                found, wanted = self.plans[name].identity.cluster, self._first.identity.cluster
                yield f"the plan of {name!r} is for {found}, that of {names[0]!r} for {wanted}"
            if len(leaves) != len(self.shared[name]):
                yield f"the plan of {name!r} has not all the leaves that are shared"
            elif _stages(self.plans[name]) != _stages(self._first):
                found, wanted = (
                    ", ".join(str(stage[0]) for stage in _stages(p)) for p in (self.plans[name], self._first)
                )
                yield f"the plan of {name!r} is for {found}, that of {names[0]!r} for {wanted}"
            if len(leaves) != len(first):
                yield f"{name!r} shares {len(leaves)} leaves and {names[0]!r} {len(first)}"
            for (path, *what), (other, *wanted) in zip(leaves, first, strict=False):
                if what != wanted:
                    yield f"{path!r} of {name!r} and {other!r} of {names[0]!r} differ"
        if len(kinds := {(plan.costs, plan.unit) for plan in self.plans.values()}) > 1:
            yield f"the plans count costs in different ways: {', '.join(sorted(map(' in '.join, kinds)))}"
        if not 0 <= self.lower_bound <= self.objective:
            yield f"the lower bound {self.lower_bound} is below 0 or above what the layout costs, {self.objective}"

    def __str__(self) -> str:
        return "\n\n".join("\n".join(section_lines(section)) for section in self._sections()) + "\n"

    @property
    def _first(self) -> Plan:
        return next(iter(self.plans.values()))

    def _leaves(self, name: str) -> list[tuple[Any, ...]]:
        """(path, value, stage, spec) of the shared leaves of a graph, as far as its plan has them."""
        leaves = {leaf.path: leaf for leaf in self.plans[name].inputs}
        found = [leaves[path] for path in self.shared[name] if path in leaves]
        return [(leaf.path, leaf.value, leaf.stage, leaf.spec) for leaf in found]

    def _pins(self) -> dict[str, str]:
        """Path of a shared leaf, as in the first graph, to the pin that it has in the first of those that pin it; else ""."""
        pins = dict.fromkeys(self.shared[next(iter(self.plans))], "")
        for name, plan in self.plans.items():
            shown = zip((leaf.path for leaf in plan.inputs), pins_shown(plan), strict=False)
            given = {path: pin for path, pin in shown if pin != AS_SHARED}
            for path, own in zip(pins, self.shared[name], strict=True):
                pins[path] = pins[path] or given.get(own, "")
        return pins

    def _sections(self) -> Iterator[Section]:
        unit = self._first.unit
        total = format_cost(self.objective, unit)
        stages = self._first.stages
        place, bound = (f"{self.mesh}", "") if len(stages) == 1 else (f"{len(stages)} stages", " for these stages")
        graphs = "1 graph" if len(self.plans) == 1 else f"{len(self.plans)} graphs"
        title = f"Shared layout of {graphs} on {place}: {total} weighted, gap {self.gap:.2%}{bound}"
        columns = "graph", "weight", "cost", "own optimum", "price of sharing", "gap", "peak"
        rows = []
        for name, plan in self.plans.items():
            costs = (format_cost(cost, unit) for cost in (plan.objective, self.own[name]))
            price, gap = f"{self.price[name]:+.{_PRICE_DIGITS}%}", f"{plan.gap:.2%}"
            rows.append((name, f"{self.weights[name]:g}", *costs, price, gap, format_bytes(plan.memory.peak)))
        yield Section(title=title, columns=columns, rows=tuple(rows), right=tuple(range(1, len(columns))))
        if len(stages) > 1:
            of_stages = [(str(n), "{}x{}".format(*s.submesh), str(s.mesh)) for n, s in enumerate(stages)]
            yield Section(title="Stages", columns=("stage", "submesh", "mesh"), rows=tuple(of_stages))
        rows = []
        leaves = self._leaves(next(iter(self.plans)))
        pins = self._pins()
        for group in group_paths([path for path, *_ in leaves], [(*what, pins[path]) for path, *what in leaves]):
            value, stage, spec, pin = group.key
            count = f"x{len(group.members)}" if len(group.members) > 1 else ""
            at = f" on stage {stage}" if len(stages) > 1 else ""
            rows.append((group.label, count, str(value), f"{spec}{at}", pin))
        columns = ("leaf", "count", "type", "spec", "pin")
        shown = len(columns) if any(pins.values()) else len(columns) - 1
        rows = [row[:shown] for row in rows]
        yield Section(title="Shared leaves", columns=columns[:shown], rows=tuple(rows), right=(1,))


def _is_plan(file: Path) -> bool:
    """Whether it is a file of one plan, which is no layout."""
    with suppress(PlanFileError):
        read_plan(file.read_bytes(), str(file))
        return True
    return False


def _stages(plan: Plan) -> list[tuple[DeviceMesh, tuple[int, int], int]]:
    return [(stage.mesh, stage.submesh, stage.first_device) for stage in plan.stages]
