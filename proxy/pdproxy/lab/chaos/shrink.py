"""The shortest schedule that still fails: delta debugging (Zeller's ddmin) over the numbers of items. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shrink(
    items: Sequence[int], fails: Callable[[frozenset[int]], bool], budget: int
) -> tuple[list[int], int]:
    """Return items without which nothing fails, and how many runs that took. `budget`: runs at most; all items are known to fail.

    Each of the items that are left is needed, unless the budget was used up.
    """
    runs = 0
    parts = 2
    left = list(items)

    def tried(some: Sequence[int]) -> bool:
        nonlocal runs
        runs += 1
        return fails(frozenset(some))

    if runs < budget and tried(()):
        return [], runs
    while len(left) > 1 and runs < budget:
        chunks = _chunks(left, parts)
        for place, chunk in enumerate(chunks):
            if runs >= budget:
                return left, runs
            if parts == 2 or len(chunk) == 1:  # a part alone is seldom enough once there are many parts
                if tried(chunk) if parts == 2 else False:
                    left, parts = chunk, 2
                    break
            if parts > 2:
                rest = [item for other, part in enumerate(chunks) if other != place for item in part]
                if tried(rest):
                    left, parts = rest, max(parts - 1, 2)
                    break
        else:
            if parts >= len(left):
                break
            parts = min(2 * parts, len(left))
    return left, runs


def _chunks(items: Sequence[int], count: int) -> list[list[int]]:
    size, more = divmod(len(items), count)
    found, at = [], 0
    for place in range(count):
        end = at + size + (place < more)
        found.append(list(items[at:end]))
        at = end
    return found
