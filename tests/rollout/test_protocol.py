"""What a reply means and what a command's result is told as."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.rollout.protocol import Action, NoAction, clip, correction, observation, parse_reply


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("```bash\nls\n```", Action(command="ls")),
        ("I look first.\n\n```sh\nls -l\ncat x\n```\nThen I go on.", Action(command="ls -l\ncat x")),
        ("```\nls\n```", Action(command="ls")),
        ("```BASH  \nls\n```  ", Action(command="ls")),
        ("```bash\nls\n```", Action(command="ls")),
        ("```bash\nsubmit\n```", Action(command="", submit=True)),
        ("```bash\ntouch x\n  submit \n\n```", Action(command="touch x", submit=True)),
        ("```bash\nsubmit\nls\n```", Action(command="submit\nls")),
        ("```bash\necho submit\n```", Action(command="echo submit")),
        ("```python\nprint()\n```\n```bash\nls\n```", Action(command="ls")),
        (
            "````bash\ncat > a.md <<'E'\n```python\nx\n```\nE\n````",
            Action(command="cat > a.md <<'E'\n```python\nx\n```\nE"),
        ),
        ("```bash\n  indented\n```", Action(command="  indented")),
        ("   ```bash\nls\n   ```", Action(command="ls")),
    ],
)
def test_a_reply_with_one_block_acts(reply: str, action: Action) -> None:
    assert parse_reply(reply) == action


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "held no"),
        ("ls", "held no"),
        ("submit", "held no"),
        ("Run `ls` please", "held no"),
        ("```python\nprint()\n```", "held no"),
        ("```bash ls```", "held no"),
        ("```bash\nls\n", "did not close"),
        ("```bash\nls", "did not close"),
        ("```bash\nls\n```\n```bash\npwd\n```", "held 2 blocks"),
        ("```bash\n\n```", "held an empty block"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "held no"),
    ],
)
def test_a_reply_without_exactly_one_block_does_not_act_and_is_told_why(reply: str, reason: str) -> None:
    why = parse_reply(reply)
    assert isinstance(why, NoAction) and why.reason.startswith(reason)
    said = correction(why)
    assert said.startswith(f"Your reply {why.reason}. Answer with exactly one block")
    assert isinstance(parse_reply(said), Action)  # the example in it is a block that parses


def call(body: object) -> str:
    return f"<tool_call>\n{body if isinstance(body, str) else json.dumps(body)}\n</tool_call>"


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (call({"name": "bash", "arguments": {"command": "ls"}}), Action(command="ls", via="tool")),
        (
            "Let me look.\n" + call({"name": "bash", "arguments": {"command": "ls\nsubmit"}, "id": 1}),
            Action(command="ls", submit=True, via="tool"),
        ),
        (call({"name": "bash", "arguments": json.dumps({"command": "ls"})}), Action(command="ls", via="tool")),
        (call({"name": "bash", "arguments": {"command": "echo '```'"}}), Action(command="echo '```'", via="tool")),
        ("```bash\nls\n```", Action(command="ls")),
    ],
)
def test_a_tool_call_acts_where_the_template_has_tools(reply: str, action: Action) -> None:
    assert parse_reply(reply, tools=True) == action


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (call("{not json"), "made a tool call that cannot be read"),
        (call({"name": "bash"}), "made a tool call that cannot be read"),
        (call({"name": "bash", "arguments": {"command": 3}}), "made a tool call that cannot be read"),
        (call({"name": "python", "arguments": {"command": "ls"}}), "called the tool 'python'"),
        (call({"name": "bash", "arguments": {"command": ""}}), "held an empty block"),
        (call({"name": "bash", "arguments": {"command": "ls"}}) * 2, "made 2 tool calls"),
        ('<tool_call>{"name": "bash"', "did not close its <tool_call>"),
        pytest.param(call('{"x": ' + "[" * 5000), "made a tool call that cannot be read", id="brackets without end"),
    ],
)
def test_a_tool_call_that_cannot_be_run_is_told_why(reply: str, reason: str) -> None:
    why = parse_reply(reply, tools=True)
    assert isinstance(why, NoAction) and why.reason.startswith(reason)


@given(st.text())
def test_no_reply_breaks_the_parser(reply: str) -> None:
    for tools in (False, True):
        assert isinstance(parse_reply(reply, tools=tools), Action | NoAction)
        assert isinstance(parse_reply("<tool_call>" + reply, tools=tools), Action | NoAction)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (observation("a\nb\n", exit_code=0, limit_chars=100), "a\nb"),
        (observation("", exit_code=0, limit_chars=100), "[no output]"),
        (observation("\n", exit_code=0, limit_chars=100), "[no output]"),
        (observation("no such file\n", exit_code=2, limit_chars=100), "[exit code 2]\nno such file"),
        (observation("", exit_code=1, limit_chars=100), "[exit code 1]"),
        (observation("x", exit_code=137, limit_chars=9, timed_out_s=60.0), "[stopped after 60 s]\nx"),
        (observation("", exit_code=137, limit_chars=9, oom=True), "[killed: out of memory]\n[exit code 137]"),
    ],
)
def test_an_observation_tells_what_matters(said: str, told: str) -> None:
    assert said == told


@given(st.text(max_size=200), st.integers(1, 100))
def test_a_cut_keeps_head_and_tail_and_counts_the_rest_exactly(text: str, limit: int) -> None:
    clipped = clip(text, limit_chars=limit)
    if len(text) <= limit:
        assert clipped == text
        return
    mark = f"\n[... {len(text) - limit} characters cut ...]\n"
    head, tail = (limit + 1) // 2, limit // 2
    assert clipped == text[:head] + mark + text[len(text) - tail :]


def test_what_the_sandbox_dropped_is_told_in_bytes() -> None:
    assert clip("abcdef", limit_chars=4, cut_bytes=9) == "ab\n[... 2 characters and 9 bytes cut ...]\nef"
    assert clip("abcd", limit_chars=9, cut_bytes=9) == "ab\n[... 9 bytes cut ...]\ncd"
