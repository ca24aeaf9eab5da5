"""What one optimizer shards: its parameters, planned, laid into memory and brought from their owners.

``plan`` compares what the ranks were given and decides, as frozen data, who owns what and where it lies; ``shards``
holds the parameters and buckets that came of it; ``exchange`` brings updated parameters from their owners to everyone.
"""

from shardopt.shards.exchange import Exchange, equalize, launch_exchange
from shardopt.shards.plan import VIEW_ALIGNMENT_NBYTES, ShardPlan
from shardopt.shards.shards import Shards

__all__ = [
    "VIEW_ALIGNMENT_NBYTES",
    "Exchange",
    "ShardPlan",
    "Shards",
    "equalize",
    "launch_exchange",
]
