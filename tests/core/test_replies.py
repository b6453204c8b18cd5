"""Which message each turn is, where not every reply was sampled and not every one stands once."""

import msgspec

from thundersync.core.replies import turns_by_message
from thundersync.core.types import Message, Turn

EXAMPLE = [("system", "s"), ("user", "make a folder"), ("assistant", "an example"), ("user", "sort")]


def messages(*said: tuple[str, str]) -> list[Message]:
    return [msgspec.convert({"role": role, "content": content}, Message) for role, content in said]


def turn(index: int, **fields: int) -> Turn:
    return Turn(index=index, sequence=0, start=0, end=1, finish_reason="stop", policy_version=0, **fields)


def test_turns_stand_where_they_say() -> None:
    told = messages(*EXAMPLE, ("assistant", "a"), ("user", "x"), ("assistant", "b"))
    first, other, again = turn(0, message=4), turn(1, message=6), turn(2, message=6)
    assert turns_by_message(told, [first, other, again]) == {4: [first], 6: [other, again]}
    assert turns_by_message(told, [first, turn(1)]) == {4: [first]}


def test_files_that_do_not_say_it_have_their_own_replies_last() -> None:
    told = messages(*EXAMPLE, ("assistant", "a"), ("user", "x"), ("assistant", "b"))
    assert turns_by_message(told, [turn(0), turn(1)]) == {4: [turn(0)], 6: [turn(1)]}
    assert turns_by_message(told, []) == turns_by_message([], []) == {}


def test_of_several_conversations_that_do_not_say_it_nothing_is_said() -> None:
    told = messages(("user", "a"), ("assistant", "A"), ("user", "a"), ("assistant", "B"))
    assert turns_by_message(told, [turn(0), turn(1)]) == {}
    assert turns_by_message(told[:2], [turn(0), turn(1)]) == {}
