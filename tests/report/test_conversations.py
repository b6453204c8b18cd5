"""Which rollouts are shown, and that what models wrote comes out clipped and harmless."""

from pathlib import Path

import msgspec
import zstandard

from tests.report.made_run import MadeRun, failed_rollout, make_run
from thundersync.core.types import Message, Rollout, TokenSequence, Turn
from thundersync.monitor import events as e
from thundersync.report.conversations import MOST_CHARS, MOST_TURNS, clean, clipped, conversations
from thundersync.report.record import RunRecord, read_run


def rollouts_of(path: Path) -> list[Rollout]:
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).splitlines()
    return [msgspec.json.decode(line, type=Rollout) for line in lines]


def rewrite(path: Path, rollouts: list[Rollout]) -> None:
    lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
    path.write_bytes(zstandard.ZstdCompressor().compress(lines))


def test_the_best_and_the_worst_are_shown_each_of_another_task(record: RunRecord) -> None:
    shown = conversations(record)
    best, worst = ([each for each in shown if each.why == why] for why in ("best", "worst"))
    assert {each.verdict for each in best} == {"reward 1, submitted"}
    assert {each.verdict for each in worst} == {"reward 0, submitted"}
    assert len({each.task_id for each in best}) == len({each.task_id for each in worst}) == 3


def test_a_conversation_begins_with_the_task_and_leaves_the_examples_out(record: RunRecord) -> None:
    talk = conversations(record)[0]
    assert talk.instruction == "Sort the lines of names.txt into sorted.txt." and talk.opening == 3
    assert [exchange.number for exchange in talk.exchanges] == list(range(1, len(talk.exchanges) + 1))
    assert "sort names.txt" in talk.exchanges[0].reply and talk.exchanges[0].answer.startswith("sorted 1 of")
    assert "mean logprob -0.50" in talk.exchanges[0].facts and "exit code 0" in talk.exchanges[0].facts


def test_a_forked_rollout_has_each_turns_figures_beside_its_own_reply(tmp_path: Path) -> None:
    folder = make_run(tmp_path, MadeRun(steps=1, groups=1, size=2))
    path = folder / "rollouts" / "step-000000.jsonl.zst"
    told = [("user", "task"), ("assistant", "A1"), ("tool", "out 1"), ("assistant", "A2"), ("tool", "out 2")]
    fork = [("user", "task"), ("assistant", "A1"), ("user", "summary"), ("assistant", "A3")]
    places = [(0, 1, 0), (0, 3, 0), (1, 8, 5)]
    messages = [msgspec.convert({"role": role, "content": text}, Message) for role, text in told + fork]
    sequences = [
        TokenSequence(token_ids=[0] * 9, sampled=[True] * 9, logprobs=[-1.0] * 3 + [-2.0] * 6, prompt_tokens=0),
        TokenSequence(token_ids=[0] * 9, sampled=[True] * 9, logprobs=[-3.0] * 9, prompt_tokens=0),
    ]
    turns = [
        Turn(index=index, sequence=sequence, start=3 * index, end=3 * index + 3, finish_reason="stop",
             policy_version=0, message=message, conversation=conversation)
        for index, (sequence, message, conversation) in enumerate(places)
    ]  # fmt: skip
    forked = [
        msgspec.structs.replace(rollout, messages=messages, sequences=sequences, turns=turns)
        for rollout in rollouts_of(path)
    ]
    rewrite(path, forked)
    talk = conversations(read_run(folder))[0]
    assert (talk.instruction, talk.opening) == ("task", 0)
    assert [(each.number, each.reply, each.answer, each.asked) for each in talk.exchanges] == [
        (1, "A1", "out 1", ""), (2, "A2", "out 2", ""), (3, "A3", "", "summary"),
    ]  # fmt: skip
    assert [each.facts.rpartition(" ")[2] for each in talk.exchanges] == ["-1.00", "-2.00", "-3.00"]


def test_a_rollout_that_failed_for_good_is_shown_with_its_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path, MadeRun(steps=1))
    path = folder / "rollouts" / "step-000000.jsonl.zst"
    first, *others = rollouts_of(path)
    rewrite(path, [failed_rollout(first, "exit 137"), *others])
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    lost = e.RolloutFailed(
        at_s=1.0, rollout_id=first.rollout_id, group_id=first.group_id, failure="sandbox", detail="exit 137",
        will_retry=False,
    )  # fmt: skip
    place = next(i for i, line in enumerate(lines) if b'"step_committed"' in line)
    (folder / "events.jsonl").write_bytes(b"".join([*lines[:place], e.to_line(lost), *lines[place:]]))
    shown = conversations(read_run(folder))
    assert [each.verdict for each in shown if each.why == "failed"] == ["failed (sandbox): exit 137"]


def test_long_messages_and_long_conversations_lose_their_middle_and_say_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path, MadeRun(steps=1, groups=1, size=2, turns=(60, 60)))
    path = folder / "rollouts" / "step-000000.jsonl.zst"
    long = [
        msgspec.structs.replace(
            rollout, messages=[*rollout.messages[:-1], Message(role="user", content="x" * 10 * MOST_CHARS)]
        )
        for rollout in rollouts_of(path)
    ]
    rewrite(path, long)
    talk = conversations(read_run(folder))[0]
    assert len(talk.exchanges) == MOST_TURNS
    assert sum(exchange.skipped for exchange in talk.exchanges) == 60 - MOST_TURNS
    assert len(talk.exchanges[-1].answer) < MOST_CHARS + 100 and "characters left out" in talk.exchanges[-1].answer


def test_when_all_rewards_are_equal_no_one_is_called_the_worst(tmp_path: Path) -> None:
    folder = make_run(tmp_path, MadeRun(steps=1))
    lines = [e.from_line(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    same = [msgspec.structs.replace(x, reward=1.0) if isinstance(x, e.RolloutScored) else x for x in lines if x]
    (folder / "events.jsonl").write_bytes(b"".join(map(e.to_line, same)))
    assert {each.why for each in conversations(read_run(folder))} == {"best"}


def test_missing_and_broken_rollout_files_are_no_obstacle(tmp_path: Path) -> None:
    folder = make_run(tmp_path, MadeRun(steps=2))
    (folder / "rollouts" / "step-000000.jsonl.zst").write_bytes(b"not zstd")
    (folder / "rollouts" / "step-000001.jsonl.zst").unlink()
    assert conversations(read_run(folder)) == []


def test_terminal_colours_go_and_control_characters_show() -> None:
    assert (
        clean("\x1b[1;31mred\x1b[0m \x1b]0;title\x07done\r\nnext\x00\u202egpj.exe")
        == "red done\nnext\ufffd\ufffdgpj.exe"
    )
    assert clean("tabs\tand\nlines stay, höflich ✓") == "tabs\tand\nlines stay, höflich ✓"


def test_a_short_text_is_not_clipped() -> None:
    assert clipped("short") == "short"
