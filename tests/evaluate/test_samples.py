"""Finished samples are in the file at once; a torn line, a failed one and another question are told apart."""

from pathlib import Path

import msgspec
import pytest

from thundersync.core.types import Failed, Outcome, Rollout, Scored, TokenSequence
from thundersync.errors import ResumeError
from thundersync.evaluate.samples import Asked, SampleFile, SuiteAsked

ASKED = Asked(agent="policy", model="m", files="f", suites=[SuiteAsked(name="s", task_ids=["a"])], settings="{}")


def a_rollout(name: str, outcome: Outcome) -> Rollout:
    tokens = TokenSequence(token_ids=[1], sampled=[True], logprobs=[-1.0], prompt_tokens=0)
    return Rollout(
        rollout_id=name,
        group_id=name.rpartition("-")[0],
        task_id="a",
        policy_version=0,
        messages=[],
        sequences=[tokens],
        turns=[],
        outcome=outcome,
        started_s=0.0,
    )


async def test_scored_samples_are_found_again_and_failed_ones_are_not(tmp_path: Path) -> None:
    file = SampleFile(tmp_path)
    assert file.begin(ASKED) == {}
    await file.add(a_rollout("g-00", Scored(reward=0.5, stop="submitted")))
    await file.add(a_rollout("g-01", Failed(reason="sandbox", detail="gone")))
    await file.close()
    again = SampleFile(tmp_path)
    known = again.begin(ASKED)
    assert list(known) == ["g-00"]
    assert known["g-00"].sequences == []  # nothing is learned from them
    await again.add(a_rollout("g-01", Scored(reward=1.0, stop="submitted")))
    await again.close()
    assert list(SampleFile(tmp_path).begin(ASKED)) == ["g-00", "g-01"]


async def test_a_torn_line_is_cut_off_and_its_sample_runs_again(tmp_path: Path) -> None:
    file = SampleFile(tmp_path)
    file.begin(ASKED)
    await file.add(a_rollout("g-00", Scored(reward=0.5, stop="submitted")))
    await file.close()
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert list(SampleFile(tmp_path).begin(ASKED)) == ["g-00"]
    assert path.read_bytes() == whole


def test_samples_of_another_question_are_refused_by_name(tmp_path: Path) -> None:
    SampleFile(tmp_path).begin(ASKED)
    other = msgspec.structs.replace(ASKED, files="g", settings="[]")
    with pytest.raises(ResumeError, match="files, settings changed"):
        SampleFile(tmp_path).begin(other)
