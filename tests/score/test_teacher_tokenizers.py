"""Tokenizers mean the same by every id, or a teacher is refused and the first differences are told: K1 of field.md."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from thundersync.errors import ConfigError, TokenizerMismatch
from thundersync.score.tokenizers import fingerprint, refuse_other_tokenizer, tokenizer_difference


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the tiny tokenizer in `folder` whose file `change` has altered."""
    file = tiny_tokenizer(folder) / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return folder


def swap(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]


def rename(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["<think>"] = vocabulary.pop("<reserved_380>")


def add(content: dict[str, Any]) -> None:
    tool = {"id": 384, "content": "<tool>", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append(tool | {"normalized": False, "special": True})


def unspecial(content: dict[str, Any]) -> None:
    content["added_tokens"][1]["special"] = False


def test_equal_tokenizers_have_one_fingerprint_and_no_difference(tmp_path: Path) -> None:
    left, right = tiny_tokenizer(tmp_path / "left"), tiny_tokenizer(tmp_path / "right")
    assert fingerprint(left) == fingerprint(right)
    assert tokenizer_difference(left, right) is None
    refuse_other_tokenizer(left, right)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (swap, "'A' is id 68 in policy and id 69 in teacher; 'B' is id 69 in policy and id 68 in teacher"),
        (rename, "'<reserved_380>' is id 380 in policy and not a token in teacher; '<think>' is not a token in policy"),
        (add, "'<tool>' is not a token in policy and id 384 in teacher"),
        (unspecial, "'<|im_start|>' is special in policy and text in teacher"),
    ],
)
def test_a_tokenizer_of_another_meaning_is_refused_with_the_differences(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    policy, teacher = tiny_tokenizer(tmp_path / "policy"), changed(tmp_path / "teacher", change)
    assert fingerprint(policy) != fingerprint(teacher)
    with pytest.raises(TokenizerMismatch) as refused:
        refuse_other_tokenizer(policy, teacher)
    assert told in refused.value.message
    assert refused.value.remedy


def test_of_many_differences_the_lowest_ids_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    def shift(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        for token, index in vocabulary.items():
            if index >= 300:
                vocabulary[token] = 300 + (index - 299) % 84

    difference = tokenizer_difference(tiny_tokenizer(tmp_path / "a"), changed(tmp_path / "b", shift))
    assert difference is not None
    assert "is id 300 in a and id 301 in b" in difference
    assert difference.endswith("and 81 more")


def test_what_tokenizes_text_but_names_no_id_does_not_matter(tmp_path: Path) -> None:
    # Base and instruct models of a family differ so: another end of a reply, another template.
    left = tiny_tokenizer(tmp_path / "left")
    right = changed(tmp_path / "right", lambda content: content["model"].update(merges=content["model"]["merges"][:-1]))
    (right / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": "other"}))
    assert tokenizer_difference(left, right) is None


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    good = tiny_tokenizer(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        refuse_other_tokenizer(good, tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        refuse_other_tokenizer(good, tmp_path / "bad")
