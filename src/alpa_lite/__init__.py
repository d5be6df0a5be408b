"""alpa_lite: plans how a JAX program is spread over devices, and runs exactly that plan.

Example:
    >>> import alpa_lite as al
    >>> plan = al.plan(train_step, state_shapes, batch_shapes, cluster=al.Cluster.parse("1x8:h100-sxm"))
    >>> print(plan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# `al.plan` is a function, `alpa_lite.plan` a package. The package is loaded once here and its name released, so that
# `__getattr__` below finds the function; `from alpa_lite.plan.x import y` goes through sys.modules and is not affected.
import alpa_lite.plan  # noqa: F401
from alpa_lite._version import __version__ as __version__

del globals()["plan"]

if TYPE_CHECKING:
    from alpa_lite import analysis as analysis
    from alpa_lite import interop as interop
    from alpa_lite import schedule as schedule
    from alpa_lite import serve as serve
    from alpa_lite.api import Checkpoint as Checkpoint
    from alpa_lite.api import Cluster as Cluster
    from alpa_lite.api import Elastic as Elastic
    from alpa_lite.api import FitResult as FitResult
    from alpa_lite.api import HostData as HostData
    from alpa_lite.api import ParallelStep as ParallelStep
    from alpa_lite.api import PlanTarget as PlanTarget
    from alpa_lite.api import RayExecutor as RayExecutor
    from alpa_lite.api import StepReport as StepReport
    from alpa_lite.api import fit as fit
    from alpa_lite.api import graph as graph
    from alpa_lite.api import load_export as load_export
    from alpa_lite.api import load_plan as load_plan
    from alpa_lite.api import parallelize as parallelize
    from alpa_lite.api import plan as plan
    from alpa_lite.api.shared import plan_shared as plan_shared
    from alpa_lite.api.shared_layout import SharedLayout as SharedLayout
    from alpa_lite.errors import AlpaLiteError as AlpaLiteError
    from alpa_lite.errors import NotFiniteError as NotFiniteError
    from alpa_lite.errors import WorkerLost as WorkerLost
    from alpa_lite.executor.ray.remote_array import RemoteArray as RemoteArray
    from alpa_lite.executor.staged_array import StagedArray as StagedArray
    from alpa_lite.lowering.reshard import conversion as conversion
    from alpa_lite.lowering.reshard import reshard as reshard
    from alpa_lite.plan.plan import Plan as Plan
    from alpa_lite.planner.options import PlanOptions as PlanOptions
    from alpa_lite.trace import rule_tools as rules  # noqa: F401
    from alpa_lite.trace.boundary import layer_boundary as layer_boundary
    from alpa_lite.trace.microbatch import grad as grad
    from alpa_lite.trace.microbatch import value_and_grad as value_and_grad
    from alpa_lite.trace.pin_op import pin as pin
    from alpa_lite.trace.stage_pin import pin_stage as pin_stage
    from alpa_lite.trace.user_op import register_rule as register_rule

# Public names are loaded on first use, so that `import alpa_lite` does not import JAX or the solver.
_PUBLIC = {
    "AlpaLiteError": "alpa_lite.errors",
    "Checkpoint": "alpa_lite.api",
    "Cluster": "alpa_lite.api",
    "Elastic": "alpa_lite.api",
    "FitResult": "alpa_lite.api",
    "HostData": "alpa_lite.api",
    "NotFiniteError": "alpa_lite.errors",
    "ParallelStep": "alpa_lite.api",
    "Plan": "alpa_lite.plan.plan",
    "PlanOptions": "alpa_lite.planner.options",
    "PlanTarget": "alpa_lite.api",
    "RayExecutor": "alpa_lite.api",
    "SharedLayout": "alpa_lite.api.shared_layout",
    "RemoteArray": "alpa_lite.executor.ray.remote_array",
    "StagedArray": "alpa_lite.executor.staged_array",
    "StepReport": "alpa_lite.api",
    "WorkerLost": "alpa_lite.errors",
    "fit": "alpa_lite.api",
    "conversion": "alpa_lite.lowering.reshard",
    "grad": "alpa_lite.trace.microbatch",
    "graph": "alpa_lite.api",
    "layer_boundary": "alpa_lite.trace.boundary",
    "load_export": "alpa_lite.api",
    "load_plan": "alpa_lite.api",
    "parallelize": "alpa_lite.api",
    "pin": "alpa_lite.trace.pin_op",
    "pin_stage": "alpa_lite.trace.stage_pin",
    "plan": "alpa_lite.api",
    "plan_shared": "alpa_lite.api.shared",
    "reshard": "alpa_lite.lowering.reshard",
    "register_rule": "alpa_lite.trace.user_op",
    "value_and_grad": "alpa_lite.trace.microbatch",
}
_MODULES = {
    "analysis": "alpa_lite.analysis",
    "interop": "alpa_lite.interop",
    "rules": "alpa_lite.trace.rule_tools",
    "schedule": "alpa_lite.schedule",
    "serve": "alpa_lite.serve",
}


def __getattr__(name: str) -> Any:
    import importlib
    import sys

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        setattr(sys.modules[__name__], name, value)
        return value
    raise AttributeError(f"module 'alpa_lite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC, *_MODULES])
