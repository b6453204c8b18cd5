"""Sessions and terminals over every kind of sandbox."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from sandboxes import Command, RuntimeUnavailable, Sandbox, SandboxGone, ShellSession, Terminal


async def told(session: ShellSession, script: str, **settings: object) -> bytes:
    return (await session.run(Command(script=script, **settings))).stdout  # type: ignore[arg-type]


async def test_folder_variables_and_functions_survive(fresh: Sandbox) -> None:
    session = ShellSession(fresh)
    script = (
        "mkdir -p 'a b'; cd 'a b'; X='one  \"two\"'; export Y=$'line\\nbreak'; Z=(1 '2 3'); declare -A M=([k]='v w')"
    )
    first = await session.run(Command(script=script + '; f() { echo "f $1"; }; umask 077'))
    assert (first.exit_code, first.stdout, first.stderr) == (0, b"", b"")
    result = await told(session, 'pwd; echo "$X"; env | grep -A1 ^Y=; echo ${#Z[@]} "${Z[1]}" "${M[k]}"; f x')
    assert result == b'/workspace/a b\none  "two"\nY=line\nbreak\n2 2 3 v w\nf x\n'


@pytest.mark.parametrize(
    "script", ["X=2; exit 3", "X=2; false", "X=2; set -e; false", "X=2; trap 'true' EXIT", "IFS=,; X=2; set -u"]
)
async def test_however_a_command_ends_its_session_goes_on(fresh: Sandbox, script: str) -> None:
    session = ShellSession(fresh)
    await told(session, "X=1; cd /tmp")
    await told(session, script)
    assert await told(session, "pwd; echo $X $UNSET") == b"/tmp\n2\n"


@pytest.mark.parametrize("script", ["X=2; kill -9 $$", "X=2; exec true", "X=2; if", "X=2; sleep 1000"])
async def test_what_cannot_be_saved_leaves_the_session_as_it_was(fresh: Sandbox, script: str) -> None:
    session = ShellSession(fresh)
    await told(session, "X=1; cd /tmp")
    await told(session, script, timeout_s=1.0)
    assert await told(session, "pwd; echo $X") == b"/tmp\n1\n"


async def test_exit_codes_streams_stdin_and_settings_are_the_commands_own(fresh: Sandbox) -> None:
    session = ShellSession(fresh)
    command = Command(script="pwd; cat; echo $E; echo err >&2; exit 7", stdin=b"fed\n", env={"E": "a'b"}, cwd="/tmp")
    result = await session.run(command)
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"/tmp\nfed\na'b\n", b"err\n")
    assert (await session.run(Command(script="true", cwd="/none"))).exit_code == 126
    assert (await session.run(Command(script="echo 'it''s'; false"))).exit_code == 1


async def test_sessions_of_one_sandbox_are_strangers(fresh: Sandbox) -> None:
    one, other = ShellSession(fresh), ShellSession(fresh)
    await told(one, "X=1; cd /tmp")
    assert await told(other, "pwd; echo [$X]") == b"/workspace\n[]\n"


@pytest.fixture
async def terminal(fresh: Sandbox) -> AsyncIterator[Terminal]:
    terminal = Terminal(fresh, columns=80, rows=24)
    try:
        await terminal.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"TERMINAL TESTS DO NOT RUN: {error}")
    yield terminal


async def shows(terminal: Terminal, text: str) -> str:
    """Wait until the screen shows `text`: only the program in it knows when."""
    async with asyncio.timeout(30):
        while text not in (screen := await terminal.screen()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return screen


async def test_keys_go_in_and_the_screen_comes_out(terminal: Terminal) -> None:
    await terminal.press(["echo $((6*7)) answers", "Enter"])
    await shows(terminal, "42 answers")
    await terminal.press(["cd /tmp; sleep 1000", "Enter"])
    await terminal.press(["C-c"])
    await terminal.press(["echo in $PWD ${COLUMNS}x$LINES", "Enter"])
    await shows(terminal, "in /tmp 80x24")


async def test_text_is_typed_as_it_is_and_history_is_kept(terminal: Terminal) -> None:
    await terminal.type(
        "cat > typed <<'END'\nEnter C-c 'quotes' $HOME ü\n" + "y" * 20_000 + "\nEND\nwc -c typed; seq 200\n"
    )
    screen = await shows(terminal, "199\n200\n")
    assert "20029 typed" not in screen
    assert "20029 typed" in await terminal.screen(with_history=True)


async def test_a_program_with_a_screen_of_its_own_is_seen(terminal: Terminal) -> None:
    await terminal.type("seq 100 > n; printf '\\033[2J\\033[5;10Hhere'; cat\n")
    screen = await shows(terminal, " " * 9 + "here")  # the command line, which has the word too, is gone then
    assert screen.splitlines()[4].startswith(" " * 9 + "here")


async def test_another_command_or_a_closed_terminal_ends_its_programs(fresh: Sandbox, terminal: Terminal) -> None:
    await fresh.run(Command(script="true"))
    with pytest.raises(SandboxGone, match="terminal"):
        await terminal.screen()
    again = Terminal(fresh)
    await again.start()
    await again.close()
    with pytest.raises(SandboxGone, match="terminal"):
        await again.press(["x"])


async def test_a_sandbox_without_tmux_says_so(fresh: Sandbox) -> None:
    class Bare:
        """The same sandbox, where no program is found."""

        sandbox_id = fresh.sandbox_id

        async def run(self, command: Command) -> object:
            return await fresh.run(Command(script="PATH=/none; " + command.script))

    with pytest.raises(RuntimeUnavailable, match="tmux"):
        await Terminal(Bare()).start()  # type: ignore[arg-type]
