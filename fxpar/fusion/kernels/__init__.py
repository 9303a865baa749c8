"""Regions: a collective and the compute around it as one op with generated kernels.

``fuse`` makes regions of a graph: ``grow`` says what belongs together, ``bytes``
whether it pays, ``outline`` makes a ``program`` of it, ``op`` is the op that runs one.
A program is run op by op (``interpret``) or by kernels (``launch``): ``stages`` cuts it
at its collectives, and of each part ``kernel`` makes the text, by ``emit`` (what a line
is in a kernel), ``needs`` (where a value is needed), ``reductions`` (what a kernel runs
over), ``index`` and ``choices`` (views), ``expressions`` (ops), ``library``
(functions).

A template that does a collective inside a kernel (``templates``; ``ladder`` says when,
``providers`` have the memory, ``run_fused`` runs it) takes the parts from ``stages_of``
and their bodies from ``emit_body``, with a ``Source`` that reads other ranks' memory or
a ``Sink`` that writes there, and puts them into one function by ``kernel.phase`` and
``kernel.function``, with its barriers between. Nothing here is imported by ``import
fxpar``; Triton only when a kernel runs.
"""
