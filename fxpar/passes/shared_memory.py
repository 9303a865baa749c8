"""Finds which values of a traced graph are unchanged until they are last read.

In: an ATen graph that writes in place, from ``_torch.aot.trace_flat``, whose values
share memory where tensors did. Out: whether a value could be a tensor of its own.
Never changes a graph.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from fxpar._torch.objects import memory_of, tensors_of, written_by


class SharedMemory:
    """Is an index of the writes to each memory in a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.output = graph.output_node()
        self.writers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            for target in written_by(node):
                for memory in self._memories(target):
                    self.writers[memory].append(node)

    def lasts(self, node: fx.Node) -> bool:
        """Return whether nothing writes to the memory of a value before it and its
        views are last read, nothing writes through them at all, and none of them is a
        result of the graph. False where its memory is unknown."""
        memories = self._memories(node)
        if not memories:
            return False
        names, reads = self._names(node, memories), list[fx.Node]()
        for name in names:
            reads += name.users
        if self.output in reads:
            return False
        if any(names.intersection(written_by(read)) for read in reads):
            return False
        last = max((self.position[read] for read in reads), default=0)
        begin = self.position[node]
        writers = (w for memory in memories for w in self.writers[memory])
        return not any(begin < self.position[w] < last for w in writers)

    def _names(self, node: fx.Node, memories: set[int]) -> set[fx.Node]:
        """Return a value and the values computed from it that share its memory."""
        names, pending = {node}, [node]
        while pending:
            for user in pending.pop().users:
                if user not in names and memories & self._memories(user):
                    names.add(user)
                    pending.append(user)
        return names

    def _memories(self, node: fx.Node) -> set[int]:
        return set(map(memory_of, tensors_of(node)))
