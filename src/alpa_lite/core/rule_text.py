"""Sharding rules as users write them: ``"... i k, k j -> ... i j"`` -> ``OpShardingRule``.

The notation is that of JAX's ``SdyShardingRule`` (``jax.experimental.custom_partitioning``): one term per operand and result,
factors separated by spaces, ``(a b)`` for a dim made of two factors (major first), ``...`` (or ``...1``, ``...2`` for several
groups) in front for leading dims that pass through. A term without factors is a scalar. Errors point at the character.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.core.rule import Factor, FactorKind, OpShardingRule
from alpa_lite.errors import RuleError

REDUCE_OPS = ("add", "max", "min")
_TOKEN = re.compile(r"\s*(->|\.\.\.\d*|[^\W\d_]\w*|[(),])")
_GRAMMAR = (
    "factor names (a letter, then letters, digits or _), spaces, commas between tensors, (a b) for a dim of "
    "several factors, ... in front for leading dims, and one ->"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One tensor of a rule: its dims as factor names, with the place of each in the text.

    Attributes:
        batch: group of the leading ellipsis ("0" for a plain one); "" without an ellipsis.
        dims: per dim after the ellipsis, its factors, major first.
        position, positions: where the term, and each of its dims, starts in the text.
        lead: factors in front of the ellipsis; only ``batched`` makes them.
    """

    batch: str
    dims: tuple[tuple[str, ...], ...]
    position: int = 0
    positions: tuple[int, ...] = ()
    lead: tuple[str, ...] = ()

    @property
    def min_rank(self) -> int:
        return len(self.lead) + len(self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleText:
    """A rule for any shapes; ``resolve`` makes it one for certain shapes.

    Attributes:
        text: as the user wrote it.
        operands, results: one term per tensor.
        reduction: factors whose split leaves partial results.
        whole: factors that may not be split.
        reduce_op: joins partial results.
        sizes: of factors that no dim has for itself.
    """

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    reduction: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    reduce_op: str = "add"
    sizes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        _check_kinds(self)

    def resolve(
        self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]], where: str = ""
    ) -> OpShardingRule:
        """The rule for tensors of these shapes. A dim of size 1 has no factor.

        Raises:
            RuleError: number of tensors, ranks or sizes do not fit the text.
        """
        return _Resolver(self, where).run(tuple(map(tuple, operands)), tuple(map(tuple, results)))

    def batched(self, mapped: Sequence[bool]) -> RuleText:
        """The rule under ``jax.vmap`` with the new dim in front of the mapped operands and of all results."""
        known = {name for term in (*self.operands, *self.results) for name in term.lead}
        name = f"batch{len(known)}"
        assert name not in self.names, f"{name} is a factor of {self.text!r}"
        return replace(
            self,
            operands=tuple(
                replace(t, lead=(name, *t.lead)) if m else t for t, m in zip(self.operands, mapped, strict=True)
            ),
            results=tuple(replace(t, lead=(name, *t.lead)) for t in self.results),
        )

    @property
    def names(self) -> dict[str, int]:
        """Every factor that is written out, with its first place in the text."""
        found: dict[str, int] = {}
        for term in (*self.operands, *self.results):
            for dim, position in zip(term.dims, term.positions, strict=True):
                for name in dim:
                    found.setdefault(name, position)
        return found

    def to_text(self) -> str:
        """Everything in one line; ``RuleText.read`` is the inverse."""
        kinds = [f"reduction={','.join(self.reduction)}"] if self.reduction else []
        kinds += [f"need_replication={','.join(self.whole)}"] if self.whole else []
        kinds += [f"reduce_op={self.reduce_op}"] if self.reduce_op != "add" else []
        kinds += [f"{name}={size}" for name, size in self.sizes]
        return " | ".join([self.text, *([" ".join(kinds)] if kinds else [])])

    @classmethod
    def read(cls, line: str) -> RuleText:
        """Inverse of ``to_text``."""
        text, _, rest = line.partition(" | ")
        given = dict(item.split("=") for item in rest.split())
        kinds = [
            given.pop(key, default)
            for key, default in (("reduction", ""), ("need_replication", ""), ("reduce_op", "add"))
        ]
        sizes = {name: int(size) for name, size in given.items()}
        return parse_rule(text, reduction=kinds[0], need_replication=kinds[1], reduce_op=kinds[2], **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRule:
    """A rule for every op of one primitive; goes into ``PlanOptions(rules=...)``."""

    primitive: str
    rule: RuleText

    def to_text(self) -> str:
        return f"{self.primitive}: {self.rule.to_text()}"

    @classmethod
    def read(cls, line: str) -> NamedRule:
        primitive, _, rest = line.partition(": ")
        return cls(primitive=primitive, rule=RuleText.read(rest))


def parse_rule(
    text: str,
    *,
    reduction: str | Sequence[str] = (),
    need_replication: str | Sequence[str] = (),
    reduce_op: str = "add",
    **factor_sizes: int,
) -> RuleText:
    """Read a rule in JAX's notation; see the module docstring.

    Args:
        text: e.g. ``"... i k, k j -> ... i j"``.
        reduction: factors of operands whose split leaves partial results, joined by ``reduce_op`` (JAX calls this keyword
            ``reduction_factors``). A factor that no result has and that is not named here stays whole.
        need_replication: factors that may not be split.
        reduce_op: "add", "max" or "min".
        factor_sizes: sizes of factors that stand only in ``(a b)``; the last unknown one of a dim is computed.

    Raises:
        RuleError: with a caret under the character.
    """
    if not isinstance(text, str):
        raise RuleError(f"a sharding rule was given as {text!r}; it must be a string such as 'i k, k j -> i j'.")
    operands, results = _Parser(text).run()
    return RuleText(
        text=text,
        operands=operands,
        results=results,
        reduction=_names(reduction),
        whole=_names(need_replication),
        reduce_op=reduce_op,
        sizes=tuple(factor_sizes.items()),
    )


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(given.replace(",", " ").split()) if isinstance(given, str) else tuple(given)


def rule_error(text: str, position: int, fault: str, advice: str = "", where: str = "") -> RuleError:
    """An error with a caret under ``text[position]``."""
    place = f"  where: {where}\n" if where else ""
    return RuleError(
        f"the sharding rule cannot be used: {fault}\n"
        f"  {' '.join(text.splitlines()) or ' '}\n"
        f"  {' ' * position}^\n"
        f"  allowed: {_GRAMMAR}.\n"
        f"{place}"
        f"  next: {advice or 'correct the rule at the caret'}."
    )


@dataclass(slots=True)
class _Parser:
    text: str
    tokens: list[tuple[str, int]] = field(default_factory=list)

    def run(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        self.tokens = list(self._scan())
        arrows = [i for i, (token, _) in enumerate(self.tokens) if token == "->"]
        if not arrows:
            raise rule_error(self.text, len(self.text), "there is no ->", "write the results after ->")
        if len(arrows) > 1:
            raise rule_error(self.text, self.tokens[arrows[1]][1], "a second ->")
        cut = arrows[0]
        end = len(self.text)
        left = self._terms(self.tokens[:cut], 0, self.tokens[cut][1])
        return left, self._terms(self.tokens[cut + 1 :], self.tokens[cut][1] + 2, end)

    def _scan(self) -> Iterator[tuple[str, int]]:
        at = 0
        while self.text[at:].strip():
            match = _TOKEN.match(self.text, at)
            if match is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                char = self.text[at]
                hints = {".": "an ellipsis has three dots", "-": "results come after ->", ">": "results come after ->"}
                hint = "factor names start with a letter" if char.isdigit() or char == "_" else hints.get(char, "")
                raise rule_error(self.text, at, f"unexpected character {char!r}{': ' + hint if hint else ''}")
            yield match.group(1), match.start(1)
            at = match.end()

    def _terms(self, tokens: list[tuple[str, int]], start: int, end: int) -> tuple[Term, ...]:
        """The terms of one side. An empty side is one scalar, as in JAX."""
        terms = []
        part: list[tuple[str, int]] = []
        for token, position in [*tokens, (",", end)]:
            if token == ",":
                terms.append(self._term(part, part[0][1] if part else start))
                part, start = [], position + 1
            else:
                part.append((token, position))
        return tuple(terms)

    def _term(self, tokens: list[tuple[str, int]], start: int) -> Term:
        batch = ""
        dims: list[tuple[str, ...]] = []
        positions: list[int] = []
        open_at, group = -1, []
        for number, (token, position) in enumerate(tokens):
            if token.startswith("..."):
                if number:
                    raise rule_error(self.text, position, "an ellipsis stands only in front of a tensor's factors")
                batch = str(int(token[3:] or "0"))
            elif token == "(":
                if open_at >= 0:
                    raise rule_error(self.text, position, "a bracket inside of a bracket")
                open_at, group = position, []
            elif token == ")":
                if open_at < 0:
                    raise rule_error(self.text, position, "this bracket was never opened")
                if len(group) < 2:
                    raise rule_error(self.text, open_at, "brackets hold at least two factors", "leave the brackets out")
                dims.append(tuple(group))
                positions.append(open_at)
                open_at = -1
            elif open_at >= 0:
                group.append(token)
            else:
                dims.append((token,))
                positions.append(position)
            self._no_repeat(dims, group if open_at >= 0 else [], token, position)
        if open_at >= 0:
            raise rule_error(self.text, open_at, "this bracket is never closed")
        return Term(batch=batch, dims=tuple(dims), position=start, positions=tuple(positions))

    def _no_repeat(self, dims: list[tuple[str, ...]], group: list[str], token: str, position: int) -> None:
        if [*(f for dim in dims for f in dim), *group].count(token) > 1:
            raise rule_error(
                self.text,
                position,
                f"factor {token!r} stands twice in one tensor",
                "give the dims different factors; a dim that must stay whole gets one named in need_replication",
            )


def _check_kinds(rule: RuleText) -> None:
    """Keywords name factors of the text, each once; a reduced factor is in no result."""
    names = rule.names
    end = len(rule.text)
    listed = [*rule.reduction, *rule.whole]
    for name in [*listed, *(n for n, _ in rule.sizes)]:
        if name not in names:
            jax_name = name in ("reduction_factors", "need_replication_factors", "permutation_factors")
            hint = f"; the keyword is {name.removesuffix('_factors')!r} here" if jax_name else ""
            known = ", ".join(map(repr, names)) or "none"
            raise rule_error(rule.text, end, f"there is no factor {name!r} in it (its factors: {known}){hint}")
    for name in listed:
        if listed.count(name) > 1:
            raise rule_error(rule.text, names[name], f"factor {name!r} has two kinds", "name it in one keyword")
    if rule.reduce_op not in REDUCE_OPS:
        raise rule_error(rule.text, 0, f"reduce_op={rule.reduce_op!r}", f"choose one of {', '.join(REDUCE_OPS)}")
    for term in rule.results:
        for dim, position in zip(term.dims, term.positions, strict=True):
            for name in dim:
                if name in rule.reduction:
                    raise rule_error(
                        rule.text,
                        position,
                        f"factor {name!r} is named in reduction but stands in a result",
                        "a factor either splits a result or is reduced; take it out of one of the two",
                    )
    for name, size in rule.sizes:
        if not isinstance(size, int) or size < 1:
            raise rule_error(rule.text, names[name], f"the size {name}={size!r}", "give a positive integer")


class _Resolver:
    """Fits the terms of a rule to shapes: first sizes, then factors, then the kinds."""

    def __init__(self, rule: RuleText, where: str) -> None:
        self.rule, self.where = rule, where
        self.sizes: dict[str, int] = dict(rule.sizes)
        self.groups: dict[str, tuple[int, ...]] = {}

    def run(self, operands: tuple[tuple[int, ...], ...], results: tuple[tuple[int, ...], ...]) -> OpShardingRule:
        rule = self.rule
        for word, terms, shapes in (("operand", rule.operands, operands), ("result", rule.results, results)):
            if len(terms) != len(shapes):
                at = terms[min(len(shapes), len(terms) - 1)].position
                raise self.error(at, f"it has {len(terms)} {word}s, the op has {len(shapes)}", f"write one per {word}")
        pairs = list(zip((*rule.operands, *rule.results), (*operands, *results), strict=True))
        written = [self._aligned(term, shape) for term, shape in pairs]
        for compound in (False, True):  # whole dims first: they give most of the sizes
            for dims in written:
                for names, size, position in dims:
                    if (len(names) > 1) == compound and size != 1:
                        self._fit(names, size, position)
        numbers: dict[str, int] = {}
        tensors = [
            tuple(
                tuple(numbers.setdefault(n, len(numbers)) for n in names if self.sizes[n] != 1) if size != 1 else ()
                for names, size, _ in dims
            )
            for dims in written
        ]
        ins, outs = tuple(tensors[: len(operands)]), tuple(tensors[len(operands) :])
        return self._finish(numbers, ins, outs)

    def _aligned(self, term: Term, shape: tuple[int, ...]) -> list[tuple[tuple[str, ...], int, int]]:
        """(factor names, size, place in the text) of every dim, the ellipsis written out."""
        extra = len(shape) - term.min_rank
        if extra < 0 or (extra and not term.batch):
            raise self.error(
                term.position,
                f"this tensor has {term.min_rank} dims here and {len(shape)} in the op (shape {list(shape)})",
                "write one factor per dim, or ... in front for leading dims",
            )
        first = len(term.lead)
        leading = shape[first : first + extra]
        known = self.groups.setdefault(term.batch, leading) if term.batch else leading
        if len(known) != len(leading):
            raise self.error(
                term.position,
                f"the ellipsis stands for {len(leading)} dims here and for {len(known)} before",
                "number different groups: ...1, ...2",
            )
        names = [(n,) for n in term.lead] + [(f"...{term.batch}.{i}",) for i in range(extra)] + list(term.dims)
        places = [term.position] * (first + extra) + list(term.positions)
        return list(zip(names, shape, places, strict=True))

    def _fit(self, names: tuple[str, ...], size: int, position: int) -> None:
        """Give the one unknown factor of a dim its size; all known must multiply to the dim."""
        unknown = [n for n in names if n not in self.sizes]
        product = math.prod(self.sizes[n] for n in names if n in self.sizes)
        text = " ".join(f"{n}={self.sizes.get(n, '?')}" for n in names)
        if len(unknown) > 1:
            advice = f"give sizes as keywords, e.g. {unknown[0]}=4"
            raise self.error(position, f"the sizes of {', '.join(unknown)} are unknown", advice)
        if (unknown and size % product) or (not unknown and product != size):
            raise self.error(position, f"a dim of size {size} cannot have the factors {text}", "check sizes and order")
        if unknown:
            self.sizes[unknown[0]] = size // product

    def _finish(self, numbers: dict[str, int], operands: tuple, results: tuple) -> OpShardingRule:
        rule = self.rule
        read = {f for tensor in operands for dim in tensor for f in dim}
        made = {f for tensor in results for dim in tensor for f in dim}
        factors, whole = [], []
        for name, number in numbers.items():
            kind = FactorKind.PASS_THROUGH
            if name in rule.reduction:
                kind = FactorKind.REDUCTION
            elif name in rule.whole or number not in read or number not in made:
                kind = FactorKind.REPLICATED
                whole += [name] if name not in rule.whole else []
            factors.append(Factor(size=self.sizes[name], kind=kind))
        reduced = any(f.kind is FactorKind.REDUCTION for f in factors)
        reason = f"registered: {rule.text}"
        if whole:
            reason += f"; {', '.join(whole)} stands on one side only and is not named in reduction: kept whole"
        return OpShardingRule(
            operands=operands,
            results=results,
            factors=tuple(factors),
            reduce_op=rule.reduce_op if reduced else "",
            origin="user",
            reason=reason,
        )

    def error(self, position: int, fault: str, advice: str) -> RuleError:
        return rule_error(self.rule.text, position, fault, advice, self.where)
