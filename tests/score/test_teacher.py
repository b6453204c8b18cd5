"""Teachers over engines: who is asked, what happens when one fails, whose version an answer must have."""

import asyncio

import pytest

from tests.fakes import FakeGenerator, FakeTeacher, fake_scores, turns
from thundersync.errors import ConfigError, EngineDied, EngineFailed, StaleScore, TeacherFailed
from thundersync.generate.base import Generator
from thundersync.generate.supervised import SupervisedGenerator
from thundersync.score.teacher import EngineTeacher, PrivilegedPrompt, SelfTeacher, Teacher, TeacherPool

IDS = [5, 6, 7, 8, 9]


def engines(count: int) -> list[FakeGenerator]:
    return [FakeGenerator(turns()) for _ in range(count)]


def teacher_of(generators: list[FakeGenerator], **options: float) -> EngineTeacher:
    frozen: list[Generator] = [*generators]
    return EngineTeacher("the teacher", frozen, **options)


async def test_a_score_covers_the_tokens_from_start_to_end() -> None:
    teacher: Teacher = teacher_of(engines(1))
    await teacher.start()
    scores = await teacher.score(IDS, start=2, topk=3)
    assert scores.fault(count=3, topk=3) == ""
    assert scores.top_ids[0] == [7, 8, 9]
    assert teacher.payload_bytes == scores.nbytes == 8 * (3 + 9 + 9)


async def test_the_least_loaded_replica_is_asked() -> None:
    replicas = engines(3)
    teacher = teacher_of(replicas)
    lengths = [40, 10, 10, 10, 10, 10, 10]  # the first replica has as much to do as four short requests
    await asyncio.gather(*[teacher.score([5] * length, start=1) for length in lengths])
    assert [len(replica.scored) for replica in replicas] == [1, 3, 3]


async def test_a_request_that_failed_is_asked_of_another_replica() -> None:
    first, second = replicas = engines(2)
    first.failing = [EngineFailed("out of luck")]
    scores = await teacher_of(replicas).score(IDS, start=3)
    assert len(scores.logprobs) == 2
    assert (len(first.scored), len(second.scored)) == (1, 1)


async def test_a_dead_replica_leaves_the_others_the_work() -> None:
    replicas = engines(2)
    replicas[0].dead = True
    teacher = teacher_of(replicas)
    await asyncio.gather(*[teacher.score(IDS, start=1) for _ in range(6)])
    assert len(replicas[1].scored) == 6


async def test_a_request_that_fails_everywhere_is_the_teachers_failure_with_its_reason() -> None:
    replicas = engines(2)
    for replica in replicas:
        replica.failing = [EngineFailed("too long", remedy="Shorten it.")]
    with pytest.raises(TeacherFailed, match="the teacher did not score: too long") as failed:
        await teacher_of(replicas).score(IDS, start=1)
    assert failed.value.remedy == "Shorten it."
    assert [len(replica.scored) for replica in replicas] == [1, 1]


async def test_a_refused_request_is_not_asked_of_the_same_engine_again() -> None:
    (only,) = engines(1)
    only.failing = [EngineFailed("too long")]
    with pytest.raises(TeacherFailed):
        await teacher_of([only]).score(IDS, start=1)
    assert len(only.scored) == 1


async def test_a_lone_engine_that_died_is_asked_again_once_it_is_back() -> None:
    made: list[FakeGenerator] = []

    def make(restarts: int) -> Generator:
        made.append(FakeGenerator(turns()))
        return made[-1]

    supervised = SupervisedGenerator(make, lambda event: None)
    teacher = EngineTeacher("the teacher", [supervised])
    await teacher.start()
    made[0].failing = [EngineDied("killed")]
    scores = await teacher.score(IDS, start=1)
    assert len(scores.logprobs) == 4
    assert len(made) == 2
    assert made[1].published == []  # frozen: it comes back with the folder's weights
    await teacher.close()
    assert made[1].closed


async def test_a_score_has_a_deadline() -> None:
    (only,) = engines(1)
    only.score_gate = asyncio.Event()  # never set
    with pytest.raises(TeacherFailed, match=r"within 0\.01 s"):
        await teacher_of([only], limit_s=0.01).score(IDS, start=1)
    assert only.running == 0


async def test_an_engine_that_was_published_to_is_no_frozen_teacher() -> None:
    with pytest.raises(TeacherFailed, match="as version 3"):
        await teacher_of([FakeGenerator(turns(), policy_version=3)]).score(IDS, start=1)


async def test_a_teacher_closes_every_engine_even_if_one_will_not() -> None:
    class Stuck(FakeGenerator):
        async def close(self) -> None:
            raise TimeoutError("did not end")

    replicas = [Stuck(turns()), *engines(2)]
    with pytest.raises(TimeoutError):
        await teacher_of(replicas).close()
    assert [replica.closed for replica in replicas] == [False, True, True]


async def test_the_policy_scores_itself_under_the_steps_version_only() -> None:
    policy = FakeGenerator(turns(), policy_version=4)
    teacher = SelfTeacher([policy])
    teacher.bind(4)
    assert (await teacher.score(IDS, start=1)).policy_version == 4
    teacher.bind(5)
    with pytest.raises(StaleScore, match="version 4, its step is bound to 5"):
        await teacher.score(IDS, start=1)
    await teacher.close()
    assert not policy.closed  # the engines are the run's


async def test_a_privileged_prompt_replaces_the_students_and_leaves_the_replies() -> None:
    teacher = FakeTeacher()
    shown = PrivilegedPrompt(teacher, prompt_tokens=2, privileged_ids=[100, 101, 102, 103])
    scores = await shown.score(IDS, start=3, topk=1)
    (asked,) = teacher.scored
    assert asked.token_ids == [100, 101, 102, 103, 7, 8, 9]
    assert asked.scored_ids == IDS[3:]
    assert scores.top_ids == [[8], [9]]


async def test_a_privileged_prompt_scores_nothing_inside_the_prompt() -> None:
    shown = PrivilegedPrompt(FakeTeacher(), prompt_tokens=3, privileged_ids=[1])
    with pytest.raises(TeacherFailed, match="inside the prompt"):
        await shown.score(IDS, start=2)
    assert len((await shown.score(IDS, start=3)).logprobs) == 2


async def test_each_task_has_the_first_teacher_whose_pattern_matches() -> None:
    maths, code, rest = (FakeTeacher(name) for name in ("maths", "code", "rest"))
    pool = TeacherPool([("math-*", maths), ("*-py", code), ("geo-*", maths), ("*", rest)])
    names = [pool.for_task(task_id).name for task_id in ("math-1", "math-py", "sort-py", "geo-2", "poem")]
    assert names == ["maths", "maths", "code", "maths", "rest"]
    assert await pool.start() == [f"{name} has started" for name in ("maths", "code", "rest")]
    await pool.for_task("math-1").score(IDS, start=1)
    await pool.for_task("poem").score(IDS, start=1, topk=2)
    assert pool.payload_bytes == maths.payload_bytes + rest.payload_bytes > 0
    await pool.close()
    assert all(teacher.closed for teacher in (maths, code, rest))


def test_tasks_without_a_teacher_are_refused_by_name() -> None:
    pool = TeacherPool([("math-*", FakeTeacher()), ("code-*", FakeTeacher())])
    pool.refuse_tasks_without_teacher(["math-1", "code-1"])
    with pytest.raises(ConfigError, match=r"2 tasks match no teacher's pattern \(math-\*, code-\*\): poem, Math-2"):
        pool.refuse_tasks_without_teacher(["math-1", "poem", "Math-2"])
    with pytest.raises(ConfigError):
        pool.for_task("poem")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ""),
        ({"logprobs": [-1.0]}, "1 tokens were scored instead of 4"),
        ({"logprobs": [-1.0, -1.0, float("nan"), -1.0]}, "not finite"),
        ({"logprobs": [-1.0, -1.0, float("-inf"), -1.0]}, "not finite"),
        ({"logprobs": [-1.0, -1.0, 3.5, -1.0]}, "above zero"),
        ({"top_ids": [[1, 2]] * 3}, "most probable ids are not 2 at each of 4"),
        ({"top_logprobs": [[-1.0, -2.0]] * 3 + [[-1.0]]}, "most probable logprobs are not 2"),
        ({"top_logprobs": [[-1.0, float("-inf")]] * 4}, "not finite"),
        ({"top_ids": [], "top_logprobs": []}, "not 2 at each"),
    ],
)
def test_scores_that_are_none_are_told_apart(fields: dict[str, object], told: str) -> None:
    import msgspec

    from tests.fakes import AskedScore

    good = fake_scores(AskedScore(token_ids=IDS, start=1, topk=2))
    scores = msgspec.structs.replace(good, **fields)
    assert told in scores.fault(count=4, topk=2)
    assert bool(told) == bool(scores.fault(count=4, topk=2))
