"""Writes the starter tasks: `thundersync/tasks/starter/{train,eval}/*` as Harbor folders.

The folders are what is shipped and read; this script keeps their tables short, their checkers alike and the two
splits disjoint. Run it after editing: `python tools/make_starter_tasks.py`. It replaces both splits.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STARTER = Path(__file__).resolve().parent.parent / "thundersync" / "tasks" / "starter"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One task: what is asked, what lies in /work, what must be true afterwards."""

    name: str
    level: str
    """easy, medium or hard: as a 135M model finds it."""
    ask: str
    wanted: list[str]
    """Bash conditions; the reward is the share that holds."""
    solution: str
    files: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    """Files of `files` that must still be as they were, or the reward is 0."""


def holds(path: str, text: str) -> str:
    """The condition that a file's text, without its last line end, is exactly `text`."""
    return f'[ -f {path} ] && [ "$(cat {path})" = {quoted(text)} ]'


def quoted(text: str) -> str:
    text = text.rstrip("\n")
    return "$'" + text.replace("'", "\\'").replace("\n", "\\n") + "'" if "\n" in text else f'"{text}"'


# Kinds of task. Each takes the sentence that asks, so that train and eval can word it differently.


def folder(ask: str, *names: str) -> Spec:
    return Spec(
        name="folder-" + "-".join(names),
        level="easy" if len(names) == 1 else "medium",
        ask=ask,
        wanted=[f"[ -d {name} ]" for name in names],
        solution="mkdir " + " ".join(names),
    )


def nested(ask: str, outer: str, inner: str) -> Spec:
    return Spec(
        name=f"nested-{outer}-{inner}",
        level="medium",
        ask=ask,
        # The outer folder alone is half of the way.
        wanted=[f"[ -d {outer} ]", f"[ -d {outer}/{inner} ]"],
        solution=f"mkdir -p {outer}/{inner}",
    )


def empty(ask: str, *names: str) -> Spec:
    return Spec(
        name="empty-" + "-".join(stem(name) for name in names),
        level="easy" if len(names) == 1 else "medium",
        ask=ask,
        wanted=[f"[ -f {name} ] && [ ! -s {name} ]" for name in names],
        solution="touch " + " ".join(names),
    )


def write(ask: str, **texts: str) -> Spec:
    """`texts` maps a file's stem to its text; every file ends in .txt."""
    return Spec(
        name="write-" + "-".join(texts),
        level="easy" if len(texts) == 1 else "medium",
        ask=ask,
        wanted=[holds(f"{name}.txt", text) for name, text in texts.items()],
        solution="\n".join(f'echo "{text}" > {name}.txt' for name, text in texts.items()),
    )


def delete(ask: str, *names: str, keep: str) -> Spec:
    files = {name: f"text of {stem(name)}\n" for name in (*names, keep)}
    return Spec(
        name="delete-" + "-".join(stem(name) for name in names),
        level="easy" if len(names) == 1 else "medium",
        ask=ask,
        wanted=[f"[ ! -e {name} ]" for name in names],
        solution="rm " + " ".join(names),
        files=files,
        kept=[keep],
    )


def rename(ask: str, old: str, new: str, text: str) -> Spec:
    return Spec(
        name=f"rename-{stem(old)}-{stem(new)}",
        level="easy",
        ask=ask,
        wanted=[f"[ ! -e {old} ] && {holds(new, text)}"],
        solution=f"mv {old} {new}",
        files={old: text + "\n"},
    )


def copy(ask: str, old: str, new: str, text: str) -> Spec:
    return Spec(
        name=f"copy-{stem(old)}-{stem(new)}",
        level="easy",
        ask=ask,
        wanted=[holds(new, text)],
        solution=f"cp {old} {new}",
        files={old: text + "\n"},
        kept=[old],
    )


def move(ask: str, name: str, target: str, text: str) -> Spec:
    return Spec(
        name=f"move-{stem(name)}-{target}",
        level="easy",
        ask=ask,
        wanted=[f"[ ! -e {name} ] && {holds(f'{target}/{name}', text)}"],
        solution=f"mv {name} {target}/",
        files={name: text + "\n", f"{target}/index.txt": "index\n"},
    )


def append(ask: str, name: str, old: str, new: str) -> Spec:
    return Spec(
        name=f"append-{stem(name)}-{new}",
        level="medium",
        ask=ask,
        wanted=[holds(name, f"{old}\n{new}")],
        solution=f'echo "{new}" >> {name}',
        files={name: old + "\n"},
    )


def count(ask: str, name: str, target: str, lines: Sequence[str]) -> Spec:
    return Spec(
        name=f"count-{stem(name)}",
        level="medium",
        ask=ask,
        # `wc -l FILE` writes the file's name too: half of what was asked.
        wanted=[
            f'read -r first rest < {target} && [ "$first" = {len(lines)} ]',
            f'[ "$(cat {target})" = {len(lines)} ]',
        ],
        solution=f"wc -l < {name} > {target}",
        files={name: "\n".join(lines) + "\n"},
        kept=[name],
    )


def sort(ask: str, name: str, target: str, lines: Sequence[str]) -> Spec:
    return Spec(
        name=f"sort-{stem(name)}",
        level="medium",
        ask=ask,
        wanted=[holds(target, "\n".join(sorted(lines)))],
        solution=f"sort {name} > {target}",
        files={name: "\n".join(lines) + "\n"},
        kept=[name],
    )


def pick(ask: str, name: str, target: str, word: str, lines: Sequence[str]) -> Spec:
    return Spec(
        name=f"pick-{stem(name)}-{word}",
        level="hard",
        ask=ask,
        wanted=[holds(target, "\n".join(line for line in lines if word in line))],
        solution=f"grep {word} {name} > {target}",
        files={name: "\n".join(lines) + "\n"},
        kept=[name],
    )


def replace(ask: str, name: str, old: str, new: str, text: str) -> Spec:
    return Spec(
        name=f"replace-{old}-{new}",
        level="hard",
        ask=ask,
        wanted=[holds(name, text.replace(old, new))],
        solution=f"sed -i 's/{old}/{new}/g' {name}",
        files={name: text + "\n"},
    )


def executable(ask: str, name: str) -> Spec:
    text = "#!/bin/bash\necho ready"
    return Spec(
        name=f"executable-{stem(name)}",
        level="medium",
        ask=ask,
        wanted=[f"[ -x {name} ] && {holds(name, text)}"],
        solution=f"chmod +x {name}",
        files={name: text + "\n"},
    )


def stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


TRAIN: list[Spec] = [
    folder("Create a folder named reports.", "reports"),
    folder("Create a folder named photos.", "photos"),
    folder("Create a folder named backup.", "backup"),
    folder("Make a directory called music.", "music"),
    folder("Make a directory called tools.", "tools"),
    folder("Create two folders named red and blue.", "red", "blue"),
    folder("Create the folders north and south.", "north", "south"),
    folder("Make two directories called cats and dogs.", "cats", "dogs"),
    nested("Create a folder named src with a folder named lib inside it.", "src", "lib"),
    nested("Create the folder data/raw.", "data", "raw"),
    empty("Create an empty file named todo.txt.", "todo.txt"),
    empty("Create an empty file named plan.txt.", "plan.txt"),
    empty("Create the empty files one.txt and two.txt.", "one.txt", "two.txt"),
    write("Create a file named hello.txt with the text hello.", hello="hello"),
    write("Create a file named color.txt with the text green.", color="green"),
    write("Create a file named fruit.txt that contains the word apple.", fruit="apple"),
    write("Write the word monday to day.txt.", day="monday"),
    write("Write good morning to greet.txt.", greet="good morning"),
    write("Write cat to a.txt and dog to b.txt.", a="cat", b="dog"),
    write("Write yes to first.txt and no to second.txt.", first="yes", second="no"),
    delete("Delete the file old.txt.", "old.txt", keep="new.txt"),
    delete("Delete the file junk.txt.", "junk.txt", keep="gold.txt"),
    delete("Remove the file draft.txt.", "draft.txt", keep="final.txt"),
    delete("Remove the file temp.log.", "temp.log", keep="main.log"),
    delete("Delete the files x.txt and y.txt.", "x.txt", "y.txt", keep="z.txt"),
    delete("Remove both cache.txt and trash.txt.", "cache.txt", "trash.txt", keep="store.txt"),
    rename("Rename the file apple.txt to pear.txt.", "apple.txt", "pear.txt", "sweet"),
    rename("Rename the file start.txt to end.txt.", "start.txt", "end.txt", "a long way"),
    rename("Rename lion.txt to tiger.txt.", "lion.txt", "tiger.txt", "stripes"),
    copy("Copy the file data.txt to copy.txt.", "data.txt", "copy.txt", "1 2 3"),
    copy("Copy the file song.txt to tune.txt.", "song.txt", "tune.txt", "la la la"),
    copy("Make a copy of book.txt named novel.txt.", "book.txt", "novel.txt", "chapter one"),
    move("Move the file letter.txt into the folder mail.", "letter.txt", "mail", "dear friend"),
    move("Move the file bread.txt into the folder kitchen.", "bread.txt", "kitchen", "fresh"),
    append("Add the line milk to the end of list.txt.", "list.txt", "eggs", "milk"),
    append("Append the word done to log.txt.", "log.txt", "started", "done"),
    count("Write the number of lines in names.txt to count.txt.", "names.txt", "count.txt", ["ann", "bob", "cy"]),
    count("Count the lines of rows.txt and save the number in total.txt.", "rows.txt", "total.txt", list("abcdefg")),
    sort("Sort the lines of words.txt into sorted.txt.", "words.txt", "sorted.txt", ["pear", "fig", "kiwi", "apple"]),
    pick(
        "Save the lines of app.txt with error to bad.txt.", "app.txt", "bad.txt", "error", ["ok 1", "error 2", "ok 3"]
    ),
    replace("Replace the word red with blue in paint.txt.", "paint.txt", "red", "blue", "a red door"),
    executable("Make the file run.sh executable.", "run.sh"),
]

EVAL: list[Spec] = [
    folder("Create a folder named garden.", "garden"),
    folder("Make a new directory called videos.", "videos"),
    folder("Create two folders named sun and moon.", "sun", "moon"),
    nested("Create a folder named city with a folder named park inside it.", "city", "park"),
    empty("Create an empty file named blank.txt.", "blank.txt"),
    write("Create a file named animal.txt with the text horse.", animal="horse"),
    write("Write the word winter to season.txt.", season="winter"),
    write("Write tea to left.txt and milk to right.txt.", left="tea", right="milk"),
    delete("Delete the file wrong.txt.", "wrong.txt", keep="right.txt"),
    delete("Remove the file stale.log.", "stale.log", keep="live.log"),
    delete("Delete the files p.txt and q.txt.", "p.txt", "q.txt", keep="r.txt"),
    rename("Rename the file lake.txt to river.txt.", "lake.txt", "river.txt", "cold water"),
    rename("Rename wolf.txt to bear.txt.", "wolf.txt", "bear.txt", "grey fur"),
    copy("Copy the file poem.txt to verse.txt.", "poem.txt", "verse.txt", "roses"),
    move("Move the file ticket.txt into the folder travel.", "ticket.txt", "travel", "seat 12"),
    append("Add the line salt to the end of shop.txt.", "shop.txt", "pepper", "salt"),
    count(
        "Write the number of lines in cities.txt to number.txt.", "cities.txt", "number.txt", ["rome", "oslo", "lima"]
    ),
    sort("Sort the lines of birds.txt into order.txt.", "birds.txt", "order.txt", ["swan", "crow", "duck"]),
]

TASK_TOML = """\
version = "1.0"

[metadata]
difficulty = "{level}"
category = "shell"
license = "Apache-2.0"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 512
network_mode = "no-network"
"""


def test_script(spec: Spec) -> str:
    """A checker that always leaves a number, and leaves 0 when it cannot get to its end."""
    lines = ["#!/bin/bash", f"# {spec.ask}", "mkdir -p /logs/verifier", "echo 0 > /logs/verifier/reward.txt"]
    lines += ["cd /work || exit 0"]
    for name in spec.kept:
        lines += ["", "# This file was not to be touched.", f"{{ {holds(name, spec.files[name])}; }} || exit 0"]
    if len(spec.wanted) == 1:
        lines += ["", f"if {spec.wanted[0]}; then", "  echo 1 > /logs/verifier/reward.txt", "fi"]
    else:
        lines += ["", "met=0"]
        lines += [f"if {condition}; then met=$((met + 1)); fi" for condition in spec.wanted]
        lines += ["case $met in", "  1) echo 0.5 > /logs/verifier/reward.txt ;;"]
        lines += ["  2) echo 1 > /logs/verifier/reward.txt ;;", "esac"]
    return "\n".join([*lines, "exit 0", ""])


def write_task(spec: Spec, parent: Path) -> None:
    root = parent / spec.name
    texts = {
        "task.toml": TASK_TOML.format(level=spec.level),
        "instruction.md": spec.ask + "\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /work\n",
        "tests/test.sh": test_script(spec),
        "solution/solve.sh": f"#!/bin/bash\n{spec.solution}\n",
    }
    if spec.files:
        texts["environment/Dockerfile"] += "COPY files/ /work/\n"
    texts |= {f"environment/files/{name}": text for name, text in spec.files.items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh" and path.parent.name in ("tests", "solution"):
            path.chmod(0o755)


def write_all(target: Path) -> None:
    """Replace `target`/train and `target`/eval."""
    for split, specs in (("train", TRAIN), ("eval", EVAL)):
        shutil.rmtree(target / split, ignore_errors=True)
        for spec in specs:
            write_task(spec, target / split)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=STARTER)
    write_all(parser.parse_args().target)
