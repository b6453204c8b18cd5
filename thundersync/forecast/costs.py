"""What passes cost, told from the passes of a run: so much each, whatever it holds, and so much per token.

Medians instead of least squares: the first passes of a run (buffers grow, kernels are chosen) would bend a line that
has to fit the others.
"""

import statistics
from collections.abc import Sequence
from itertools import combinations

from msgspec import Struct

MOST_PASSES = 300
"""The slope looks at every pair."""
SIZES_DIFFER = 2.0


class PassCost(Struct, frozen=True, kw_only=True):
    """seconds of a pass = `fixed_s` + `token_s` x tokens."""

    fixed_s: float
    token_s: float
    passes: int
    """It was told from so many."""
    error: float
    """Sum over them of |seconds - formula| as a share of the sum of their seconds."""

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


def fit(passes: Sequence[tuple[float, float]], *, least_s: float | None = None) -> PassCost:
    """A line through (tokens, seconds) of each pass: the median slope of all pairs, the median rest, the median cost of
    a token beyond it.

    No pass took less than `least_s` (by default the shortest of `passes`), so the fixed cost is not more than that, and
    every pass is that and something more. Passes whose sizes differ by less than SIZES_DIFFER cannot tell a fixed cost
    from one per token: all is put down to the tokens, so that no cost is foretold which nothing has shown. Source:
    Theil (1950), Sen (1968). Raises: ValueError without passes.
    """
    if not passes:
        raise ValueError("a cost cannot be told from no passes")
    chosen = passes[:: -(-len(passes) // MOST_PASSES)]
    sizes = [tokens for tokens, _ in chosen]
    fixed_s = 0.0
    if max(sizes) >= SIZES_DIFFER * min(sizes):
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(chosen, 2) if a[0] != b[0]]
        slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
        rest_s = statistics.median(seconds - slope * tokens for tokens, seconds in chosen)
        shortest_s = min(seconds for _, seconds in passes)
        fixed_s = min(max(0.0, rest_s), shortest_s if least_s is None else least_s)
    token_s = statistics.median((seconds - fixed_s) / max(1.0, tokens) for tokens, seconds in chosen)
    total_s = sum(seconds for _, seconds in passes)
    wrong_s = sum(abs(seconds - fixed_s - token_s * tokens) for tokens, seconds in passes)
    return PassCost(fixed_s=fixed_s, token_s=token_s, passes=len(passes), error=wrong_s / total_s if total_s else 0.0)
