"""How much of the time spent generating more engines would divide: told from how turns slow each other down."""

import bisect
import itertools
from collections.abc import Sequence

from thundersync.forecast.costs import fit

Generated = tuple[float, float, int]
"""A turn's generation: from, to, and the tokens it sampled."""


def engine_load(turns: Sequence[Generated]) -> float:
    """Between 0 and 1, as `StepTrace.engine_load`.

    A sampled token takes a + b x (turns being generated beside it, itself included), the line through all turns (as in
    `costs.fit`); the second term's share, at the mean number of turns, is what fewer neighbours would save. Turns that
    always had the same number of neighbours cannot tell: then it is 1, engines limited by throughput.
    """
    timed = [(begin, end, tokens) for begin, end, tokens in turns if end > begin and tokens > 0]
    if not timed:
        return 1.0
    edges = sorted([(begin, 1) for begin, _, _ in timed] + [(end, -1) for _, end, _ in timed])
    times = [at for at, _ in edges]
    counts = list(itertools.accumulate(change for _, change in edges))
    spans = [count * (later - at) for at, later, count in zip(times, times[1:], counts, strict=False)]
    areas = [0.0, *itertools.accumulate(spans)]

    def area(at: float) -> float:
        """Turn-seconds generated until `at`, which is one of the edges."""
        return areas[bisect.bisect_left(times, at)]

    points = [((area(end) - area(begin)) / (end - begin), (end - begin) / tokens) for begin, end, tokens in timed]
    line = fit(points)
    beside = sum(count for count, _ in points) / len(points)
    shared_s = line.token_s * beside
    return shared_s / (line.fixed_s + shared_s) if line.fixed_s + shared_s else 1.0
