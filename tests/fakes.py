"""Fakes of the run's outer parts, each keeping its protocol's promises: tokenizer, engine, sandboxes.

They are for tests of what stands between those parts. Real parts have the same contracts tested in their own suites.

    runtime = FakeRuntime(verdict=b"1\\n")
    generator = FakeGenerator(turns("```bash\\nls\\n```", "```bash\\nsubmit\\n```"))
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct

from sandboxes.base import Command, Origin, Result, SandboxSpec
from sandboxes.errors import FileMissing, FileTooLarge, SandboxGone
from thundersync.core.types import Checker, FinishReason, Image, Task
from thundersync.errors import EngineDied, EngineFailed, PublishFailed, TeacherFailed
from thundersync.generate.base import EngineStats, Generation, Sampling, TokenScores, WeightArena
from thundersync.monitor.events import AnyEvent


class ByteTokenizer:
    """A ChatML tokenizer whose ids are bytes, then 256 `<|im_start|>` and 257 `<|im_end|>` (its EOS)."""

    SPECIAL: ClassVar[dict[str, int]] = {"<|im_start|>": 256, "<|im_end|>": 257}
    eos_token = "<|im_end|>"
    eos_token_id = 257
    all_special_ids: ClassVar[list[int]] = [256, 257]

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
    ) -> str:
        assert not tokenize
        said = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in conversation)
        return said + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        while text:
            for special, special_id in self.SPECIAL.items():
                if text.startswith(special):
                    ids.append(special_id)
                    text = text[len(special) :]
                    break
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        names = {} if skip_special_tokens else {value: key.encode() for key, value in self.SPECIAL.items()}
        return b"".join(bytes([each]) if each < 256 else names.get(each, b"") for each in token_ids).decode(
            errors="replace"
        )


class Asked(Struct, frozen=True, kw_only=True):
    """One call of `FakeGenerator.generate`."""

    prompt_ids: list[int]
    sampling: Sampling
    request_id: str

    @property
    def rollout_id(self) -> str:
        return self.request_id.split("/")[0]

    @property
    def attempt(self) -> int:
        return int(self.request_id.split("/")[1])

    @property
    def turn(self) -> int:
        return int(self.request_id.split("/")[2])


class Reply(Struct, frozen=True, kw_only=True):
    """What a fake engine says. With finish reason `stop` the EOS is sampled too, unless `ended` is False."""

    text: str
    finish_reason: FinishReason = "stop"
    ended: bool = True
    before: Callable[[], Any] | None = None
    """Called (and awaited, if it gives something to await) before the reply is given: a gate, or a clock to move."""


class AskedScore(Struct, frozen=True, kw_only=True):
    """One call of `FakeGenerator.score`, or of `FakeTeacher.score`, which has no request id."""

    token_ids: list[int]
    start: int
    topk: int
    request_id: str = ""

    @property
    def scored_ids(self) -> list[int]:
        return self.token_ids[self.start :]


def fake_scores(asked: AskedScore, *, policy_version: int = 0, logprob: float = -0.25) -> TokenScores:
    """Every token `logprob`; its alternatives are itself and the ids after it, each one less probable by 1."""
    ranks = range(asked.topk)
    return TokenScores(
        logprobs=[logprob] * len(asked.scored_ids),
        top_ids=[[token + rank for rank in ranks] for token in asked.scored_ids] if asked.topk else [],
        top_logprobs=[[logprob - rank for rank in ranks] for _ in asked.scored_ids] if asked.topk else [],
        policy_version=policy_version,
    )


Script = Callable[[Asked], "Reply | Generation | Exception"]


def turns(*replies: "str | Reply | Generation | Exception") -> Script:
    """A script that gives the same replies in every rollout, one a turn; more turns than replies is an error."""

    def script(asked: Asked) -> "Reply | Generation | Exception":
        reply = replies[asked.turn]
        return Reply(text=reply) if isinstance(reply, str) else reply

    return script


class FakeGenerator:
    """A `Generator` that says what a script tells it to. `asked` records every request, `scored` every score."""

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Any = None,
        name: str = "fake",
        policy_version: int = 0,
        max_concurrency: int = 8,
        max_model_len: int = 1 << 20,
        logprob: float = -0.5,
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer or ByteTokenizer()
        self.asked: list[Asked] = []
        self.scored: list[AskedScore] = []
        self.score_gate: asyncio.Event | None = None
        """Where set, scores wait for it."""
        self.failing: list[EngineFailed] = []
        """Raised by the next scores, one each."""
        self.aborted: list[str] = []
        self.running = 0
        self.most_running = 0
        self.dead = False
        self.closed = False
        self.published: list[int] = []
        self._name = name
        self._version = policy_version
        self._max_concurrency = max_concurrency
        self._max_model_len = max_model_len
        self._logprob = logprob
        self._sampled_tokens = 0
        self._prompt_tokens = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_concurrency(self) -> int:
        return self._max_concurrency

    async def start(self) -> None:
        self._version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        if self.dead or self.closed:
            raise EngineDied("the fake engine is dead")
        asked = Asked(prompt_ids=list(prompt_ids), sampling=sampling, request_id=request_id)
        self.asked.append(asked)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(asked)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            self.running -= 1

    async def _answer(self, asked: Asked) -> Generation:
        await asyncio.sleep(0)
        room = self._max_model_len - len(asked.prompt_ids)
        if room < 1:
            return self._generation([], "context")
        reply = self.script(asked)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Generation):
            return reply
        if reply.before is not None:
            waiting = reply.before()
            if waiting is not None:
                await waiting
        ids = self.tokenizer.encode(reply.text, add_special_tokens=False)
        if reply.finish_reason == "stop" and reply.ended:
            ids.append(self.tokenizer.eos_token_id)
        finish: FinishReason = reply.finish_reason
        for limit, reason in ((asked.sampling.max_tokens, "length"), (room, "context")):
            if len(ids) > limit:
                ids, finish = ids[:limit], reason  # type: ignore[assignment]
        self._prompt_tokens += len(asked.prompt_ids)
        self._sampled_tokens += len(ids)
        return self._generation(ids, finish)

    def _generation(self, ids: list[int], finish: FinishReason) -> Generation:
        return Generation(
            token_ids=ids, logprobs=[self._logprob] * len(ids), finish_reason=finish, policy_version=self._version
        )

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        if self.dead or self.closed:
            raise EngineDied("the fake engine is dead")
        asked = AskedScore(token_ids=list(token_ids), start=start, topk=topk, request_id=request_id)
        self.scored.append(asked)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if self.score_gate is not None:
                await self.score_gate.wait()
            if self.failing:
                raise self.failing.pop(0)
            return fake_scores(asked, policy_version=self._version)
        finally:
            self.running -= 1

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        if self.running:
            raise PublishFailed(f"{self.running} requests are in flight")
        self._version = version
        self.published.append(version)
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running,
            busy_s=0.0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            sampled_tokens=self._sampled_tokens,
        )

    async def close(self) -> None:
        self.closed = True


class FakeTeacher:
    """A `Teacher` that gives `fake_scores`, or what `answer` gives: scores, or an exception to raise.

    `scored` records every request. Where `gate` is set, scores wait for it.
    """

    def __init__(
        self,
        name: str = "fake teacher",
        *,
        answer: Callable[[AskedScore], "TokenScores | Exception"] = fake_scores,
    ) -> None:
        self.scored: list[AskedScore] = []
        self.gate: asyncio.Event | None = None
        self.started = False
        self.closed = False
        self.payload_bytes = 0
        self._name = name
        self._answer = answer

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> list[str]:
        self.started = True
        return [f"{self._name} has started"]

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0) -> TokenScores:
        if self.closed:
            raise TeacherFailed(f"{self._name} is closed")
        asked = AskedScore(token_ids=list(token_ids), start=start, topk=topk)
        self.scored.append(asked)
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        answer = self._answer(asked)
        if isinstance(answer, Exception):
            raise answer
        self.payload_bytes += answer.nbytes
        return answer

    async def close(self) -> None:
        self.closed = True


def done(stdout: bytes = b"", **fields: Any) -> Result:
    """A command's result; exit code 0 unless given."""
    return Result(**{"exit_code": 0, "stdout": stdout, "stderr": b"", **fields})


Shell = Callable[["FakeSandbox", Command], Any]
"""Answers a command: a Result, an exception to raise, or something to await that gives a Result."""


class FakeSandbox:
    """A `Sandbox` with a dict for a file tree. Commands as root that clear the checker's folders really do.

    `failing` maps a method's name to the exception it raises.
    """

    def __init__(self, runtime: "FakeRuntime", spec: SandboxSpec, sandbox_id: str) -> None:
        self.spec = spec
        self.files: dict[str, bytes] = {}
        self.commands: list[Command] = []
        self.calls: list[str] = []
        self.closed = False
        self._runtime = runtime
        self._sandbox_id = sandbox_id

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def origin(self) -> Origin:
        return Origin(image=f"sha256:{self.spec.image}" if self.spec.image else "")

    async def run(self, command: Command) -> Result:
        await self._called("run")
        self.commands.append(command)
        if command.user == "root" and "rm -rf" in command.script:
            for path in [each for each in self.files if each.startswith(("/logs/verifier/", "/tests/"))]:
                del self.files[path]
            return done()
        answer = self._runtime.answer(self, command)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Result) else await answer

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._called("write")
        self.files[path] = data

    async def read(self, path: str, *, limit_bytes: int = 1 << 24) -> bytes:
        await self._called("read")
        if path not in self.files:
            raise FileMissing(f"no file at {path}")
        if len(self.files[path]) > limit_bytes:
            raise FileTooLarge(f"{path} is larger than {limit_bytes} bytes")
        return self.files[path]

    async def put_tree(self, source: Path, target: str) -> None:
        await self._called("put_tree")
        self.files.update(_tree(source, target))

    async def kill_all(self) -> None:
        await self._called("kill_all")

    async def close(self) -> None:
        if self.closed:
            return
        self.calls.append("close")
        await self._runtime.before_close()
        self.closed = True
        if "close" in self._runtime.failing:
            raise self._runtime.failing["close"]

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.closed:
            raise SandboxGone(self._sandbox_id, "closed")
        if name in self._runtime.failing:
            raise self._runtime.failing[name]


def _tree(source: Path, target: str) -> dict[str, bytes]:
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    return {f"{target}/{path.relative_to(source)}": path.read_bytes() for path in paths}


class FakeRuntime:
    """A `Runtime` of fake sandboxes.

    `shell` answers the agent's commands (default: exit 0, no output), `checker` the checker's (default: writes
    `verdict` to reward.txt). `failing` maps a method's name, of the runtime or its sandboxes, to what it raises.
    `sandboxes` holds every sandbox ever started.
    """

    def __init__(
        self,
        *,
        verdict: bytes = b"1\n",
        shell: Shell | None = None,
        checker: Shell | None = None,
        failing: Mapping[str, Exception] | None = None,
    ) -> None:
        self._shell: Shell = shell or (lambda sandbox, command: done())
        self._checker: Shell = checker or (lambda sandbox, command: self._judge(sandbox, verdict))
        self.failing = dict(failing or {})
        self.sandboxes: list[FakeSandbox] = []
        self.prepared: list[SandboxSpec] = []
        self.start_gate: asyncio.Event | None = None
        """Where set, starting a sandbox waits for it."""
        self.closing = asyncio.Event()
        """Set when the first sandbox begins to close."""
        self.close_gate: asyncio.Event | None = None
        """Where set, closing a sandbox waits for it."""

    @property
    def name(self) -> str:
        return "fake"

    @property
    def isolation(self) -> str:
        return "none: nothing runs"

    @property
    def outage_limit_s(self) -> float:
        return 0.0

    @property
    def open(self) -> list[FakeSandbox]:
        """Sandboxes that nobody closed."""
        return [sandbox for sandbox in self.sandboxes if not sandbox.closed]

    async def check(self) -> None:
        self._raise("check")

    async def prepare(self, spec: SandboxSpec) -> None:
        self._raise("prepare")
        self.prepared.append(spec)

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        await asyncio.sleep(0)
        if self.start_gate is not None:
            await self.start_gate.wait()
        self._raise("start")
        sandbox = FakeSandbox(self, spec, f"fake-{len(self.sandboxes)}")
        self.sandboxes.append(sandbox)
        return sandbox

    async def reap(self, labels: Mapping[str, str]) -> int:
        return 0

    async def close(self) -> None:
        for sandbox in self.open:
            await sandbox.close()

    def answer(self, sandbox: FakeSandbox, command: Command) -> Any:
        """What a command run by the agent, or as root by the checker, comes to (see `Shell`)."""
        return (self._checker if command.user == "root" else self._shell)(sandbox, command)

    async def before_close(self) -> None:
        self.closing.set()
        if self.close_gate is not None:
            await self.close_gate.wait()

    def _judge(self, sandbox: FakeSandbox, verdict: bytes) -> Result:
        sandbox.files["/logs/verifier/reward.txt"] = verdict
        return done()

    def _raise(self, name: str) -> None:
        if name in self.failing:
            raise self.failing[name]


class FakeClock:
    """Monotonic seconds that move only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Feed(list[AnyEvent]):
    """An `emit` that keeps what it gets."""

    def __call__(self, event: AnyEvent) -> None:
        self.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.__struct_config__.tag for event in self]  # type: ignore[misc]


def a_task(
    task_id: str = "task", *, tests: Path | str = "/nonexistent", instruction: str = "Do it.", **fields: Any
) -> Task:
    """A task whose checker a fake sandbox can run; `fields` as in `Task`."""
    return Task(
        **{
            "task_id": task_id,
            "suite": "fake",
            "instruction": instruction,
            "image": Image(name="fake"),
            "checker": Checker(tests=str(tests)),
            **fields,
        }
    )
