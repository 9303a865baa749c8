"""Search finds the plan of least predicted time under a memory budget.

In: a Program, a Mesh with links, Hardware, hints. Out: a strategy per op and a spec per
value, with a proved bound. ``search_space`` lists strategies and specs, ``formulate``
makes the pairwise problem that ``solver`` solves, at the prices of ``sharding.cost``
and ``sharding.reshard``; ``run_search`` ties layers that repeat, solves it, and gives
further plans that may be faster once communication overlaps. Never: changes a graph or
needs a process group.

Sources: Alpa (OSDI 2022, section 4), FlexFlow (SysML 2019); TRW-S and HiGHS to solve.
"""
