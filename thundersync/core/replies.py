"""Which message of a rollout each turn is: for everybody who shows a conversation with the figures of its turns.

Not every reply was sampled: worked examples open a conversation, and a program may put words into the policy's mouth.
Not every reply stands once: a history that forks is told again with what follows it. Pure.
"""

from collections.abc import Sequence

from thundersync.core.types import Message, Turn


def turns_by_message(messages: Sequence[Message], turns: Sequence[Turn]) -> dict[int, list[Turn]]:
    """By the index of the message that is their reply: its turns, one but where replies followed without a word.

    Turns whose reply is none of the messages are left out. Files of older runs do not tell the place of a turn: there
    the last replies were the sampled ones, as long as there was one conversation only; of several nothing is said.
    """
    found: dict[int, list[Turn]] = {}
    if any(turn.message is not None for turn in turns):
        for turn in turns:
            if turn.message is not None:
                found.setdefault(turn.message, []).append(turn)
        return found
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if len(replies) < len(turns) or (turns and messages[0] in messages[1:]):
        return {}
    return {index: [turn] for index, turn in zip(replies[len(replies) - len(turns) :], turns, strict=True)}
