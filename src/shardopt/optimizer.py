"""The facade: holds the pieces of one sharded optimizer and sequences the rooms; no arithmetic, no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from shardopt.arguments import name_of, policy_facts, require_possible, take_granularities
from shardopt.assembly import assemble
from shardopt.attachment import Attachment, equalize_buffers
from shardopt.collectives import raise_together
from shardopt.errors import OverlapError
from shardopt.frameworks import Framework
from shardopt.join import stand_last
from shardopt.param_groups import read_param_group, read_param_groups
from shardopt.sharding import Sharding
from shardopt.shards import Shards
from shardopt.step import (
    MSG_GRADIENTS_CHANGED,
    BackwardStep,
    LossScale,
    copy_options,
    local_step,
)

DEFAULT_SHARDING = Sharding()


class ShardedOptimizer:
    """The class that the fronts make an ``Optimizer`` and ``Joinable`` of their framework; see there for its use.

    It stands before the framework's classes in the order of resolution, so ``super()`` is their ``Optimizer``.
    """

    framework: ClassVar[Framework]
    _step_supports_amp_scaling = True
    """Makes GradScaler call ``step()`` also where it found an inf, so that ranks agree on it; see step/scaling.py."""

    param_groups: list[dict[str, Any]]
    state: Any
    defaults: dict[str, Any]
    _join_config: Any
    _optimizer_state_dict_pre_hooks: Any
    _optimizer_state_dict_post_hooks: Any
    _optimizer_load_state_dict_pre_hooks: Any
    _optimizer_load_state_dict_post_hooks: Any

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Any],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        sharding: Sharding = DEFAULT_SHARDING,
        **defaults: Any,
    ) -> None:
        """Read, compare, partition, make the local optimizer, and only then touch parameters. Collective.

        Arguments and errors are those of the class.
        """
        self.framework.init_joinable(self)
        shares_memory = getattr(sharding, "shared_memory", False)
        self._group = self.framework.find_group(process_group, shares_memory=shares_memory)
        modes = {"has_views": parameters_as_bucket_view, "overlaps": overlap_with_ddp}
        self._take_granularities = partial(
            take_granularities,
            self.framework,
            optimizer_class,
            sharding,
            has_views=parameters_as_bucket_view and not overlap_with_ddp,
        )
        with raise_together(self._group, doing="making the optimizer"):
            require_possible(self.framework, optimizer_class, sharding, **modes)
            groups = read_param_groups(params, self.framework)
            self._granularities = self._take_granularities(groups)
            super().__init__(groups, dict(defaults))  # type: ignore[call-arg]
        has_views = parameters_as_bucket_view and not overlap_with_ddp
        self.shards = Shards(self._group, self.framework, sharding, has_views=has_views)
        policy = policy_facts(optimizer_class, sharding, **modes)
        plan = self.shards.plan(self.param_groups, self._granularities, policy)
        self.shards.admit(self.param_groups, plan)
        try:
            with raise_together(self._group, doing=f"making the local {name_of(optimizer_class)}"):
                self.optim = optimizer_class(
                    self.shards.local_groups(self.param_groups), **defaults
                )
        except Exception:
            self.shards.retract(0)
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self.defaults = self.optim.defaults
        self._pieces = assemble(
            self._group,
            self.framework,
            sharding,
            self.shards,
            self.optim,
            param_groups=lambda: self.param_groups,
            fire_hooks=partial(self.framework.fire_step_hooks, self),
            is_in_join=lambda: bool(self._join_config.enable),
            is_separable=self.framework.is_separable(optimizer_class),
            overlaps=overlap_with_ddp,
        )
        self.state = self._pieces.state.live

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, also in mid-training; earlier parameters keep owner and state. Collective.

        Raises:
            TypeError, ValueError: As the framework's ``Optimizer`` does, on every rank.
            RankMismatchError: Ranks gave different groups. Either way the optimizer is as before.
        """
        if "optim" not in vars(self):
            super().add_param_group(param_group)  # type: ignore[misc]
            return  # the base constructor is reading the first groups, which __init__ then plans together
        if self.backward_step is not None and self.backward_step.is_driven:
            raise OverlapError(
                "add_param_group() after a DDP hook was made, which would not update the new parameters; add all groups "
                "first, then call hook_with_zero_step()"
            )
        start, num_params = len(self.param_groups), len(self.shards.params)
        self.wait()
        try:
            with raise_together(self._group, doing="add_param_group()"):
                group = read_param_group(param_group, self.framework)
                granularities = self._take_granularities([group])
                super().add_param_group(group)  # type: ignore[misc]
            self._granularities += granularities
            policy = [("param groups", str(start + 1))]
            plan = self.shards.plan(self.param_groups, self._granularities, policy)
            self.shards.admit(self.param_groups, plan)
            with raise_together(self._group, doing="add_param_group() of the local optimizer"):
                for group in self.shards.local_groups(self.param_groups, start=start):
                    self.optim.add_param_group(group)
        except Exception:
            del self.param_groups[start:]
            del self.optim.param_groups[start:]
            del self._granularities[start:]
            self.shards.retract(num_params)
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self.state = self._pieces.state.live
        for attachment in self._pieces.stepper.attachments:
            attachment.read()
        if self._pieces.intake is not None:
            self._pieces.intake.watch()

    @property
    def backward_step(self) -> BackwardStep | None:
        """What a hook on DDP drives; None without ``overlap_with_ddp``."""
        return self._pieces.backward_step

    # --- The step ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Perform one step and bring every replica to the same parameters. Collective.

        Args:
            closure: Computes the loss and its gradients. Evaluated once, before any rank updates.
            **kwargs: Passed on to the local optimizer's ``step()``.

        Returns:
            What the local optimizer's ``step()`` returned; with ``overlap_with_ddp=True`` the closure's loss.

        Raises:
            RankMismatchError: Options such as the learning rate differ between ranks; nothing was updated.
            ParameterChangedError: A parameter changed its shape or dtype; nothing was updated.
            RemoteRankError: The local optimizer of another rank raised. The replicas are equal all the same.
            OverlapError: With ``overlap_with_ddp=True``: no update was made in backward, or gradients were changed after.
        """
        in_backward = self._pieces.backward_stepper or self.backward_step
        if in_backward is not None:
            if kwargs:
                raise OverlapError(
                    f"step() has made its update in backward, so {sorted(kwargs)} come too late"
                )
            loss = self._evaluate(closure)
            in_backward.confirm(LossScale.of(self))
            return loss
        return self._hooked_step(*([] if closure is None else [closure]), **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # Note [Step hooks]
    """Note [Step hooks]: the framework wraps ``step`` of a class that has no attribute ``hooked`` in what fires step
    hooks and the profiler label. A step inside backward fires hooks where it updates, not where ``step()`` confirms it,
    so here that wrapper goes around ``_step_after_backward`` instead: each front makes ``_hooked_step`` that way."""

    _hooked_step: Callable[..., Any]

    def _step_after_backward(self, closure: Any = None, **kwargs: Any) -> Any:
        work = self.framework.notify_join(self)
        if work is not None:
            work.wait()
        loss, error = None, None
        try:
            loss = self._evaluate(closure)
        except Exception as raised:
            error = raised
        try:
            return self._pieces.stepper.step(
                local_step(self.optim, closure, loss, self.shards.versions, kwargs),
                scale=LossScale.of(self),
                is_in_join=bool(self._join_config.enable),
                error=error,
            )
        except Exception:
            LossScale.forget(self)  # a GradScaler removes them only after a step that returns
            raise

    def _evaluate(self, closure: Any) -> Any:
        with self.framework.enable_grad():
            return closure() if callable(closure) else None

    def __getattr__(self, name: str) -> Any:
        """Offer what the local optimizer has beyond the common interface, e.g. ``train()`` and ``eval()``.

        Methods are collective: call them on every rank. If one changes parameters or options, all are exchanged.
        """
        if name.startswith("_") or "optim" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.optim, name)
        return partial(self._pieces.stepper.call, value) if callable(value) else value

    # --- Gradients --------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, as the framework's ``Optimizer`` does. Local."""
        if self.backward_step is not None:
            self.backward_step.before_zero_grad()
        if self._pieces.intake is not None:
            self._pieces.intake.forget(after_step=False)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Any:
        """Scale the gradients of all parameters so that their total norm is at most ``max_norm``. Collective.

        With ``Sharding(gradients=True)`` this reduces them, which ``step()`` then need not do. The framework's own function
        would see this rank's gradients only, before they are averaged. Otherwise it is the framework's own function.

        Args:
            max_norm: The largest norm allowed.
            norm_type: p of the p-norm, above 0, or inf.
            error_if_nonfinite: Raise if the norm is inf or NaN.

        Returns:
            The norm before scaling, 0-dim, equal on all ranks.

        Raises:
            RuntimeError: As asked for with ``error_if_nonfinite``, on every rank.
            OverlapError: With ``overlap_with_ddp=True``: the update has been made already.
        """
        if self._pieces.steps_in_backward:
            raise OverlapError(MSG_GRADIENTS_CHANGED)
        if self._pieces.intake is None:
            return self.framework.clip_grad_norm(
                self.shards.params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        return self._pieces.clipper.clip(
            self._pieces.intake, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of every backward within the block add up on this rank, unreduced. Local.

        The next backward outside of it reduces them together with its own, or else ``step()`` does: less traffic, at the
        price of whole gradients in the meantime. With gradients that DDP averages, use DDP's own.

        Raises:
            RuntimeError: This optimizer does not reduce gradients.
        """
        if self._pieces.intake is None:
            raise RuntimeError(
                "no_sync() of an optimizer that does not reduce gradients; use that of DDP, or Sharding(gradients=True)"
            )
        with self._pieces.intake.pause():
            yield

    # --- The module -------------------------------------------------------------------------------------------

    def attach(self, module: Any, *, broadcast_buffers: bool = False) -> None:
        """Let ``step()`` return while parameters travel; each submodule's forward waits for those it holds. Collective.

        Whatever reads parameters elsewhere between ``step()`` and the end of the next forward has to call ``wait()`` first;
        ``module.state_dict()`` does. Where ranks share memory, nothing travels by itself, so ``step()`` waits all the same.

        Args:
            module: The module that is called in training; holds some or all parameters.
            broadcast_buffers: Make its buffers those of the first rank of the group now.

        Raises:
            ValueError: Parameters are no bucket views, which the exchange could write to meanwhile.
            RankMismatchError: Modules of different ranks have different buffers.
        """
        attachment = Attachment(
            module, self._pieces.exchange, self.shards, self.framework.outside_of_graphs
        )
        self._pieces.stepper.attachments.append(attachment)
        if broadcast_buffers:
            equalize_buffers(self._group, module)

    def wait(self) -> None:
        """Wait until all parameters are what the last ``step()`` made of them. Local."""
        self._pieces.exchange.drain()

    @property
    def imbalance(self) -> float:
        """What the rank that carries most carries, over the mean of all ranks: 1.0 is even; see ``Sharding.cost``."""
        return self.shards.imbalance

    # --- State dicts ------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on rank ``to`` of the group, in CPU memory, for ``state_dict()``. Collective.

        Tensors travel in chunks; ranks other than ``to`` hold ``Sharding.bucket_mb`` of them beyond their own state.
        What an earlier call collected is dropped on every rank; rank ``to`` keeps this until then, or ``load_state_dict()``.

        Raises:
            ValueError: ``to`` is no rank of the group, or not equal on all ranks.
        """
        self.wait()
        self._pieces.state.consolidate(self.param_groups, to=to)

    def state_dict(self) -> dict[str, Any]:
        """Return the last consolidated state, as the unsharded optimizer's ``state_dict()`` would be then. Local.

        Raises:
            NotConsolidatedError: This rank holds none; a ``RuntimeError``.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._pieces.state.snapshot()
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an unsharded optimizer, or a consolidated one from any world size. Collective.

        Every rank passes the full state dict and copies its own part out of it; the dict stays as it is.

        Raises:
            StateMismatchError: It does not fit. As with every failure here, on all ranks, with nothing loaded.
            RankMismatchError: Ranks passed different ones.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        with raise_together(self._group, doing="load_state_dict() hooks"):
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before(self, state_dict) or state_dict
        self._pieces.state.load(state_dict, self.param_groups)
        self.state = self._pieces.state.live
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled or deep-copied.

        Raises:
            TypeError: Always, with the way out.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it belongs to a process group and to the other ranks; "
            "save consolidate_state_dict() + state_dict(), or make a second one from the copied model"
        )

    # --- Uneven inputs ----------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook with which this rank goes on to update its shard after its inputs ran out. Local.

        ``kwargs`` are those given to ``Join``; none is used.
        """
        stand_in = stand_last(self, lambda joinable: isinstance(joinable, ShardedOptimizer))
        if stand_in is not self:
            return stand_in.join_hook(**kwargs)
        if self._pieces.steps_in_backward or self._group.num_members > self._group.world_size:
            raise OverlapError(
                "Join cannot be combined with steps in backward, or with a grid of ranks; for uneven inputs use "
                "overlap_with_ddp=False, step_in_backward=False and one process group"
            )
        return self.framework.shadow_step(self._pieces.stepper.shadow_step, self._leave_join)

    @property
    def join_device(self) -> Any:
        """The device of the first parameter, for the collectives of ``Join``."""
        return self.shards.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The sharding group, for the collectives of ``Join``."""
        return self._group.process_group

    def _leave_join(self) -> None:
        self._join_config = self._join_config._replace(enable=False)
