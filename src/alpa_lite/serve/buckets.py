"""Buckets for the lengths of requests: sizes to which prompts are padded, each with a program of its own.

In: lengths of requests, as seen. Out: at most k sizes that cost least. The cost, in tokens, is

    sum over requests (size of its bucket - length)                          padding waste
    + sum over buckets (program_tokens + program_tokens_per_token * size)    memory of compiled programs

where a request goes into the smallest bucket that holds it. Bytes become tokens as shares: a program that keeps one percent of
the memory counts as much as one percent more work,

    program_tokens += tokens of all requests * program_bytes / memory_bytes

so that the advice is the same for a day's requests and for an hour's.

Some optimal size is always a length that occurs (rounded up to ``multiple``): a bucket may shrink to its longest request. So the
problem is to cut the sorted sizes into at most k runs, and a dynamic program over (buckets used, last size covered) is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_lite.errors import AlpaLiteError, user_line
from alpa_lite.numeric import positive, real, several

LARGEST = 2**40  # of a length: sums over millions of requests are exact in 64 bits
WHOLE = "a whole number from 1 to 2**40"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAdvice:
    """Buckets and what they would have cost; ``print`` it.

    Attributes:
        buckets: sizes in tokens, rising.
        requests: per bucket, how many of the requests go there.
        padded_tokens: per bucket, what they are padded by.
        num_tokens: of all requests.
        cost: the objective, in tokens.
    """

    buckets: tuple[int, ...]
    requests: tuple[int, ...]
    padded_tokens: tuple[int, ...]
    num_tokens: int
    cost: float

    @property
    def waste(self) -> float:
        """The share of padding among all tokens that would be computed."""
        padded = sum(self.padded_tokens)
        return padded / (padded + self.num_tokens)

    def __str__(self) -> str:
        lines = [f"{'bucket':>8} {'requests':>9} {'padded tokens':>14} {'waste':>7}"]
        for size, held, padded in zip(self.buckets, self.requests, self.padded_tokens, strict=True):
            lines.append(f"{size:8d} {held:9d} {padded:14d} {_percent(padded, size * held):>7}")
        padded, total = sum(self.padded_tokens), sum(self.padded_tokens) + self.num_tokens
        lines.append(f"{'all':>8} {sum(self.requests):9d} {padded:14d} {_percent(padded, total):>7}")
        longest = self.buckets[-1] * sum(self.requests)
        lines.append(f"one bucket of {self.buckets[-1]} would waste {_percent(longest - self.num_tokens, longest)}")
        return "\n".join(lines) + "\n"


def smallest_bucket(buckets: Sequence[int], length: int) -> int | None:
    """The first of rising sizes that holds a prompt; None if it is longer than all."""
    index = bisect_left(buckets, length)
    return buckets[index] if index < len(buckets) else None


def propose_buckets(
    lengths: Iterable[int],
    k: int,
    *,
    multiple: int = 1,
    program_tokens: float = 0.0,
    program_tokens_per_token: float = 0.0,
    program_bytes: float | None = None,
    memory_bytes: float | None = None,
) -> BucketAdvice:
    """At most ``k`` buckets that cost least for requests of these lengths. Exact.

    Args:
        lengths: of requests, in tokens, as they came.
        k: how many programs there may be.
        multiple: sizes are multiples of this, e.g. 128 for matmul units.
        program_tokens: what a compiled program costs, whatever its size, in padded tokens: it must save more than that.
        program_tokens_per_token: what it costs beside that per token of its size, where programs keep buffers of their own.
        program_bytes: of memory that a compiled program keeps, whatever its size. Temporaries are not kept: there must be
            room for those of the largest bucket, which is the same in any case. Given with ``memory_bytes``, or not at all.
        memory_bytes: of the memory of which that is a share, e.g. of a device. A share of it costs as much as the same share
            of the requests' tokens, beside ``program_tokens``.

    Raises:
        AlpaLiteError: a value is not allowed.

    Example:
        >>> al.serve.propose_buckets([12, 15, 100, 900, 1000], k=3).buckets
        (15, 100, 1000)
    """
    given, k, multiple = _checked(lengths, k, multiple)
    _check_costs(program_tokens, program_tokens_per_token)
    share = _checked_share(program_bytes, memory_bytes)
    rounded = -(-given // multiple) * multiple
    sizes, counts = np.unique(rounded, return_counts=True)
    fixed = real(program_tokens) + share * given.sum() + real(program_tokens_per_token) * sizes
    cuts = _cheapest_cuts(sizes, counts, fixed, min(k, sizes.size))
    buckets = tuple(int(sizes[i]) for i in cuts)
    index = np.searchsorted(np.asarray(buckets), given)
    padded = np.zeros(len(buckets), np.int64)
    np.add.at(padded, index, np.asarray(buckets)[index] - given)
    return BucketAdvice(
        buckets=buckets,
        requests=tuple(np.bincount(index, minlength=len(buckets)).tolist()),
        padded_tokens=tuple(padded.tolist()),
        num_tokens=int(given.sum()),
        cost=float(padded.sum() + fixed[list(cuts)].sum()),
    )


def _cheapest_cuts(sizes: np.ndarray, counts: np.ndarray, fixed: np.ndarray, k: int) -> tuple[int, ...]:
    """Positions of the sizes that become buckets, rising; the last one always does. Of equally cheap ones the fewest.

    ``best[j]``: cheapest cost of covering sizes 0..j with the buckets used so far, the last of them being size j. With one more,

        best'[j] = min over i < j of best[i] + waste(i + 1..j) + fixed[j]

    Waste satisfies the quadrangle inequality, so that the best i does not fall as j rises (Yao 1980): with that of the middle
    one known, both halves have less to look at.
    """
    requests, tokens = np.concatenate([[0], np.cumsum(counts)]), np.concatenate([[0], np.cumsum(counts * sizes)])
    best = sizes * requests[1:] - tokens[1:] + fixed
    # The waste of sizes i+1..j in bucket j is sizes[j] * (requests up to j - up to i) - (tokens up to j - up to i).
    found, choices, cheapest = [best[-1]], [], 0
    for used in range(1, k):
        following = np.full(sizes.size, math.inf)
        came_from = np.zeros(sizes.size, np.int64)
        parts = [(used, sizes.size, used - 1, sizes.size - 1)]  # j from where to where, and among which i
        while parts:
            begin, end, low, high = parts.pop()
            j = (begin + end) // 2
            before = slice(low + 1, min(high, j) + 1)
            waste = sizes[j] * (requests[j + 1] - requests[before]) - (tokens[j + 1] - tokens[before])
            costs = best[low : before.stop - 1] + waste
            came_from[j] = i = low + int(np.argmin(costs))
            following[j] = costs[i - low] + fixed[j]
            parts += [part for part in ((begin, j, low, i + 1), (j + 1, end, i, high)) if part[0] < part[1]]
        best = following
        choices.append(came_from)
        found.append(best[-1])
        if found[-1] < found[cheapest]:
            cheapest = used
    cuts = [sizes.size - 1]
    for came_from in reversed(choices[:cheapest]):
        cuts.append(int(came_from[cuts[-1]]))
    return tuple(reversed(cuts))


def _checked(lengths: Any, k: Any, multiple: Any) -> tuple[np.ndarray, int, int]:
    """As numbers of this size, of which none overflows."""
    listed = several(lengths)
    given = [positive(x) for x in listed or ()]
    wrong = next((x for x, found in zip(listed or (), given, strict=True) if found is None or found > LARGEST), None)
    parts, step = positive(k), positive(multiple)
    for bad, fault in (
        (listed is None, f"lengths={lengths!r:.60} was given; it must be a list of whole numbers from 1"),
        (not given, "no lengths were given; at least one is needed"),
        (wrong is not None, f"the length {wrong!r:.60} was given; a length is {WHOLE}"),
        (parts is None, f"k={k!r:.60} was given; it must be a whole number from 1"),
        (step is None or step > LARGEST, f"multiple={multiple!r:.60} was given; it must be {WHOLE}"),
    ):
        if bad:
            raise _refusal(fault, "propose_buckets([12, 80, 1000], k=2)")
    assert parts is not None and step is not None
    return np.asarray(given, np.int64), parts, step


def _check_costs(program_tokens: Any, program_tokens_per_token: Any) -> None:
    if not all(0 <= real(cost) < math.inf for cost in (program_tokens, program_tokens_per_token)):
        raise _refusal(
            f"program_tokens={program_tokens!r:.60} and program_tokens_per_token={program_tokens_per_token!r:.60} were given; "
            "they must be numbers from 0",
            "program_tokens=1000",
        )


def _checked_share(program_bytes: Any, memory_bytes: Any) -> float:
    """Of the memory, that a program keeps."""
    if program_bytes is None and memory_bytes is None:
        return 0.0
    size, whole = (1.0 if given is None else real(given) for given in (program_bytes, memory_bytes))
    if not 0 <= size < math.inf or not 0 < whole < math.inf:
        fault = "the first must be a number from 0, the second one above 0"
    elif program_bytes is None or memory_bytes is None:
        fault = "bytes of a program count as a share of the memory, so both must be given"
    else:
        return size / whole
    raise _refusal(
        f"program_bytes={program_bytes!r:.60} and memory_bytes={memory_bytes!r:.60} were given; {fault}",
        "program_bytes=50e6, memory_bytes=80e9 for a device of 80 GB",
    )


def _refusal(fault: str, example: str) -> AlpaLiteError:
    return AlpaLiteError(f"propose_buckets: {fault}. At {user_line()}. Correct it, e.g. {example}.")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
