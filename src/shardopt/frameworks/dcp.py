"""What one rank holds of a tensor, as ``torch.distributed.checkpoint`` (DCP) saves and loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardopt.partition import Box, memory_order

aten = torch.ops.aten


class SavedTensor(torch.Tensor):
    """A tensor of which this rank holds some boxes, in flat memory; DCP asks it for them.

    Loading goes to memory of its own, so that what was live stays as it was until all of it is there; ``local`` is
    in that memory, or the live one where nothing was loaded. DCP says that it is going to load by asking for the chunks.

    Source: the three methods with double underscores are DCP's protocol for tensor subclasses, ``_Checkpointable``.
    """

    _flat: Tensor
    _target: Tensor | None
    _boxes: tuple[Any, ...]
    _local_shape: tuple[int, ...]
    _local_stride: tuple[int, ...]

    @staticmethod
    def __new__(
        cls: type[SavedTensor],
        local: Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        boxes: Sequence[Box],
        is_live: bool,
    ) -> SavedTensor:
        """Make one of ``shape``.

        Args:
            cls: This class.
            local: What this rank holds: dense, its elements in memory are those of the boxes, one after another.
            shape: Of the whole tensor.
            stride: Says in which order its dimensions lie in memory.
            boxes: Boxes of the tensor with its dimensions in that order.
            is_live: Whether ``local`` must not change; else it is loaded into.
        """
        made: SavedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        order = memory_order(shape, stride)
        place = sorted(range(len(order)), key=order.__getitem__)
        made._boxes = tuple((b.permuted(order).offsets, b.sizes, tuple(place)) for b in boxes)
        made._flat = local.as_strided((local.numel(),), (1,))
        made._local_shape, made._local_stride = tuple(local.shape), tuple(local.stride())
        made._target = None if is_live else made._flat
        return made

    def __init__(self, *_: Any) -> None:
        """Made already."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        held = f"{self._flat.numel()} of {self.numel()} elements"
        return f"SavedTensor({tuple(self.shape)}, {self.dtype}, {held} here)"

    def __deepcopy__(self, memo: Any) -> SavedTensor:
        return self._with(self.loaded.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "this is a part of a tensor, for torch.distributed.checkpoint; to pickle state use "
            "Sharding(state_dict='sharded') and state_dict(), or consolidate_state_dict()"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return args[0]
        if func is aten.clone.default:
            return args[0]._with(args[0].loaded.clone())
        if func is aten.new_empty.default or func is aten.empty_like.default:
            device = (kwargs or {}).get("device") or args[0].device
            return args[0]._with(torch.empty_like(args[0]._flat, device=device))
        if func is aten._to_copy.default:
            return args[0]._with(args[0].loaded.to(**(kwargs or {})))
        raise NotImplementedError(f"{func} of a part of a tensor, which is there to be saved")

    def _with(self, flat: Tensor) -> SavedTensor:
        """The same boxes in other memory."""
        made: SavedTensor = torch.Tensor._make_wrapper_subclass(
            SavedTensor, self.shape, dtype=flat.dtype, device=flat.device
        )
        made._boxes, made._flat, made._target = self._boxes, flat, None
        made._local_shape, made._local_stride = self._local_shape, self._local_stride
        return made

    @property
    def loaded(self) -> Tensor:
        """What was loaded, or else what is live: (numel held,) in the order of the boxes."""
        return self._flat if self._target is None else self._target

    @property
    def is_live(self) -> bool:
        """Whether ``local`` is memory that training uses."""
        return self._target is None

    @property
    def local(self) -> Tensor:
        """The same in the shape of what this rank holds."""
        return self.loaded.as_strided(self._local_shape, self._local_stride)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self._target is None:
            self._target = torch.empty_like(self._flat)
        return self._chunks()

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._flat)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self._chunks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        at = 0
        for offsets, sizes, place in self._boxes:
            numel = torch.Size(sizes).numel()
            if index.offset is None or index.offset == torch.Size(offsets):
                return self.loaded.narrow(0, at, numel).view(sizes).permute(place)
            at += numel
        raise KeyError(index)

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes[p] for p in place))
            for offsets, sizes, place in self._boxes
        ]
