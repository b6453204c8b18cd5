"""Traces for tests: made by hand, or by hypothesis under stated conditions."""

from hypothesis import strategies as st
from msgspec import structs

from thundersync.core.ready_queue import PartRoom
from thundersync.forecast import RolloutTrace, StepTrace, TurnTrace

SECONDS = st.integers(0, 64).map(lambda quarter: quarter / 4)
"""Quarters of a second: sums are exact, so equalities can be asked for."""


def step(*groups: list[tuple[float, float, float]], **others: object) -> StepTrace:
    """Each group is a list of (release, reward, cost)."""
    rollouts = [
        RolloutTrace(
            rollout_id=f"{g}-{i}", group_id=f"g{g}", release_s=float(release), reward=reward, cost_s=float(cost)
        )
        for g, members in enumerate(groups)
        for i, (release, reward, cost) in enumerate(members)
    ]
    return StepTrace(rollouts=rollouts, **{"commit_s": 0.0, "publish_s": 0.0, **others})  # type: ignore[arg-type]


@st.composite
def rewarded(
    draw: st.DrawFn, *, costs: st.SearchStrategy[float] = SECONDS, all_wanted: bool = False, overheads: bool = False
) -> StepTrace:
    """A step of up to 5 groups. `all_wanted`: every piece has a gradient; else groups may be flat, and rollouts fail.

    `overheads`: passes and closings have fixed costs, parts and passes are bounded, and some steps hold gradients whose
    checker still runs.
    """
    groups = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(2, 5))
        rewards = [float(i * i) for i in range(size)] if all_wanted else draw(_rewards(size))
        groups.append([(draw(SECONDS), reward, draw(costs)) for reward in rewards])
    extra: dict[str, object] = {"workers": draw(st.integers(1, 4)), "commit_s": draw(SECONDS)}
    if overheads:
        extra |= {
            "pass_s": draw(SECONDS),
            "close_s": draw(SECONDS),
            "max_tokens": draw(st.integers(1, 6)),
            "room": PartRoom(
                most=draw(st.sampled_from([0, 1, 2, 3, 4, 100])), tokens=draw(st.sampled_from([0.0, 1.5]))
            ),
        }
    made = step(*groups, **extra)
    if not overheads or not draw(st.booleans()):
        return made
    contents = [structs.replace(r, content_s=r.release_s * draw(st.integers(0, 4)) / 4) for r in made.rollouts]
    return structs.replace(made, rollouts=contents, holds=True)


def _rewards(size: int) -> st.SearchStrategy[list[float | None]]:
    return st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=size, max_size=size)


@st.composite
def distilled(draw: st.DrawFn) -> StepTrace:
    """A step whose rollouts are turns; a score may land after those of later turns, or after the rollout's end."""
    rollouts = []
    for g in range(draw(st.integers(1, 3))):
        for i in range(draw(st.integers(1, 3))):
            turns = [
                TurnTrace(release_s=draw(SECONDS), cost_s=draw(SECONDS), tokens=draw(st.integers(1, 4)))
                for _ in range(draw(st.integers(0, 4)))
            ]
            rollouts.append(
                RolloutTrace(
                    rollout_id=f"{g}-{i}",
                    group_id=f"g{g}",
                    release_s=draw(SECONDS),
                    reward=None,
                    cost_s=0.0,
                    turns=turns,
                )
            )
    return StepTrace(
        rollouts=rollouts,
        commit_s=draw(SECONDS),
        publish_s=0.0,
        workers=draw(st.integers(1, 3)),
        pass_s=draw(SECONDS),
        close_s=draw(SECONDS),
        max_tokens=draw(st.integers(1, 40)),
        longest=16,
        turns_stream=draw(st.booleans()),
    )
