"""What updating a parameter costs, for packing whole parameters evenly: values of ``Sharding.cost``."""

from __future__ import annotations

from shardopt.partition.spec import ParamSpec

NEWTON_SCHULZ_STEPS = 5
"""Iterations that ``torch.optim.Muon`` runs by default."""


def newton_schulz_work(spec: ParamSpec) -> float:
    """Multiplications of a Muon update: Newton-Schulz iterations on a matrix, one per element of anything else.

    An iteration on X of (m, n), m <= n, computes A = X X^T, A A and B X: 2 m^2 n + m^3 multiplications.

    Example: a matrix of (2, 3) costs 5 * (2 * 4 * 3 + 8) = 160, a bias of 7 costs 7.

    Source: Muon, https://kellerjordan.github.io/posts/muon/.
    """
    if len(spec.shape) != 2:
        return float(spec.numel)
    m, n = sorted(spec.shape)
    return float(NEWTON_SCHULZ_STEPS * (2 * m * m * n + m**3))
