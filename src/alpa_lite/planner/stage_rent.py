"""What a stage holds while microbatches pass, for a price on it (``rent.py``).

One rent for all runs of layers gives plans that belong together: what one layer saves at that price, no other saves for less.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from alpa_lite.core.program import Program
from alpa_lite.intraop.decision_graph import DecisionGraph, Link
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.planner.rent import Held
from alpa_lite.trace.stages import StageProgram


def held_bytes(pricer: Pricer, part: StageProgram, program: Program, in_flight: float) -> Held:
    """Per node and choice the bytes per device that a stage holds throughout its loop.

    Arguments of the step, the loop's constants and sums; and ``in_flight`` times what each microbatch keeps from its forward to
    its backward pass. A constant that lies as the argument that it is counts twice.

    Args:
        pricer: of the stage's program on a mesh.
        part, program: the stage.
        in_flight: microbatches in flight.
    """
    graph, loop = pricer.graph, program.ops[part.loop]
    body, path = loop.bodies[0], str(part.loop)
    parts: dict[int, list[np.ndarray]] = defaultdict(list)

    def port(node: int, itemsize: int, times: float = 1.0) -> None:
        found = graph.nodes[node]
        assert found.specs is not None
        parts[node].append(times * pricer.tile_bytes(found.shape, itemsize, found.specs))

    for node, value in list(zip(graph.inputs, program.inputs, strict=True))[: len(part.args)]:
        port(node, program.values[value].itemsize)
    kept = _read_by_both(body, part.num_forward)
    received = len(body.inputs) - sum(c.when == "loop" for c in part.received)
    for position, (node, value) in enumerate(zip(graph.body_ports[path][0], body.inputs, strict=True)):
        if position < loop.num_consts + loop.num_carry:
            port(node, body.values[value].itemsize)
        elif position >= received and value in kept:
            port(node, body.values[value].itemsize, in_flight)
    inside = {v for i in range(part.num_forward) for v in body.ops[i].outputs} & kept
    for link in graph.links:
        if link.region == f"{path}.0." and link.value in inside:
            node, specs = _handed_on(graph, link)
            parts[node].append(in_flight * pricer.tile_bytes(link.shape, link.itemsize, specs))
    return {node: np.sum(sizes, axis=0) for node, sizes in parts.items()}


def _read_by_both(body: Program, num_forward: int) -> set[int]:
    """Values that the forward pass makes or reads and the backward pass reads."""
    forward = {v for op in body.ops[:num_forward] for v in (*op.inputs, *op.outputs)}
    return forward & {v for op in body.ops[num_forward:] for v in op.inputs if v >= 0}


def _handed_on(graph: DecisionGraph, link: Link) -> tuple[int, np.ndarray]:
    """The node that decides in which layout a value is kept, and that layout by choice."""
    if link.copy < 0:
        return link.producer.node, link.producer.specs
    return link.copy, graph.handed_on(link.copy)
