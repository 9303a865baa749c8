"""Holds all that uses private torch names. Torch 2.11 to 2.15 serve.

In: torch's objects and settings. Out: functions that the other packages call. Never: an
import of torch's internals before their first use, since importing fxpar must stay
light.
"""

from fxpar._torch import aot as aot
from fxpar._torch import checkpoints as checkpoints
from fxpar._torch import distributed as distributed
from fxpar._torch import dtensor as dtensor
from fxpar._torch import dynamo as dynamo
from fxpar._torch import fake as fake
from fxpar._torch import flat_regions as flat_regions
from fxpar._torch import inductor as inductor
from fxpar._torch import inductor_lowerings as inductor_lowerings
from fxpar._torch import layer_regions as layer_regions
from fxpar._torch import loops as loops
from fxpar._torch import node_texts as node_texts
from fxpar._torch import objects as objects
from fxpar._torch import symbols as symbols
from fxpar._torch import traced_once as traced_once
from fxpar._torch import traced_values as traced_values
from fxpar._torch import version as version
