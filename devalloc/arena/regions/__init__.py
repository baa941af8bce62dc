"""Memory of an arena that is given back to the device while its addresses stay.

docs/design/host.md has the rules. From the bottom up: `copies` and `layout` (what is copied where),
`host_memory` and `disk` (where it is kept), `backups` (both, for one region), `outside` (PyTorch's
segments), `regions` (the state machine), `methods` (what users of an arena call).
"""

from devalloc.arena.regions.methods import RegionMethods
from devalloc.arena.regions.outside import Outside
from devalloc.arena.regions.regions import RegionInfo, Regions

__all__ = ["Outside", "RegionInfo", "RegionMethods", "Regions"]
