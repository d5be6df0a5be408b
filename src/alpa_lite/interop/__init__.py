"""From a table of stage costs to stages on submeshes, and from ops to layers: exact dynamic programs on plain arrays.

In come NumPy arrays, out come records; nothing here knows models, JAX or device types.
"""

from alpa_lite.interop.clustering import LayerClusters, cluster_layers
from alpa_lite.interop.slicing import StageCountTable, StageSlicing, compare_stage_counts, slice_stages
from alpa_lite.interop.submeshes import PlacedSubmesh, admissible_submeshes, place_submeshes

__all__ = [
    "LayerClusters",
    "PlacedSubmesh",
    "StageCountTable",
    "StageSlicing",
    "admissible_submeshes",
    "cluster_layers",
    "compare_stage_counts",
    "place_submeshes",
    "slice_stages",
]
