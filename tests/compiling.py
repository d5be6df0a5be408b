"""Cheaper compilation, for tests in which compiling costs far more than running and no figure of XLA's is read."""

from __future__ import annotations

# XLA's own passes stay as they are (collectives, simplifications); LLVM, which takes the time, optimises nothing.
QUICK_COMPILE: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
