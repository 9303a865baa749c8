"""Search: the plan of least predicted time under a memory budget.

In: a Program, a Mesh with links, Hardware, hints. Out: a strategy per op and a spec per
value (``found``), with a proved bound. ``space`` lists strategies, ``work`` prices what
an op computes, ``transitions`` what a reshard costs, ``memory`` what lives when,
``layers`` ties what repeats, ``formulate`` makes the pairwise problem that ``solver``
solves. ``polish`` compares plans in a simulator of steps that overlap (``simulate_choice``,
``tasks``, ``moves``). Nothing here changes a graph or needs a process group.

Sources: Alpa (OSDI 2022, section 4), FlexFlow (SysML 2019); TRW-S and HiGHS to solve.
"""
