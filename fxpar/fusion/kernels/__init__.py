"""Makes one op with generated kernels of a collective and the compute around it: a
region.

In: the graph of a forward or a backward. Out: the graph with its regions as ops, which
run as kernels. ``fuse_regions`` makes regions of a graph where that pays:
``select_region`` says which nodes belong together, ``region_program`` makes a program
of them, ``region_op`` is the op that runs one. A program is run op by op or by kernels
(``run_kernels``): it is split at collectives, and ``emit`` makes the text of each part,
by ``placement`` (where a value is needed, views, and the space that a kernel runs
over), ``expressions`` (ops), ``device_functions``.

A template that does a collective inside a kernel (``templates``; ``implementations``
says when, ``symmetric_memory`` is where ranks meet) takes the parts and their bodies
from these, with a ``Source`` that reads other ranks' memory or a ``Sink`` that writes
there, and puts them into one function, with its barriers between. Never imported by
``import fxpar``; Triton is imported only when a kernel runs.
"""
