"""What a step's rollouts came to, in words."""

from thundersync.core.types import Failed, Outcome, Rollout, Scored
from thundersync.outcomes import tasks_without_score

BROKEN = Failed(reason="no_reward", detail="the checker wrote no reward")
SCORED = Scored(reward=0.0, rewards={"reward": 0.0}, stop="submitted")


def rollouts(**outcomes: tuple[Outcome, ...]) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=f"{task}-{index}",
            group_id=task,
            task_id=task,
            policy_version=0,
            messages=[],
            sequences=[],
            turns=[],
            outcome=outcome,
            started_s=0.0,
        )
        for task, found in outcomes.items()
        for index, outcome in enumerate(found)
    ]


def test_a_task_that_nothing_of_could_be_scored_is_named_with_its_first_reason() -> None:
    (told,) = tasks_without_score(rollouts(good=(SCORED, BROKEN), bad=(BROKEN, BROKEN)))
    assert told.startswith("not one of the 2 rollouts of task bad could be scored; the first: the checker wrote no")
    assert "env.checked" in told


def test_what_is_no_tasks_fault_names_none() -> None:
    ours = Failed(reason="engine", detail="the engine was restarted")
    assert list(tasks_without_score(rollouts(one=(BROKEN, ours), two=(ours,), three=(SCORED,)))) == []
