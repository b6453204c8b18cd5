"""Do two models mean the same tokens by the same ids? Asked before a teacher's scores are trusted.

A teacher of another vocabulary gives finite, plausible and meaningless numbers, so a difference is refused. Compared is
what an id stands for: the vocabulary and the added tokens, with which of them are special. Merges are not, for a
teacher is given ids and never text; nor which token ends a reply, which base and instruct models of one family do
differently, for a teacher never samples. Reads files of a Hugging Face folder; knows nothing of models.
"""

import hashlib
import json
from pathlib import Path

from msgspec import Struct

from thundersync.errors import ConfigError, TokenizerMismatch

FILE = "tokenizer.json"
DIFFERENCES_TOLD = 3


class Vocabulary(Struct, frozen=True, kw_only=True):
    """What every id of a tokenizer stands for."""

    tokens: dict[str, int]
    """Added tokens included."""
    special: dict[str, bool]
    """Of the added tokens: whether each is special, that is no text."""


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary in a tokenizer's folder. Raises: ConfigError without a readable `tokenizer.json`."""
    # Importing it takes a moment, and only distillation needs it.
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {FILE}, so its tokens cannot be compared",
            remedy="Save it once with AutoTokenizer.from_pretrained(...).save_pretrained(...) and name that folder.",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} cannot be read: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        tokens=tokenizer.get_vocab(with_added_tokens=True),
        special={token.content: token.special for token in added.values()},
    )


def fingerprint(folder: Path) -> str:
    """A hex digest, equal for tokenizers that mean the same by every id. Raises: ConfigError."""
    vocabulary = read_vocabulary(folder)
    content = [sorted(vocabulary.tokens.items()), sorted(vocabulary.special.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def tokenizer_difference(left: Path, right: Path) -> str | None:
    """None when two folders' tokenizers mean the same by every id, else a sentence with the first few differences.

    Raises: ConfigError when one cannot be read.
    """
    ours, theirs = read_vocabulary(left), read_vocabulary(right)
    differences = [
        f"{token!r} is {_id(ours, token)} in {left.name} and {_id(theirs, token)} in {right.name}"
        for token in _differing(ours.tokens, theirs.tokens)
    ] + [
        f"{token!r} is {_kind(ours, token)} in {left.name} and {_kind(theirs, token)} in {right.name}"
        for token in _differing(ours.special, theirs.special)
        if ours.tokens.get(token) == theirs.tokens.get(token)
    ]
    if not differences:
        return None
    told = "; ".join(differences[:DIFFERENCES_TOLD])
    more = len(differences) - DIFFERENCES_TOLD
    return told + (f"; and {more} more" if more > 0 else "")


def refuse_other_tokenizer(policy: Path, teacher: Path) -> None:
    """Raises: TokenizerMismatch unless a teacher's scores are about the policy's tokens; ConfigError as above."""
    difference = tokenizer_difference(policy, teacher)
    if difference is not None:
        raise TokenizerMismatch(
            f"the teacher's tokenizer is not the policy's: {difference}",
            remedy="Take a teacher of the policy's own family, or one whose tokenizer was made equal to it.",
        )


def _differing(left: dict[str, int] | dict[str, bool], right: dict[str, int] | dict[str, bool]) -> list[str]:
    """Keys with another value on the other side, or none; those of the lowest ids first."""
    differing = [key for key in left | right if left.get(key) != right.get(key)]
    return sorted(differing, key=lambda key: (left.get(key, right.get(key, 0)), key))


def _id(vocabulary: Vocabulary, token: str) -> str:
    return f"id {vocabulary.tokens[token]}" if token in vocabulary.tokens else "not a token"


def _kind(vocabulary: Vocabulary, token: str) -> str:
    if token not in vocabulary.special:
        return "not added"
    return "special" if vocabulary.special[token] else "text"
