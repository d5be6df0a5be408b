"""Lower bounds by message passing: sequential reweighted sweeps over the nodes (Kolmogorov's SRMP, which is TRW-S on pairs).

A message m[e, i] moves cost from edge e to its end point i. For any messages

    bound = constant + sum_i min_x (c_i + sum_e m[e, i])(x) + sum_(i,j) min_xy (C - m[e, i] - m[e, j])(x, y)

is a lower bound (``exact_bound``); the sweeps only look for good messages. The gap between a known answer and the bound
then excludes states and pairs (``excluded``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa_lite.intraop.problem import Array


@dataclass(slots=True)
class Messages:
    """Messages of one core, changed in place by the sweeps.

    Attributes:
        unary: cost vectors without messages (with memory prices, if any).
        left, right: end points of the edges, left < right.
        costs: their matrices.
        to_left, to_right: messages, each list one vector per edge.
    """

    unary: list[Array]
    left: tuple[int, ...]
    right: tuple[int, ...]
    costs: tuple[Array, ...]
    to_left: list[Array]
    to_right: list[Array]
    _earlier: list[list[int]]
    _later: list[list[int]]
    _transposed: list[Array]

    @classmethod
    def zero(
        cls, unary: list[Array], left: tuple[int, ...], right: tuple[int, ...], costs: tuple[Array, ...]
    ) -> Messages:
        """Messages that move nothing."""
        earlier: list[list[int]] = [[] for _ in unary]
        later: list[list[int]] = [[] for _ in unary]
        for e, (a, b) in enumerate(zip(left, right, strict=True)):
            later[a].append(e)
            earlier[b].append(e)
        flipped = {id(m): np.ascontiguousarray(m.T) for m in costs}
        return cls(
            unary, left, right, costs, [np.zeros(m.shape[0]) for m in costs], [np.zeros(m.shape[1]) for m in costs],
            earlier, later, [flipped[id(m)] for m in costs],
        )

    def forward(self) -> float:
        """Sweeps from first to last node; returns the bound (without constant)."""
        total = 0.0
        to_left, to_right, flipped = self.to_left, self.to_right, self._transposed
        for i, theta in enumerate(self.unary):
            theta = theta.copy()
            for e in self._earlier[i]:
                to_right[e] = message = (flipped[e] - to_left[e]).min(1)
                theta += message
            for e in self._later[i]:
                theta += to_left[e]
            total += self._send(theta, self._later[i], to_left, len(self._earlier[i]))
        return total

    def backward(self) -> float:
        """As ``forward``, from last to first node."""
        total = 0.0
        to_left, to_right, costs = self.to_left, self.to_right, self.costs
        for i in range(len(self.unary) - 1, -1, -1):
            theta = self.unary[i].copy()
            for e in self._later[i]:
                to_left[e] = message = (costs[e] - to_right[e]).min(1)
                theta += message
            for e in self._earlier[i]:
                theta += to_right[e]
            total += self._send(theta, self._earlier[i], to_right, len(self._later[i]))
        return total

    def pick(self) -> list[int]:
        """A choice, node by node in order: what the chosen earlier nodes cost, and what the messages say of later ones."""
        picks = [0] * len(self.unary)
        for i, costs in enumerate(self.unary):
            seen = costs.copy()
            for e in self._earlier[i]:
                seen += self.costs[e][picks[self.left[e]]]
            for e in self._later[i]:
                seen += self.to_left[e]
            picks[i] = int(seen.argmin())
        return picks

    @staticmethod
    def _send(theta: Array, edges: list[int], messages: list[Array], received: int) -> float:
        """Spreads a node's cost over the edges ahead; returns the smallest cost that stays."""
        most = max(len(edges), received, 1)
        if edges:
            part = theta / most
            for e in edges:
                messages[e] = messages[e] - part
        return float(theta.min()) * (1 - len(edges) / most)

    def node_rests(self) -> list[Array]:
        """Node costs with all messages in."""
        rests = [c.copy() for c in self.unary]
        for e, (a, b) in enumerate(zip(self.left, self.right, strict=True)):
            rests[a] += self.to_left[e]
            rests[b] += self.to_right[e]
        return rests

    def edge_rest(self, e: int) -> Array:
        """An edge's matrix with its messages out."""
        return self.costs[e] - self.to_left[e][:, None] - self.to_right[e]

    def exact_bound(self) -> float:
        """The bound as the module docstring states it, without constant."""
        nodes = sum(float(r.min()) for r in self.node_rests())
        return nodes + sum(float(self.edge_rest(e).min()) for e in range(len(self.costs)))

    def excluded(self, slack: float) -> tuple[list[Array], dict[int, Array]]:
        """What no choice within ``slack`` of the bound contains: per node a mask of states, per edge a mask of pairs.

        A state costs at least its rest over the smallest rest of its node, plus on every edge the smallest rest in its
        row over the smallest of the edge. Edges without such pairs are left out of the dictionary.
        """
        rests = self.node_rests()
        extra = [r - r.min() for r in rests]
        over: list[Array] = [x.copy() for x in extra]
        edges = []
        for e, (a, b) in enumerate(zip(self.left, self.right, strict=True)):
            rest = self.edge_rest(e)
            rest -= rest.min()
            over[a] += rest.min(1)
            over[b] += rest.min(0)
            edges.append(rest)
        pairs = {}
        for e, (a, b) in enumerate(zip(self.left, self.right, strict=True)):
            mask = (edges[e] + extra[a][:, None] + extra[b] > slack) & np.isfinite(self.costs[e])
            if mask.any():
                pairs[e] = mask
        return [x > slack for x in over], pairs
