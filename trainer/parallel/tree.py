"""Add values along a fixed tree over the shards of a batch.

The tree depends only on the number of shards. A sum along the tree thus has the same bits on any
number of ranks. The method is from EasyScale (Li et al., SC'23), with a tree instead of a fixed
assignment; see docs/decisions/0006-one-tree-of-shards.md.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
# (level, number): the shards from number * 2**level to (number + 1) * 2**level - 1, or to the last.
Node = tuple[int, int]


class TreeSum(Generic[T]):
    """The sum of values that are pushed in the order of their nodes.

    `waiting` has the values whose neighbour in the tree is still missing, with their nodes.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        self._shards, self._add = shards, add
        self.waiting: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Add `value` to its left neighbour if this has been pushed, and repeat with the sum.

        A node without a right neighbour, because the shards end, moves up unchanged.
        """
        level, number = node
        while number > 0 or 1 << level < self._shards:
            if number % 2:
                if not self.waiting or self.waiting[-1][0] != (level, number - 1):
                    break  # another rank has the left neighbour
                value = self._add(self.waiting.pop()[1], value)
            elif (number + 1) << level < self._shards:
                break  # the right neighbour is still to come
            level, number = level + 1, number // 2
        self.waiting.append(((level, number), value))


def subtrees(owned: range, shards: int) -> list[Node]:
    """Return the largest subtrees of the tree over `shards` that are within `owned`, in order."""
    tree: TreeSum[None] = TreeSum(shards, lambda _left, _right: None)
    for shard in owned:
        tree.push((0, shard), None)
    return [node for node, _ in tree.waiting]
