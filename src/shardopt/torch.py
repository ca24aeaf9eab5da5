"""The torch front: ``ZeroRedundancyOptimizer`` as a ``torch.optim.Optimizer`` and a ``Joinable``."""

from __future__ import annotations

from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from shardopt.frameworks.torch import TORCH
from shardopt.optimizer import ShardedOptimizer


class ZeroRedundancyOptimizer(ShardedOptimizer, Optimizer, Joinable):
    """Wrap any optimizer class and keep about 1/N of its state on each of N ranks.

    Each parameter belongs to one rank, packed largest first onto the rank that carries least. That rank keeps its
    optimizer state and updates it; then the ranks exchange the updated parameters, so that the replicas stay equal. The
    parameters after a step are bitwise those of the unsharded optimizer, given equal gradients on all ranks, as
    ``DistributedDataParallel`` leaves them.

    Constructor, ``step()``, ``add_param_group()``, ``consolidate_state_dict()`` and ``load_state_dict()`` are
    collective: every rank of the group calls them, in the same order. If they fail on one rank, every rank raises.

    Options are read from ``param_groups`` at every step, so schedulers work. ``state[p]`` is the live state of the
    parameters this rank owns. ``optim`` is the wrapped optimizer on this rank; what else it offers, such as the
    ``train()`` and ``eval()`` of schedule-free optimizers, can be called on this object, on all ranks.

    Args:
        params: Iterable of tensors, of (name, tensor) pairs, or of dicts with such an iterable under ``"params"``. Equal
            on all ranks in number, order, shapes, dtypes and ``requires_grad``. Dtypes and devices may be mixed.
        optimizer_class: Class of the wrapped optimizer, or a callable that makes one from (param_groups, **defaults).
        process_group: The ranks that share the work: a process group or a 1-D ``DeviceMesh``; or a grid that shards along
            rows and replicates along columns: a 2-D ``DeviceMesh`` (replicate, shard), or the pair (sharding group, replica
            group). By default WORLD; this process alone where ``torch.distributed`` is not initialized and no launcher set ``WORLD_SIZE`` above 1.
        parameters_as_bucket_view: Make parameters views of flat buckets, which arrive where they are needed, and over the
            network leave from there, too. Otherwise parameters keep their own memory, and small ones are copied through
            staging buffers, see ``Sharding.bucket_mb``.
        overlap_with_ddp: Step inside DDP's backward, bucket by bucket, by a hook from ``shardopt.ddp_zero_hook``.
            ``step()`` may still be called after backward: it fires no hooks and checks that the update was made.
        sharding: Every option beyond the documented interface.
        **defaults: Options of the wrapped optimizer.

    Raises:
        RankMismatchError: Ranks were given different things; names the first difference. A ``ValueError``.
        RemoteRankError: Construction failed on another rank, and why. A ``RuntimeError``.
        ValueError: No parameters; one given twice, sparse, a DTensor, or sharing memory with another; this process is no
            member of ``process_group``; or ``optimizer_class`` cannot be sharded (LBFGS).
        TypeError: ``params`` holds something else than the above.

    Source: ZeRO stage 1 (P_os), arXiv:1910.02054; interface of ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    Example::

        ddp = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-4)
        ddp(inputs).sum().backward()
        optimizer.step()
    """

    framework = TORCH
    _hooked_step = Optimizer.profile_hook_step(ShardedOptimizer._step_after_backward)


__all__ = ["ZeroRedundancyOptimizer"]
