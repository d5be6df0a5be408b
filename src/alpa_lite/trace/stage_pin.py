"""``al.pin_stage``: says which pipeline stage computes a value. An identity everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from alpa_lite._jax_compat import identity_primitive
from alpa_lite.errors import LayerError, user_line
from alpa_lite.numeric import whole
from alpa_lite.trace.marked import check_arrays

pin_stage_p = identity_primitive("pin_stage", batched=True)
PIN_STAGE = pin_stage_p.name


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePin:
    """A layer, or an op of a function that is still to be cut into layers, and the stage that it belongs to.

    Attributes:
        place: number of the layer, or of the op.
        stage: of the pipeline, from 0 on.
        source: the user's line.
        leaf: path of a parameter that lies on the stage, where that is the reason; "" for ``al.pin_stage``.
    """

    place: int
    stage: int
    source: str
    leaf: str = ""

    @property
    def reason(self) -> str:
        """What asks for the stage, for messages."""
        return f"the parameter {self.leaf!r}" if self.leaf else f"al.pin_stage at {self.source}"


def pin_stage(x: Any, stage: int) -> Any:
    """``x``, computed by pipeline stage ``stage``: the layer of the op that makes it is given to that stage.

    Of a parameter, the first layer that reads the result; right behind a layer boundary, the layer that begins there. The
    gradient is computed where the value is. Without stages nothing is pinned.

    Args:
        x: a pytree of arrays, inside of the function under ``al.value_and_grad``, outside of its loops.
        stage: from 0 to the number of stages less 1.

    Raises:
        LayerError: the stage is no such number, or a leaf is no array.

    Example:
        >>> h = al.pin_stage(encoder(params, tokens), 0)
        >>> y = al.pin_stage(decoder(params, h), 1)
    """
    number = whole(stage)
    if number is None or number < 0:
        raise LayerError(
            f"al.pin_stage got stage={stage!r:.60}. A stage is a whole number from 0 to num_stages - 1. At {user_line()}. "
            "Give such a number."
        )
    check_arrays(x, "al.pin_stage(x, 1)", LayerError)
    return jax.tree.map(lambda leaf: pin_stage_p.bind(leaf, stage=number), x)
