"""Hardware table and host layout -> Cluster, the mesh shapes that fit it, calibration records. Knows no JAX."""

from alpa_lite.cluster.calibration import Calibration as Calibration
from alpa_lite.cluster.calibration import MeasuredCollective as MeasuredCollective
from alpa_lite.cluster.cluster import Cluster as Cluster
from alpa_lite.cluster.hardware import Device as Device
from alpa_lite.cluster.hardware import Link as Link
