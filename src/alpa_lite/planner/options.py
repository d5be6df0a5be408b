"""``PlanOptions``: everything that may be asked of the planner, checked once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Literal

from alpa_lite.core.mesh import is_axis_name
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.errors import AlpaLiteError, user_line
from alpa_lite.plan.plan import OptionValue
from alpa_lite.planner.stage_options import stage_count, stage_faults
from alpa_lite.schedule.generators import GENERATORS, UserSchedule

DEFAULT_AXIS_NAMES = ("x", "y", "z")
MAX_AXES = 3
SCHEDULES = tuple(name for name in GENERATORS if name != "inference")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of ``al.plan`` and ``al.parallelize``.

    Attributes:
        mesh_shape: shape of the logical device mesh, e.g. (2, 4); None tries every factorisation of the cluster. For a
            symbolic cluster one size is its name, e.g. ("n", 2).
        axis_names: names of the mesh axes; None takes those that pins use, in their order, else ("x", "y", "z"), in
            this order also where pins use these.
        max_axes: number of axes up to which meshes are tried when ``mesh_shape`` is None.
        memory_budget_bytes: hard limit on the predicted peak per device (under "hidet", on the bytes of the weights); None =
            0.9 of the device's memory, ``inf`` = none.
        costs: cost convention: "roofline" (seconds), "measured" (the same on a calibrated cluster), "alpa", "slapo-2023-05",
            "slapo-head", "hidet" or "ring".
        compute: whether ops are priced beside what is moved; None = the convention's own (only seconds know compute).
        require_sharded_contractions: matmuls and convolutions may not be repeated along any mesh axis; None = the
            convention's own (yes for slapo, no for all others).
        forbid: kinds of collectives that may not be used, e.g. ("all-gather",).
        replication_penalty: price of every state leaf that all devices hold whole; None = the convention's own.
        padding: "auto" pads dims inside the step that do not divide, where that makes the plan cheaper, possible, or keeps a
            pin (`plan.paddings` says which); "off" never does.
        annotations: "report" lists sharding annotations found in the arguments; "pin" makes them pins.
        num_microbatches: in how many slices ``al.value_and_grad`` takes the batch, one after the other, with gradients added up;
            "auto" takes the smallest power of two that fits the memory budget.
        num_stages: cut the step into so many stages of contiguous layers (``al.layer_boundary``, else found), each on an equal
            part of the cluster; ``mesh_shape`` is then that of every stage. "auto" searches stages, submeshes and layers where
            ``num_microbatches`` is given and ``mesh_shape`` is not; else it is one stage.
        submeshes: one (hosts, devices per host) per stage, e.g. ((1, 2), (1, 6)): part of one host, or whole hosts, together
            all devices. "auto" beside ``num_stages``: searched, with layers and meshes, for that number of stages.
        stage_layers: how many layers each stage has, e.g. (4, 2, 2); None gives each stage work by its number of devices.
        stage_mesh_shapes: one mesh shape per stage, None where it is searched, e.g. ((2, 1), None).
        schedule: in which order stages take microbatches: "gpipe" (all forward, then all backward), "1f1b" (fewest in flight),
            "eager-1f1b", "interleaved-1f1b" or "zb-h1" (backward passes in halves); else the path of a CSV file, or a
            function that makes the table (``al.schedule.make_schedule``), which may put several stages on one part of it.
        num_chunks: stages per part of the cluster under "interleaved-1f1b"; they are counted in ``num_stages``.
        remat: layers under ``al.value_and_grad`` whose backward pass recomputes what it reads of the forward pass: "auto" those
            that the memory budget demands, "none", "all", or names as of ``jax.ad_checkpoint.checkpoint_name``: all layers,
            with these values kept. Layers with the user's own ``jax.checkpoint`` stay as they are.
        rules: sharding rules for primitives by name, each an ``al.register_rule("primitive", "rule")``; they replace others.
        time_limit_s: seconds of a solve on one mesh; where a stage of several is fitted into its memory, of all solves for it on
            one mesh together. Where it passes, the answer is the best plan found by then.
        seed: of the solver.
        verbose: tell on stderr, mesh by mesh, what is being planned and what was found; no part of the plan.
    """

    mesh_shape: tuple[int | str, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    max_axes: int = 2
    memory_budget_bytes: float | None = None
    costs: str = "roofline"
    compute: bool | None = None
    require_sharded_contractions: bool | None = None
    forbid: tuple[str, ...] = ()
    replication_penalty: float | None = None
    padding: Literal["auto", "off"] = "auto"
    annotations: Literal["report", "pin"] = "report"
    num_stages: int | Literal["auto"] = "auto"
    submeshes: tuple[tuple[int, int], ...] | Literal["auto"] | None = None
    stage_layers: tuple[int, ...] | None = None
    stage_mesh_shapes: tuple[tuple[int, ...] | None, ...] | None = None
    num_microbatches: int | Literal["auto"] = 1
    schedule: str | PathLike[str] | UserSchedule = "1f1b"
    num_chunks: int = 1
    remat: str | tuple[str, ...] = "auto"
    rules: tuple[NamedRule, ...] = ()
    time_limit_s: float = 60.0
    seed: int = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        for name, example in (
            ("mesh_shape", (2, 4)),
            ("axis_names", ("x", "y")),
            ("forbid", ("all-gather",)),
            ("rules", ()),
            ("submeshes", ((1, 2), (1, 6))),
            ("stage_layers", (4, 2, 2)),
            ("stage_mesh_shapes", ((2, 1), (4, 1))),
        ):
            value = getattr(self, name)
            if value is None or (name, value) == ("submeshes", "auto"):
                continue
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise AlpaLiteError(
                    f"PlanOptions: {name}={value!r} was given; it must be a tuple, e.g. {example}. At {user_line()}."
                )
            entries = (tuple(v) if isinstance(v, list) else v for v in value)
            object.__setattr__(self, name, tuple(entries))
        if isinstance(self.remat, list):
            object.__setattr__(self, "remat", tuple(self.remat))
        if isinstance(self.schedule, PathLike):
            object.__setattr__(self, "schedule", fspath(self.schedule))
        for fault in self._no_numbers() or self._faults():
            raise AlpaLiteError(f"PlanOptions: {fault} At {user_line()}.")

    def _faults(self) -> list[str]:
        faults = []
        shape, names = self.mesh_shape, self.axis_names
        if shape is not None and (not shape or len(shape) > MAX_AXES or not all(map(_is_size, shape))):
            faults.append(
                f"mesh_shape={shape} was given; 1 to {MAX_AXES} sizes of at least 1 are allowed, e.g. (2, 4), one of which "
                "may be the name of a symbolic cluster's number, as in ('n', 2)."
            )
        symbolic = [n for n in shape or () if isinstance(n, str)]
        if len(symbolic) > 1:
            faults.append(f"mesh_shape={shape} was given; at most one size may be a name. Give numbers for the others.")
        if names is not None and (not names or len(names) > MAX_AXES or len(set(names)) != len(names)):
            faults.append(f"axis_names={names} was given; 1 to {MAX_AXES} different names are allowed.")
        elif wrong_names := [name for name in names or () if not is_axis_name(name)]:
            faults.append(
                f"axis_names={names} was given, and {wrong_names[0]!r} is none: letters, digits and underscores are allowed, no "
                "digit first, and no '_' alone, which stands for a whole dim."
            )
        if shape is not None and names is not None and len(shape) != len(names):
            faults.append(
                f"mesh_shape={shape} has {len(shape)} axes, axis_names={names} has {len(names)}; give one name per axis."
            )
        if not (isinstance(self.max_axes, Integral) and 1 <= self.max_axes <= MAX_AXES):
            faults.append(f"max_axes={self.max_axes} was given; 1 to {MAX_AXES} are allowed.")
        if not isinstance(self.verbose, bool):
            faults.append(f"verbose={self.verbose!r} was given; True and False are allowed.")
        stages = self.num_stages, self.submeshes, self.stage_layers, self.stage_mesh_shapes
        if wrong_stages := list(stage_faults(*stages, shape)):
            return [*faults, *wrong_stages]
        for own in self.stage_mesh_shapes or ():
            if own is not None and names is not None and len(own) != len(names):
                faults.append(
                    f"stage_mesh_shapes has {own} of {len(own)} axes, axis_names={names} has {len(names)}; give one name per "
                    "axis."
                )
        faults += self._schedule_faults()
        if self.num_microbatches != "auto" and self.num_microbatches < 1:
            faults.append(
                f"num_microbatches={self.num_microbatches} was given; allowed are 'auto' and numbers from 1. Give a "
                "divisor of the batch size."
            )
        named = isinstance(self.remat, tuple) and self.remat and all(isinstance(n, str) and n for n in self.remat)
        if not named and self.remat not in ("auto", "none", "all"):
            faults.append(
                f"remat={self.remat!r} was given; allowed are 'auto', 'none', 'all', and a tuple of names of values that are "
                "kept, as given by jax.ad_checkpoint.checkpoint_name. Or wrap parts of your function in jax.checkpoint."
            )
        if self.padding not in ("auto", "off"):
            faults.append(f"padding={self.padding!r} was given; allowed are 'auto' and 'off'.")
        if self.annotations not in ("report", "pin"):
            faults.append(f"annotations={self.annotations!r} was given; allowed are 'report' and 'pin'.")
        if wrong := [rule for rule in self.rules if not isinstance(rule, NamedRule)]:
            faults.append(
                f"rules has {wrong[0]!r}; allowed are rules by primitive name, e.g. al.register_rule('my_op', '... i -> ... i'). "
                "A rule for a function is not an option: call what al.register_rule(fn, rule) returns."
            )
        if not self.time_limit_s > 0:
            faults.append(f"time_limit_s={self.time_limit_s} was given; it must be positive (seconds per solve).")
        if self.memory_budget_bytes is not None and not self.memory_budget_bytes > 0:  # nan is none either
            faults.append(f"memory_budget_bytes={self.memory_budget_bytes} was given; it must be positive.")
        return faults

    def _schedule_faults(self) -> list[str]:
        given = self.schedule
        named = isinstance(given, str) and not given.endswith(".csv")
        wrong = given not in SCHEDULES if named else not (isinstance(given, str) or callable(given))
        if wrong:
            return [
                f"schedule={self.schedule!r} was given; allowed are {', '.join(map(repr, SCHEDULES))}, the path of a file that "
                "ends in '.csv', and a function that makes the table."
            ]
        if self.num_chunks < 1 or (self.num_chunks > 1 and self.schedule != "interleaved-1f1b"):
            return [
                f"num_chunks={self.num_chunks} was given with schedule={self.schedule!r}; allowed are numbers from 1 with "
                "'interleaved-1f1b', and 1 with every other schedule."
            ]
        return []

    def _no_numbers(self) -> list[str]:
        """Faults of options that need a number and were given something else, such as the name of the number of workers."""
        faults = []
        for name in (
            "max_axes",
            "memory_budget_bytes",
            "replication_penalty",
            "num_microbatches",
            "num_chunks",
            "time_limit_s",
            "seed",
        ):
            value = getattr(self, name)
            if (name, value) == ("num_microbatches", "auto"):
                continue
            if isinstance(value, str) and value.isidentifier():
                faults.append(
                    f"{name}={value!r} was given; it must be a number. Only one size of mesh_shape may be the name of a "
                    f"symbolic number. Give a number, or plan.specialize({value}=...) first and compute it from there."
                )
            elif value is not None and not isinstance(value, Real):
                faults.append(f"{name}={value!r} was given; it must be a number, e.g. 16e9 for 16 GB.")
        return faults

    @property
    def has_stages(self) -> bool:
        """Whether a pipeline of several stages is asked for."""
        return self.stage_count not in (None, 1)

    @property
    def stage_count(self) -> int | None:
        """The number of stages that is asked for, in whatever way; None if none is."""
        names = "num_stages", "submeshes", "stage_layers", "stage_mesh_shapes"
        return stage_count([(name, getattr(self, name)) for name in names])

    @property
    def fixed_submeshes(self) -> tuple[tuple[int, int], ...] | None:
        """The submeshes that are given, not searched."""
        return None if self.submeshes == "auto" else self.submeshes

    @property
    def symbol(self) -> str | None:
        """The name that stands in ``mesh_shape`` in place of a size, if any."""
        return next((n for n in self.mesh_shape or () if isinstance(n, str)), None)

    @property
    def mesh_sizes(self) -> tuple[int, ...]:
        """``mesh_shape`` where all its sizes are numbers."""
        assert self.mesh_shape is not None and self.symbol is None
        return tuple(n for n in self.mesh_shape if isinstance(n, int))

    def changed(self) -> tuple[tuple[str, OptionValue], ...]:
        """The options that differ from their defaults, by name, for the plan."""
        default = {f.name: f.default for f in fields(self)}
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        changed = {name: value for name, value in values if value != default[name]}
        if self.rules:
            changed["rules"] = tuple(rule.to_text() for rule in self.rules)
        if callable(self.schedule):
            changed["schedule"] = getattr(self.schedule, "__name__", type(self.schedule).__name__)
        changed.pop("verbose", None)
        return tuple(changed.items())


def _is_size(n: object) -> bool:
    return n.isidentifier() if isinstance(n, str) else isinstance(n, Integral) and int(n) >= 1
