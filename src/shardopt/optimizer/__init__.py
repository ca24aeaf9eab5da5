"""The optimizer as its users call it: documented methods, each of which sequences the other rooms.

``facade`` constructs it out of the pieces that ``assembly`` puts together, and adds param groups. Its methods stand in
groups: ``stepping``, ``gradients``, ``modules``, ``state_dicts`` and ``uneven_inputs``, over the attributes in ``base``.
No arithmetic, no framework.
"""

from shardopt.optimizer.assembly import Pieces, assemble
from shardopt.optimizer.facade import ShardedOptimizer

__all__ = ["Pieces", "ShardedOptimizer", "assemble"]
