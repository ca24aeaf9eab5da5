"""The facts of a parameter that planning needs, without the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shardopt.partition.boxes import row_major


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements of a tensor fill one gapless range of memory, in whatever order.

    Example: shape (2, 3) with strides (3, 1) or (1, 2) is dense; with (6, 2) or (0, 1) it is not.
    """
    expected = 1
    for step, length in sorted((st, n) for st, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What one rank was told about one parameter.

    Attributes:
        index: Position in the order of the param groups, as the keys of a state dict count.
        name: The name given by ``named_parameters()``, or None.
        group: Index of its param group.
        shape: Its shape.
        stride: Its strides, in elements.
        dtype: ``str(param.dtype)``.
        itemsize: Bytes per element.
        device: Device type and order of first appearance, ``"cuda#0"``: the ranks of one job sit on devices with
            different indices, but each must see its own in the same order.
        requires_grad: Whether it is trained at present.
        is_cut: Whether its elements may have different owners.
        cost: What its update costs, in a unit of the user's; its number of elements by default. Ranks carry about equal
            sums of it.
    """

    index: int
    name: str | None
    group: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str
    requires_grad: bool
    is_cut: bool = False
    cost: float | None = None

    @property
    def load(self) -> float:
        """``cost`` where one is known, else the number of elements."""
        return self.numel if self.cost is None else self.cost

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.itemsize

    @property
    def label(self) -> str:
        """How messages call it: ``param 7 'head.bias'``."""
        return f"param {self.index}" + (f" {self.name!r}" if self.name is not None else "")

    @property
    def is_dense(self) -> bool:
        """Whether its elements fill one gapless range of memory."""
        return is_dense(self.shape, self.stride)

    @property
    def flat_stride(self) -> tuple[int, ...]:
        """The strides with which its parts count elements: its own if it is dense, else row-major, as in its bucket."""
        return self.stride if self.is_dense else row_major(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order, or will once it is a view of a bucket."""
        if not self.is_dense:
            return True
        dims = [dim for dim, length in enumerate(self.shape) if length != 1]
        return all(self.stride[a] >= self.stride[b] for a, b in pairwise(dims)) or not self.numel

    def fingerprint(self, *, with_stride: bool = False) -> str:
        """What ranks compare, in words: group, name, shape, dtype, device and whether it is trained.

        Strides matter where parameters travel in memory order, as views of a bucket.
        """
        trained = "trained" if self.requires_grad else "frozen"
        name = f" {self.name!r}" if self.name is not None else ""
        strides = f" strides {self.stride}" if with_stride else ""
        cut = ", by element" if self.is_cut else ""
        cost = "" if self.cost is None else f", cost {self.cost!r}"
        return f"{self.shape}{strides}{name} {self.dtype} on {self.device}, {trained}, in group {self.group}{cut}{cost}"
