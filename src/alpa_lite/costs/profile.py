"""The memory profile of one decided plan, conversions included: byte-true peak per device and what it is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.core.conversion import Conversion
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.buffers import SharedBlock, temporaries
from alpa_lite.costs.donated import copied_results, saved_arguments, transposed_copies
from alpa_lite.costs.facts import Facts, located, numbers_of, region_of
from alpa_lite.costs.fusion import fused_values, joins_consumers, updating_products
from alpa_lite.costs.instructions import instruction_graph
from alpa_lite.costs.late_order import barriers_of
from alpa_lite.costs.memory import Timeline, peak_usage, times_of
from alpa_lite.costs.second_copies import head_copies, turned_copies
from alpa_lite.costs.split_matmul import (
    Matmul,
    known_kernels,
    local_matmul,
    number_of_parts,
    sum_is_repeated,
    workspace_bytes,
)
from alpa_lite.costs.tensors import (
    MadeTensor,
    Stored,
    category_of,
    donated_results,
    overwritten_arguments,
    products_of,
    reads_of,
    regions_of,
    takers_of,
    tensors_of,
    tile_bytes,
)
from alpa_lite.plan.records import LeafRole, MemoryProfile, OpDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor that is alive at the peak."""

    name: str
    size_bytes: int
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """The profile, the time of the peak, and what is alive then, largest first.

    ``stored`` is everything that comes and goes, but for partial products and saved arguments (not for CPU, where a block
    of memory holds it). Sizes on a mesh follow from it; what XLA:GPU stores twice or not at all may be other tensors on another.
    """

    profile: MemoryProfile
    time: int
    alive: tuple[Tensor, ...]
    stored: tuple[Stored, ...] = ()


def memory_profile(
    program: Program,
    line: Timeline,
    mesh: DeviceMesh,
    *,
    in_specs: Sequence[ShardingSpec],
    out_specs: Sequence[ShardingSpec],
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    roles: Sequence[LeafRole],
    barriers_copy: bool = False,
    facts: Facts | None = None,
) -> PeakReport:
    """Walk the plan's tensors through time: for CPU as ``costs/buffers.py`` says, else as ``costs/memory.py`` does.

    ``barriers_copy``: on CPU, see ``instruction_graph``. ``facts``: of the program, if some are known.
    """
    totals = step_totals(program, mesh, in_specs=in_specs, out_specs=out_specs, roles=roles)
    stored: list[Stored] = []
    workspace: list[Stored] = []
    shapes = {program.values[v].shape for v, r in zip(program.inputs, roles, strict=True) if r is LeafRole.PARAMETER}
    base = sum(totals.values())
    if line.order.on_cpu:
        graph = instruction_graph(
            program,
            mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            decisions=decisions,
            conversions=conversions,
            barriers_copy=barriers_copy,
        )
        stacked = frozenset(a.result for a in overwritten_arguments(program) if a.stacked)
        block = temporaries(graph, donated_results(program), stacked)
        peak, time, alive = base + block.size_bytes, block.time, _blocktensors_of(block, shapes)
    else:
        facts = Facts(program) if facts is None else facts
        stored = _stored(facts, line, decisions, conversions, shapes)
        stored += turned_copies(facts, line, decisions, conversions)
        stored += copied_results(facts, line, in_specs) + transposed_copies(facts, line, in_specs)
        stored += head_copies(facts, mesh, decisions, conversions, stored)
        inside = _computed_in_updates(facts, mesh, decisions, conversions)
        stored = [t for t in stored if t.name not in inside] if inside else stored
        workspace = _workspace(facts, line, mesh, decisions, conversions, stored)
        workspace += saved_arguments(facts, line, mesh, in_specs)
        peak, time, living = _peak(stored, workspace, mesh, line.num_times, base)
        alive = [Tensor(name=t.name, size_bytes=s, category=t.category) for t, s in living]
    alive.sort(key=lambda t: (-t.size_bytes, t.name))
    at_peak = {word: sum(t.size_bytes for t in alive if t.category == word) for word in _TEMPORARY}
    profile = MemoryProfile(**totals, **at_peak, peak=peak)
    return PeakReport(profile=profile, time=time, alive=tuple(alive), stored=tuple(stored))


def _peak(
    stored: Sequence[Stored], workspace: Sequence[Stored], mesh: DeviceMesh, num_times: int, base: int
) -> tuple[int, int, list[tuple[Stored, int]]]:
    """Peak bytes, its time, and what is alive then with its bytes on a device; sizes in ``workspace`` are those already."""
    shards: dict[int, int] = {}  # by identity: thousands of tensors share a few layouts
    sizes = []
    for t in stored:
        parts = shards.get(id(t.spec))
        if parts is None:
            parts = shards[id(t.spec)] = mesh.axes_size(t.spec.sharded_axes)
        sizes.append(t.whole_bytes // parts)
    everything = [*stored, *workspace]
    sizes += [t.whole_bytes for t in workspace]
    peak, time = peak_usage([t.lo for t in everything], [t.hi for t in everything], sizes, num_times, base)
    return peak, time, [(t, s) for t, s in zip(everything, sizes, strict=True) if t.lo <= time < t.hi and s]


def step_totals(
    program: Program,
    mesh: DeviceMesh,
    *,
    in_specs: Sequence[ShardingSpec],
    out_specs: Sequence[ShardingSpec],
    roles: Sequence[LeafRole],
) -> dict[str, int]:
    """Per category, bytes of arguments, results and constants, which count for the whole step."""
    totals = dict.fromkeys(("parameters", "optimizer_state", "inputs", "outputs", "constants"), 0)
    words = {LeafRole.PARAMETER: "parameters", LeafRole.OPTIMIZER_STATE: "optimizer_state"}
    donated = donated_results(program)
    leaves = [(words.get(role, "inputs"), v, s) for v, s, role in zip(program.inputs, in_specs, roles, strict=True)]
    for position, (value, spec) in enumerate(zip(program.outputs, out_specs, strict=True)):
        if position not in donated and value >= 0:
            leaves.append(("outputs", value, spec))
    known: dict[tuple[tuple[int, ...], int, int], int] = {}  # leaves of one type and layout repeat
    for word, value, spec in leaves:
        v = program.values[value]
        key = v.shape, v.itemsize, id(spec)
        if key not in known:
            known[key] = tile_bytes(program, value, spec, mesh)
        totals[word] += known[key]
    totals["constants"] = sum(program.values[v].size_bytes for v in program.constants)
    return totals


def _blocktensors_of(block: SharedBlock, parameter_shapes: set[tuple[int, ...]]) -> list[Tensor]:
    """What lies in XLA:CPU's block of temporaries when most of it is used, and the gaps in between."""
    alive = []
    for buffer in block.alive:
        made = buffer.instruction
        category = category_of(made.scope, made.shape in parameter_shapes)
        alive.append(Tensor(name=made.name, size_bytes=buffer.size_bytes, category=category))
    gaps = block.size_bytes - sum(t.size_bytes for t in alive)
    return [*alive, Tensor(name="gaps between buffers", size_bytes=gaps, category="temporaries")] if gaps else alive


def _stored(
    facts: Facts,
    line: Timeline,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    parameter_shapes: set[tuple[int, ...]],
) -> list[Stored]:
    """Everything that is neither argument nor result."""
    regions = facts.of(regions_of, facts.program)
    tensors = facts.of(tensors_of, facts.program, parameter_shapes=frozenset(parameter_shapes))
    converted = {(region_of(c.op), c.value) for c in conversions}
    items: list[Stored] = []
    last = _last_reads(facts, line, decisions, conversions, converted)
    unstored = _unstored_layouts(facts, regions, tensors, decisions, conversions, converted)
    for conversion in reversed(conversions):
        key = (region_of(conversion.op), conversion.value)
        if (*key, conversion.target) in unstored:  # computed where it is read, from a source that lasts until then
            source = (*key, conversion.source)
            last[source] = max(last.get(source, 0), last.get((*key, conversion.target), 0))
    for interval in line.intervals:
        key = (interval.region, interval.value)
        tensor = tensors.get(key)
        if tensor is None:
            continue
        spec, lo, hi = decisions[tensor.op].results[tensor.result], interval.lo, interval.hi
        if interval.updated and key not in converted:
            continue
        if key in converted:
            if (*key, spec) in unstored:
                continue
            # A tensor that is converted dies in its first layout once the last reader of that layout is done.
            hi = hi if interval.copy else last.get((*key, spec), 0)
        items.append(Stored(lo, max(hi, lo + 1), tensor.size_bytes, spec, tensor.name, tensor.category))
    kept = [c for c in conversions if (region_of(c.op), c.value, c.target) not in unstored]
    return items + _converted(regions, line, kept, last)


def _workspace(
    facts: Facts,
    line: Timeline,
    mesh: DeviceMesh,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    stored: Sequence[Stored],
) -> list[Stored]:
    """What the partial products of split matmuls need beside their results; sizes are those on one device."""
    converted = {(region_of(c.op), c.value) for c in conversions}
    ops = facts.of(located, facts.program)
    made: dict[str, Stored] = {}
    found = []
    known: dict[tuple[int, int], tuple[Matmul | None, int]] = {}  # layers repeat
    for index, kind in facts.of(products_of, facts.program):
        (prefix, path, region, op), operands = ops[index], decisions[index].operands
        if (kind, id(operands)) not in known:
            product = local_matmul(op, region, operands, mesh)
            known[kind, id(operands)] = product, 1 if product is None else number_of_parts(product)
        product, parts = known[kind, id(operands)]
        if product is None or parts == 1:
            continue
        made = made or {t.name: t for t in reversed(stored)}
        value, begin = op.outputs[0], line.start[path]
        kernels = known_kernels(facts, region, value)
        total = workspace_bytes(product, parts)
        end, size = begin + 1, total
        result = made.get(f"{prefix}%{value}")
        # What passes a barrier is stored before it (see lowering/lower.py).
        place = int(path[len(prefix) :])
        held = any(place < barrier < max(kernels, default=0) for barrier in facts.of(barriers_of, region))
        kept = (prefix, value) not in converted and value not in region.outputs and not held
        if result is not None and kept and sum_is_repeated(product, parts, [region.ops[k] for k in kernels]):
            end = max(result.hi, *(line.end[f"{prefix}{k}"] for k in kernels))
            size = total - product.elements * product.result_bytes  # they are instead of the result
        name = f"{prefix}%{value} partial products"
        found.append(Stored(begin, end, size, ShardingSpec(()), name, "temporaries"))
    return found


def _computed_in_updates(
    facts: Facts, mesh: DeviceMesh, decisions: Sequence[OpDecision], conversions: Sequence[Conversion]
) -> set[str]:
    """Names of the products that are not stored, as the kernel that computes them updates the state with them."""
    converted = {(region_of(c.op), c.value) for c in conversions}
    numbers, found = facts.of(numbers_of, facts.program), set()
    for prefix, region in facts.of(regions_of, facts.program).items():
        for index in facts.of(updating_products, region, fused=facts.of(fused_values, region, gpu=True)):
            op, operands = region.ops[index], decisions[numbers[f"{prefix}{index}"]].operands
            product = local_matmul(op, region, operands, mesh)
            if product is not None and number_of_parts(product) == 1 and (prefix, op.outputs[0]) not in converted:
                found.add(f"{prefix}%{op.outputs[0]}")
    return found


_TEMPORARY = ("gradients", "activations", "temporaries")


def _converted(
    regions: dict[str, Program],
    line: Timeline,
    conversions: Sequence[Conversion],
    last: dict[tuple[str, int, ShardingSpec], int],
) -> list[Stored]:
    """Converted layouts live from their place to the last op that reads them (or converts them on)."""
    items = []
    for conversion in conversions:
        region = region_of(conversion.op)
        lo, _ = times_of(conversion, line)
        key = (region, conversion.value, conversion.target)
        hi = max(last.get(key, lo), lo + 1)
        size, name = regions[region].values[conversion.value].size_bytes, f"{region}%{conversion.value} as"
        items.append(Stored(lo, hi, size, conversion.target, f"{name} {conversion.target}", "temporaries"))
        for step in conversion.steps[:-1]:
            items.append(Stored(lo, lo + 1, size, step.after, f"{name} {step.after}", "temporaries"))
    return items


def _unstored_layouts(
    facts: Facts,
    regions: dict[str, Program],
    tensors: Mapping[tuple[str, int], MadeTensor],
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    converted: Collection[tuple[str, int]],
) -> set[tuple[str, int, ShardingSpec]]:
    """Layouts without a buffer because of slices: cutting out a tile moves no data, so XLA fuses it like any indexing.

    A sliced layout is computed by its readers if all of them can; a tensor that is only ever read through one slice, and
    made by an op that can be computed inside the slice, is made as the slice at once.
    """
    ops, takers = facts.of(located, facts.program), facts.of(takers_of, facts.program)
    reads = facts.of(reads_of, facts.program)
    readers: dict[tuple[str, int, ShardingSpec], list[bool]] = defaultdict(list)
    makers: dict[tuple[str, int], tuple[Op, ShardingSpec]] = {}
    for key in converted:
        for index, operand in reads.get(key, ()):
            readers[*key, decisions[index].operands[operand]].append(takers[index])
        if key in tensors:
            index, result = tensors[key][:2]
            makers[key] = ops[index][3], decisions[index].results[result]
    found = set()
    for conversion in reversed(conversions):
        region, value = region_of(conversion.op), conversion.value
        slices = all(step.kind is None for step in conversion.steps)
        readers[(region, value, conversion.source)].append(slices)
        results = regions[region].outputs
        uses = readers[(region, value, conversion.target)]
        if slices and value not in results and uses and all(uses):
            found.add((region, value, conversion.target))
    for conversion in conversions:
        region, value = region_of(conversion.op), conversion.value
        op, made = makers.get((region, value), (None, None))
        if (
            op is not None
            and made is not None
            and conversion.source == made
            and joins_consumers(op)
            and readers[region, value, made] == [True]
        ):
            found.add((region, value, made))
    return found


def _last_reads(
    facts: Facts,
    line: Timeline,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    converted: Collection[tuple[str, int]],
) -> dict[tuple[str, int, ShardingSpec], int]:
    """Time after the last reader of every (region, value, spec) of the values that are converted."""
    ops, readers = facts.of(located, facts.program), facts.of(reads_of, facts.program)
    last: dict[tuple[str, int, ShardingSpec], int] = {}
    for region, value in converted:
        for index, operand in readers.get((region, value), ()):
            key = (region, value, decisions[index].operands[operand])
            _, path, _, op = ops[index]
            goes_on = (
                op.num_consts <= operand < op.num_consts + op.num_carry
            )  # in the buffer that a loop's carry starts in
            last[key] = max(last.get(key, 0), line.start[path] if goes_on else line.read_end[path])
    for conversion in conversions:
        key = (region_of(conversion.op), conversion.value, conversion.source)
        last[key] = max(last.get(key, 0), times_of(conversion, line)[1] + 1)
    return last
