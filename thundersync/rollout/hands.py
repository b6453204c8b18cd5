"""How an agent acts: what its reply asks for, done in its sandbox, and what the policy is told of it.

Place in the flow: between the turns of a rollout (`turns.Conversation`, which samples, records and stops) and its
sandbox. Three kinds: a shell here, a shell for repairs here too, and a terminal (`terminal_hands`). Knows nothing of
tokens, limits of a rollout, or rewards.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from msgspec import Struct

from sandboxes.base import Command, Result, Sandbox
from thundersync.core.types import Message
from thundersync.rollout.protocol import Action, NoAction, clip, correction, observation, parse_reply

COMMAND_ENV: Mapping[str, str] = {
    # For programs that would wait for a key, or fill the context with progress bars.
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "LESS": "-R",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "DEBIAN_FRONTEND": "noninteractive",
}
SUBMISSION = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""A repair's command that prints this first, and succeeds, ends its rollout; as in mini-swe-agent."""
REPAIR_LABEL = "mswea_bash_command"
"""What mini-swe-agent calls its blocks; a policy that was trained with it may go on doing so."""


class Told(Struct, frozen=True, kw_only=True):
    """What came of an action."""

    message: Message
    """To the policy; its content is empty where nothing was done."""
    exit_code: int | None = None
    """None: nothing was run that has one."""
    submitted: bool = False
    """The agent is done."""


class Hands(Protocol):
    """One rollout's. Every call of `act` follows one of `read`."""

    def read(self, reply: str) -> Action | NoAction:
        """What a reply asks for."""

    def correct(self, why: NoAction) -> str:
        """What is answered to a reply that asks for nothing."""

    async def act(self, action: Action, *, limit_s: float) -> Told:
        """Do it, within `limit_s`. Raises: SandboxError."""


class ShellHands:
    """Each action is a script in a shell of its own; `submit` on its last line ends the rollout.

    `tools`: the model's template has tools, and a call of one counts as an action too.
    """

    def __init__(self, sandbox: Sandbox, *, tools: bool, limit_chars: int, labels: tuple[str, ...] = ()) -> None:
        """`labels` name blocks besides the ordinary ones."""
        self._sandbox = sandbox
        self._tools = tools
        self._limit_chars = limit_chars
        self._labels = labels

    def read(self, reply: str) -> Action | NoAction:
        return parse_reply(reply, tools=self._tools, labels=self._labels)

    def correct(self, why: NoAction) -> str:
        return correction(why)

    async def act(self, action: Action, *, limit_s: float) -> Told:
        role: Literal["user", "tool"] = "tool" if action.via == "tool" else "user"
        if not action.command:
            return Told(message=Message(role=role, content=""), submitted=action.submit)
        result = await self._run(action.command, limit_s)
        text = (result.stdout + result.stderr).decode(errors="replace")
        told = self._said(text, result, limit_s)
        return Told(
            message=Message(role=role, content=told),
            exit_code=result.exit_code,
            submitted=action.submit or self._submits(text, result),
        )

    async def _run(self, script: str, limit_s: float) -> Result:
        return await self._sandbox.run(
            Command(
                # One stream, in the order in which it was written, as a terminal shows it. On the first line, so that
                # bash counts the lines of its messages as the model wrote them.
                script="exec 2>&1; " + script,
                timeout_s=limit_s,
                env=dict(COMMAND_ENV),
                # A character has up to 4 bytes: so much that what the sandbox drops lies within what is cut here.
                output_limit_bytes=max(65536, 8 * self._limit_chars),
            )
        )

    def _said(self, text: str, result: Result, limit_s: float) -> str:
        return observation(
            text,
            exit_code=result.exit_code,
            limit_chars=self._limit_chars,
            cut_bytes=result.stdout_cut_bytes + result.stderr_cut_bytes,
            timed_out_s=limit_s if result.timed_out else None,
            oom=result.oom_killed,
        )

    def _submits(self, text: str, result: Result) -> bool:
        return False


class RepairHands(ShellHands):
    """The same for repairs, in the manner of mini-swe-agent: a command submits, and results say their return code.

    What is submitted is the change in the repository, whatever the command prints.
    """

    def __init__(self, sandbox: Sandbox, *, tools: bool, limit_chars: int) -> None:
        super().__init__(sandbox, tools=tools, limit_chars=limit_chars, labels=(REPAIR_LABEL,))

    def correct(self, why: NoAction) -> str:
        return (
            f"Your reply {why.reason}. Answer with exactly one block:\n```bash\n<commands>\n```\n"
            f"When the repair is done, the block is `echo {SUBMISSION}`."
        )

    def _said(self, text: str, result: Result, limit_s: float) -> str:
        cut_bytes = result.stdout_cut_bytes + result.stderr_cut_bytes
        body = clip(text.rstrip("\n"), limit_chars=self._limit_chars, cut_bytes=cut_bytes)
        late = f"[stopped after {limit_s:g} s]\n" if result.timed_out else ""
        killed = "[killed: out of memory]\n" if result.oom_killed else ""
        return f"{late}{killed}<returncode>{result.exit_code}</returncode>\n<output>\n{body}\n</output>"

    def _submits(self, text: str, result: Result) -> bool:
        first = text.lstrip().split("\n", 1)[0].strip()
        return first == SUBMISSION and result.exit_code == 0 and not result.timed_out
