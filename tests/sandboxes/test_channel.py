"""The channel against an agent that is slow, dead, or talks nonsense; a fake carrier stands for the pipes."""

import asyncio
import struct

import pytest

from sandboxes.channel import Channel
from sandboxes.errors import FileMissing, FileRefused, FileTooLarge, SandboxGone


class FakeCarrier:
    """Answers each message with the next of `answers`; silent when there is none."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.sent = b""

    async def read(self) -> bytes:
        if not self.answers:
            await asyncio.Event().wait()
        return self.answers.pop(0)

    async def write(self, data: bytes) -> None:
        self.sent += data

    async def complaint(self) -> str:
        return "out of memory"


def frame(*fields: bytes) -> bytes:
    return struct.pack(">I", len(fields)) + b"".join(struct.pack(">I", len(field)) + field for field in fields)


async def test_fields_go_out_and_come_back_whatever_the_pieces() -> None:
    answer = frame(b"ok", b"\x00" * 10, b"")
    carrier = FakeCarrier(*(answer[i : i + 3] for i in range(0, len(answer), 3)))
    fields = await Channel(carrier, "box-1").call(["run", 7, "é", b"\xff"], deadline_s=10)
    assert fields == [b"\x00" * 10, b""]
    assert carrier.sent == frame(b"run", b"7", "é".encode(), b"\xff")


async def test_large_fields_are_sent_in_pieces_and_arrive_whole() -> None:
    carrier = FakeCarrier(frame(b"ok"))
    big = bytes(range(256)) * 4096
    await Channel(carrier, "box-1").call(["write", big, "after"], deadline_s=10)
    assert carrier.sent == frame(b"write", big, b"after")


async def test_halves_of_surrogate_pairs_become_question_marks() -> None:
    carrier = FakeCarrier(frame(b"ok"))
    await Channel(carrier, "box-1").call(["a\ud83db"], deadline_s=10)
    assert carrier.sent == frame(b"a?b")


@pytest.mark.parametrize(
    ("code", "kind"),
    [(b"ENOENT", FileMissing), (b"EFBIG", FileTooLarge), (b"ENOSPC", FileRefused), (b"EACCES", FileRefused)],
)
async def test_refusals_become_typed_errors_and_the_channel_lives_on(code: bytes, kind: type[Exception]) -> None:
    channel = Channel(FakeCarrier(frame(b"os", code, b"why"), frame(b"ok", b"fine")), "box-1")
    with pytest.raises(kind, match="why"):
        await channel.call(["read"], deadline_s=10)
    assert await channel.call(["read"], deadline_s=10) == [b"fine"]


async def test_a_dead_agent_is_told_with_its_last_words() -> None:
    channel = Channel(FakeCarrier(frame(b"ok")[:6], b""), "box-1")
    with pytest.raises(SandboxGone, match=r"box-1.*out of memory"):
        await channel.call(["run"], deadline_s=10)
    with pytest.raises(SandboxGone, match="out of memory"):
        await channel.call(["run"], deadline_s=10)


async def test_a_late_answer_is_never_taken_for_the_next_one() -> None:
    carrier = FakeCarrier()
    channel = Channel(carrier, "box-1")
    with pytest.raises(SandboxGone, match="did not answer"):
        await channel.call(["first"], deadline_s=0.01)
    carrier.answers.append(frame(b"ok", b"the first answer"))
    with pytest.raises(SandboxGone, match="did not answer"):
        await channel.call(["second"], deadline_s=10)


async def test_a_cancelled_call_ends_the_channel() -> None:
    channel = Channel(FakeCarrier(), "box-1")
    call = asyncio.create_task(channel.call(["run"], deadline_s=10))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(SandboxGone, match="out of step"):
        await channel.call(["run"], deadline_s=10)


@pytest.mark.parametrize("answer", [frame(b"what"), frame(), b"\xff" * 64], ids=["kind", "empty", "length"])
async def test_nonsense_ends_the_channel(answer: bytes) -> None:
    channel = Channel(FakeCarrier(answer), "box-1")
    with pytest.raises(SandboxGone):
        await channel.call(["run"], deadline_s=10)
    assert channel.broken
