"""Slicings near another one: what the formula of ``al.interop.slice_stages`` counts as equal, a schedule may not.

The formula adds the largest once-per-step cost to every pipeline; a schedule hides part of it in stages that end early, which
are the later ones (``stage_estimate``). So where stages differ, their order matters, and the best by the formula is a start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Place = tuple[int, int, int]  # first layer, last layer, submesh


def moves(stages: Sequence[Place]) -> Iterator[tuple[Place, ...]]:
    """Slicings that differ from one by the order of all or of two neighbouring stages, or by a layer of two neighbours.

    Yields:
        As many stages, on as many of each submesh, of as many layers together; each once, never the one given.
    """
    sizes = [last - first + 1 for first, last, _ in stages]
    submeshes = [submesh for _, _, submesh in stages]
    seen = {tuple(stages)}
    for counts, places in _orders(sizes, submeshes):
        first, found = 0, []
        for count, submesh in zip(counts, places, strict=True):
            found.append((first, first + count - 1, submesh))
            first += count
        if min(counts) > 0 and tuple(found) not in seen:
            seen.add(tuple(found))
            yield tuple(found)


def _orders(sizes: list[int], submeshes: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Layers and submesh of each stage."""
    yield sizes[::-1], submeshes[::-1]
    for k in range(len(sizes) - 1):
        swapped_sizes, swapped = _swapped(sizes, k), _swapped(submeshes, k)
        yield swapped_sizes, swapped
        yield sizes, swapped
        yield swapped_sizes, submeshes
        for more, less in ((k, k + 1), (k + 1, k)):
            shifted = list(sizes)
            shifted[more] += 1
            shifted[less] -= 1
            yield shifted, submeshes


def _swapped(values: list[int], k: int) -> list[int]:
    return [*values[:k], values[k + 1], values[k], *values[k + 2 :]]
