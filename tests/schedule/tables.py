"""Action tables and steps to try things on: every generator, random tables, and a step with all that can flow."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from alpa_lite.schedule import Action, ActionKind, Buffer, Origin, Port, Schedule, StageIO, StepIO, make_schedule
from alpa_lite.schedule.make import with_recompute, with_step_actions

K = ActionKind
TRAINING = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "interleaved-1f1b")
COUNTS = [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 4 * p)]


def table(name: str, num_meshes: int, num_microbatches: int, num_chunks: int = 2, **options) -> Schedule:
    """A generator's table; ``num_chunks`` counts for the interleaved one only."""
    chunks = num_chunks if name == "interleaved-1f1b" else 1
    return make_schedule(name, num_meshes * chunks, num_microbatches, chunks, **options)


def random_table(rng: random.Random) -> Schedule:
    """A table that can run: again and again, some action whose needs are met goes to the end of its mesh's column."""
    stages, microbatches = rng.randint(1, 5), rng.randint(1, 5)
    meshes = rng.randint(1, stages)
    home = [*range(meshes), *(rng.randrange(meshes) for _ in range(stages - meshes))]
    rng.shuffle(home)
    split = {(s, k) for s in range(stages) for k in range(microbatches) if rng.random() < 0.4}
    done: set[tuple] = set()
    columns: list[list[Action]] = [[] for _ in range(meshes)]
    left = {("F", s, k) for s in range(stages) for k in range(microbatches)}
    left |= {(kind, *at) for at in split for kind in "IW"}
    left |= {("B", s, k) for s in range(stages) for k in range(microbatches) if (s, k) not in split}

    def ready(action: tuple) -> bool:
        kind, s, k = action
        back = s + 1 == stages or ("I" if (s + 1, k) in split else "B", s + 1, k) in done
        return {
            "F": s == 0 or ("F", s - 1, k) in done,
            "W": ("I", s, k) in done,
            "I": ("F", s, k) in done and back,
            "B": ("F", s, k) in done and back,
        }[kind]

    while left:
        kind, s, k = rng.choice(sorted(action for action in left if ready(action)))
        columns[home[s]].append(Action(K(kind), s, k))
        left.remove((kind, s, k))
        done.add((kind, s, k))
    schedule = Schedule(
        name="random", num_stages=stages, num_microbatches=microbatches, columns=tuple(map(tuple, columns))
    )
    return with_step_actions(with_recompute(schedule, [s for s in range(stages) if rng.random() < 0.3]))


random_tables = st.integers(0, 10**9).map(lambda seed: random_table(random.Random(seed)))


def rich_step(schedule: Schedule, rng: random.Random) -> StepIO:
    """A step with skipped stages, a weight read by the last stage too, a norm over all gradients, batches and losses."""
    kinds = {(a.stage, a.kind) for column in schedule.columns for a in column}
    last = schedule.num_stages - 1
    buffers = [Buffer(name="batch", origin=Origin.ARGUMENT, stages=(0,))]
    buffers += [Buffer(name="labels", origin=Origin.ARGUMENT, stages=(last,)), Buffer(name="loss", kept=True)]
    buffers += [Buffer(name="mean", origin=Origin.ZEROS, per_microbatch=False, kept=True)]
    reads: dict[tuple, list[str]] = {at: [] for at in kinds}
    writes: dict[tuple, list[str]] = {at: [] for at in kinds}

    def flow(name: str, maker: tuple, readers: list[tuple], **more) -> None:
        buffers.append(Buffer(name=name, **more))
        writes[maker].append(name)
        for reader in readers:
            if reader in kinds and reader != maker:
                reads[reader].append(name)

    backward = {s: [k for k in (K.B, K.I, K.W) if (s, k) in kinds] for s in range(last + 1)}
    reads[0, K.F].append("batch")
    reads[last, K.F] += ["labels", "mean"]
    writes[last, K.F] += ["loss", "mean"]
    for s in range(last + 1):
        buffers.append(Buffer(name=f"w{s}", origin=Origin.ARGUMENT, per_microbatch=False, stages=(s,), kept=True))
        shared = [last] if s == 0 and last else []
        for reader in (s, *shared):
            for kind in (K.F, *(k for k in backward[reader] if k is not K.W)):
                reads[reader, kind].append(f"w{s}")
        later = [t for t in range(s + 1, last + 1) if t == s + 1 or rng.random() < 0.3]
        users = [(t, K.F) for t in later] + [(t, k) for t in later for k in backward[t] if rng.random() < 0.3]
        flow(f"x{s}", (s, K.F), users)
        flow(f"r{s}", (s, K.RECOMPUTE if (s, K.RECOMPUTE) in kinds else K.F), [(s, k) for k in backward[s]])
        if (s, K.RECOMPUTE) in kinds:
            flow(f"i{s}", (s, K.F), [(s, K.RECOMPUTE)])
        if s:
            # A stage may be split for some microbatches only: B and I then take turns.
            buffers.append(Buffer(name=f"dx{s}"))
            for kind in {K.B, K.I} & set(backward[s]):
                writes[s, kind].append(f"dx{s}")
            for kind in {K.B, K.I} & set(backward[s - 1]):
                reads[s - 1, kind].append(f"dx{s}")
        sums = [f"g{s}", *(["tied"] if s == last and last else [])]
        for name in sums:
            buffers.append(Buffer(name=name, origin=Origin.ZEROS, per_microbatch=False))
            for kind in (K.B, K.W):
                if (s, kind) in kinds:
                    reads[s, kind].append(name)
                    writes[s, kind].append(name)
        for at in ((s, K.GRADSYNC), (s, K.UPDATE)):
            reads[at].append(f"g{s}")
        writes[s, K.GRADSYNC].append(f"g{s}")
        flow(f"n{s}", (s, K.GRADSYNC), [(t, K.UPDATE) for t in range(last + 1)], per_microbatch=False)
        reads[s, K.UPDATE].append(f"w{s}")
        writes[s, K.UPDATE].append(f"w{s}")
    if last:
        reads[0, K.UPDATE].append("tied")
    programs = tuple(
        StageIO(
            stage=s,
            kind=kind,
            reads=tuple(Port(n, rng.randint(1, 9)) for n in dict.fromkeys(reads[s, kind])),
            writes=tuple(Port(n, rng.randint(1, 9)) for n in dict.fromkeys(writes[s, kind])),
            temporary_bytes=rng.randint(0, 5),
        )
        for s, kind in sorted(kinds)
    )
    return StepIO(buffers=tuple(buffers), programs=programs)
