"""Makes intra-op problems with the shape of a transformer's training step: equal layers, forward, backward, update.

A small stand-in for the planner: every op is a contraction or an elementwise op over named factors, a strategy assigns each
of two mesh axes to one factor or to none, and an edge costs what it takes to turn the producer's layout into the one that
the consumer wants. Arrays are shared between copies as the planner shares them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage

AXES = (8, 8)
BANDWIDTH = (50e9, 300e9)
FLOPS = 4e14
SIZES = {"b": 16, "s": 8192, "t": 8192, "d": 4096, "f": 14336, "h": 32, "e": 128, "v": 128256}


@dataclass(slots=True)
class Builder:
    """Collects nodes and edges; a tensor is (node, its dims)."""

    costs: list[np.ndarray] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    strategies: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)
    cache: dict[object, object] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)

    def op(self, name: str, inputs: list[tuple[int, str]], output: str, flops_of: str = "") -> tuple[int, str]:
        """Adds an op over the letters of its operands; ``name`` is equal for copies."""
        factors = "".join(dict.fromkeys("".join(dims for _, dims in inputs) + output))
        key = ("node", factors, output, flops_of)
        if key not in self.cache:
            self.cache[key] = _strategies(factors, output, flops_of)
        strategies, costs = self.cache[key]
        node = len(self.costs)
        self.costs.append(costs)
        self.strategies.append(strategies)
        self.outputs.append(output)
        self.last_use.append(node + 1)
        self.classes.append(self.names.setdefault(name, len(self.names)))
        for source, dims in inputs:
            self.last_use[source] = node + 1
            self.edges.append(Edge(u=source, v=node, costs=self.conversion(source, dims, strategies, factors)))
        return node, output

    def conversion(self, source: int, dims: str, target: tuple[tuple[str, ...], ...], factors: str) -> np.ndarray:
        key = ("edge", self.outputs[source], self.strategies[source], dims, target, factors)
        if key not in self.cache:
            size = 2.0 * np.prod([SIZES[c] for c in dims])
            rename = dict(zip(self.outputs[source], dims, strict=True))
            have = [tuple(rename.get(c, "+" if c not in ("", "*") else c) for c in s) for s in self.strategies[source]]
            want = [tuple(c if c in dims else "" for c in s) for s in target]
            self.cache[key] = np.array([[_convert(a, b, size) for b in want] for a in have])
        return self.cache[key]

    def same_layout(self, a: int, b: int) -> None:
        """Two nodes of one tensor kind must agree (state in, state out)."""
        k = len(self.costs[a])
        key = ("same", k)
        if key not in self.cache:
            self.cache[key] = np.where(np.eye(k, dtype=bool), 0.0, np.inf)
        self.edges.append(Edge(u=a, v=b, costs=self.cache[key]))


def _strategies(factors: str, output: str, flops_of: str) -> tuple[tuple[tuple[str, ...], ...], np.ndarray]:
    choices = list(itertools.product(["", *factors], repeat=2))
    flops = 2.0 * np.prod([float(SIZES[c]) for c in flops_of]) if flops_of else 0.0
    touched = 4.0 * np.prod([float(SIZES[c]) for c in output])
    costs = []
    for choice in choices:
        parts = np.prod([n for n, c in zip(AXES, choice, strict=True) if c])
        costs.append(max(flops / parts / FLOPS, touched / parts / 3e12) + 1e-9 * len([c for c in choice if not c]))
    return tuple(choices), np.array(costs)


def _convert(have: tuple[str, ...], want: tuple[str, ...], size: float) -> float:
    """Seconds from one layout to another; "+" = partial sums. Axes one by one, each on the local part."""
    local = size
    for n, h in zip(AXES, have, strict=True):
        local /= n if h not in ("", "+") else 1
    total = 0.0
    for n, bandwidth, h, w in zip(AXES, BANDWIDTH, have, want, strict=True):
        if h == w:
            continue
        if h == "+":
            total += (1 if w else 2) * local * (n - 1) / n / bandwidth + 1e-5
            local /= n if w else 1
        elif h and w:
            total += local * (n - 1) / n / bandwidth + 1e-5
        elif h:
            total += local * (n - 1) / bandwidth + 1e-5
            local *= n
        else:
            local /= n
    return total


def layered(num_layers: int, *, limit_fraction: float | None = None) -> IntraOpProblem:
    """The problem of ``num_layers`` layers; the limit is a fraction of the peak of the free optimum's memory-blind guess."""
    b = Builder()
    mm, params, tape = _matmul, [], []
    x = b.op("embed", [], "bsd")
    for _ in range(num_layers):
        x = _layer(b, x, params, tape, mm)
    head = b.op("head", [], "dv")
    params.append(("head", head))
    logits = mm(b, "logits", x, head, "bsv")
    g = b.op("loss.grad", [logits], "bsv")
    grads = {head[0]: mm(b, "d.head", x, g, "dv")}
    g = mm(b, "d.logits", g, head, "bsd")
    for entry in reversed(tape):
        g = _backward(b, g, entry, grads)
    for name, p in params:
        m = b.op(f"adam.m.{name}", [], p[1])
        new_m = b.op(f"adam.m2.{name}", [m, grads[p[0]]], p[1])
        step = b.op(f"adam.u.{name}", [new_m], p[1])
        new = b.op(f"adam.p.{name}", [p, step], p[1])
        b.same_layout(p[0], new[0])
        b.same_layout(m[0], new_m[0])
    return _problem(b, limit_fraction)


def _matmul(b: Builder, name: str, x: tuple[int, str], y: tuple[int, str], out: str) -> tuple[int, str]:
    return b.op(name, [x, y], out, flops_of="".join(dict.fromkeys(x[1] + y[1])))


def _layer(b: Builder, x: tuple[int, str], params: list, tape: list, mm: object) -> tuple[int, str]:
    w = {}
    for name, dims in (
        ("q", "dhe"),
        ("k", "dhe"),
        ("v", "dhe"),
        ("o", "hed"),
        ("up", "df"),
        ("gate", "df"),
        ("down", "fd"),
    ):
        w[name] = b.op(f"param.{name}", [], dims)
        params.append((name, w[name]))
    sq = b.op("norm.sq", [x], "bs")
    n = b.op("norm.mul", [x, sq], "bsd")
    q, k, v = (mm(b, f"mm.{c}", n, w[c], "bshe") for c in "qkv")
    q, k = b.op("rope.q", [q], "bshe"), b.op("rope.k", [k], "bshe")
    s = mm(b, "scores", q, (k[0], "bthe"), "bhst")
    p = b.op("softmax", [s], "bhst")
    o = mm(b, "attend", p, (v[0], "bthe"), "bshe")
    a = mm(b, "mm.o", o, w["o"], "bsd")
    r = b.op("residual1", [x, a], "bsd")
    sq2 = b.op("norm2.sq", [r], "bs")
    n2 = b.op("norm2.mul", [r, sq2], "bsd")
    up, gate = mm(b, "mm.up", n2, w["up"], "bsf"), mm(b, "mm.gate", n2, w["gate"], "bsf")
    act = b.op("silu", [gate], "bsf")
    both = b.op("glu", [up, act], "bsf")
    down = mm(b, "mm.down", both, w["down"], "bsd")
    y = b.op("residual2", [r, down], "bsd")
    tape.append(
        {
            "w": w,
            "x": x,
            "n": n,
            "q": q,
            "k": k,
            "v": v,
            "p": p,
            "o": o,
            "r": r,
            "n2": n2,
            "up": up,
            "gate": gate,
            "act": act,
            "both": both,
        }
    )
    return y


def _backward(b: Builder, g: tuple[int, str], t: dict, grads: dict) -> tuple[int, str]:
    mm, w = _matmul, t["w"]
    grads[w["down"][0]] = mm(b, "dw.down", t["both"], g, "fd")
    d_both = mm(b, "d.both", g, w["down"], "bsf")
    d_up = b.op("d.up", [d_both, t["act"]], "bsf")
    d_act = b.op("d.act", [d_both, t["up"]], "bsf")
    d_gate = b.op("d.gate", [d_act, t["gate"]], "bsf")
    grads[w["up"][0]] = mm(b, "dw.up", t["n2"], d_up, "df")
    grads[w["gate"][0]] = mm(b, "dw.gate", t["n2"], d_gate, "df")
    d_n2 = b.op("d.n2", [mm(b, "d.n2a", d_up, w["up"], "bsd"), mm(b, "d.n2b", d_gate, w["gate"], "bsd")], "bsd")
    d_r = b.op("d.r", [g, b.op("d.norm2", [d_n2, t["r"]], "bsd")], "bsd")
    grads[w["o"][0]] = mm(b, "dw.o", t["o"], d_r, "hed")
    d_o = mm(b, "d.o", d_r, w["o"], "bshe")
    d_v = mm(b, "d.v", (t["p"][0], "bhts"), (d_o[0], "bthe"), "bshe")
    d_p = mm(b, "d.p", d_o, (t["v"][0], "bthe"), "bhst")
    d_s = b.op("d.softmax", [d_p, t["p"]], "bhst")
    d_q = b.op("d.rope.q", [mm(b, "d.q", d_s, (t["k"][0], "bthe"), "bshe")], "bshe")
    d_k = b.op("d.rope.k", [mm(b, "d.k", (d_s[0], "bhts"), (t["q"][0], "bthe"), "bshe")], "bshe")
    parts = []
    for c, d in (("q", d_q), ("k", d_k), ("v", d_v)):
        grads[w[c][0]] = mm(b, f"dw.{c}", t["n"], d, "dhe")
        parts.append(mm(b, f"d.n.{c}", d, w[c], "bsd"))
    d_n = b.op("d.n", [b.op("d.n.sum", parts[:2], "bsd"), parts[2]], "bsd")
    return b.op("d.x", [d_r, b.op("d.norm", [d_n, t["x"]], "bsd")], "bsd")


def _problem(b: Builder, limit_fraction: float | None) -> IntraOpProblem:
    usages, num_times = [], len(b.costs)
    sizes: dict[object, np.ndarray] = {}
    for node, (strategies, dims) in enumerate(zip(b.strategies, b.outputs, strict=True)):
        key = (strategies, dims)
        if key not in sizes:
            whole = 2 * int(np.prod([SIZES[c] for c in dims]))
            parts = [int(np.prod([n for n, c in zip(AXES, s, strict=True) if c in dims and c])) for s in strategies]
            sizes[key] = np.array([whole // p for p in parts], dtype=np.int64)
        usages.append(Usage(node=node, lo=node, hi=min(num_times, b.last_use[node]), size_bytes=sizes[key]))
    problem = IntraOpProblem(
        node_costs=tuple(b.costs),
        edges=tuple(b.edges),
        usages=tuple(usages),
        num_times=num_times,
        classes=np.array(b.classes),
    )
    if limit_fraction is None:
        return problem
    low = np.zeros(num_times + 1, dtype=np.int64)
    for u in usages:
        low[u.lo] += u.size_bytes.min()
        low[u.hi] -= u.size_bytes.min()
    limit = int(np.cumsum(low).max() / limit_fraction)
    return IntraOpProblem(
        node_costs=problem.node_costs,
        edges=problem.edges,
        usages=problem.usages,
        num_times=num_times,
        classes=problem.classes,
        usage_limit=limit,
    )
