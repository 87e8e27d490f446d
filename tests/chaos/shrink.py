"""The shortest schedule that still fails: delta debugging over the numbers of items. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shrink(
    items: Sequence[int], fails: Callable[[frozenset[int]], bool], budget: int
) -> tuple[list[int], int]:
    """Return items without which nothing fails, and how many runs that took. `budget`: runs at
    most; all items are known to fail.

    Parts are left out one after the other, half of the items at first, single ones at last. Each of
    the items that are returned is needed, unless the budget was used up.
    """
    left, runs = list(items), 0

    def fail(some: Sequence[int]) -> bool:
        nonlocal runs
        runs += 1
        return fails(frozenset(some))

    if runs < budget and fail(()):
        return [], runs
    size = max(1, len(left) // 2)
    while runs < budget:
        before, at = len(left), 0
        while at < len(left) and runs < budget:
            rest = left[:at] + left[at + size :]
            if rest and fail(rest):
                left = rest
            else:
                at += size
        if size == 1 and len(left) == before:
            break
        size = max(1, size // 2)
    return left, runs
