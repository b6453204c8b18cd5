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
    """One task: what is asked, what lies in /workspace, what must be true afterwards."""

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


# Kinds of task. Each takes the sentence that asks. A few words decide whether a small model succeeds one time in three
# or never: the sentences below were chosen by the probability that SmolLM2-135M-Instruct gives to a right answer,
# mostly 0.1 to 0.5, and close to 0 for the level "hard".


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


def touch(ask: str, name: str) -> Spec:
    return Spec(
        name=f"touch-{stem(name)}",
        level="easy",
        ask=ask,
        wanted=[f"[ -f {name} ] && [ ! -s {name} ]"],
        solution=f"touch {name}",
    )


def write(ask: str, name: str, text: str) -> Spec:
    return Spec(
        name=f"write-{stem(name)}",
        level="easy" if " " not in text else "medium",
        ask=ask,
        wanted=[holds(name, text)],
        solution=f'echo "{text}" > {name}',
    )


def delete(ask: str, *names: str, keep: str) -> Spec:
    """`keep` lies beside them, so that deleting everything earns nothing."""
    return Spec(
        name="delete-" + "-".join(stem(name) for name in names),
        level="easy" if len(names) == 1 else "medium",
        ask=ask,
        wanted=[f"[ ! -e {name} ]" for name in names],
        solution="rm " + " ".join(names),
        files={name: f"text of {stem(name)}\n" for name in (*names, keep)},
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


def move(ask: str, name: str, target: str, text: str) -> Spec:
    return Spec(
        name=f"move-{stem(name)}-{target}",
        level="easy",
        ask=ask,
        wanted=[f"[ ! -e {name} ] && {holds(f'{target}/{name}', text)}"],
        solution=f"mv {name} {target}/",
        files={name: text + "\n", f"{target}/index.txt": "index\n"},
    )


def copy(ask: str, old: str, new: str, text: str) -> Spec:
    return Spec(
        name=f"copy-{stem(old)}-{stem(new)}",
        level="medium",
        ask=ask,
        wanted=[holds(new, text)],
        solution=f"cp {old} {new}",
        files={old: text + "\n"},
        kept=[old],
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


def append(ask: str, name: str, old: str, new: str) -> Spec:
    return Spec(
        name=f"append-{stem(name)}",
        level="hard",
        ask=ask,
        wanted=[holds(name, f"{old}\n{new}")],
        solution=f'echo "{new}" >> {name}',
        files={name: old + "\n"},
    )


def count(ask: str, name: str, target: str, lines: Sequence[str]) -> Spec:
    return Spec(
        name=f"count-{stem(name)}",
        level="hard",
        ask=ask,
        # `wc -l FILE` writes the file's name too: half of what was asked.
        wanted=[f'read -r first rest < {target} && [ "$first" = {len(lines)} ]', holds(target, str(len(lines)))],
        solution=f"wc -l < {name} > {target}",
        files={name: "\n".join(lines) + "\n"},
        kept=[name],
    )


def sort(ask: str, name: str, target: str, lines: Sequence[str]) -> Spec:
    return Spec(
        name=f"sort-{stem(name)}",
        level="hard",
        ask=ask,
        wanted=[holds(target, "\n".join(sorted(lines)))],
        solution=f"sort {name} > {target}",
        files={name: "\n".join(lines) + "\n"},
        kept=[name],
    )


def find(ask: str, name: str, target: str, word: str, lines: Sequence[str]) -> Spec:
    return Spec(
        name=f"find-{stem(name)}",
        level="hard",
        ask=ask,
        wanted=[holds(target, "\n".join(line for line in lines if word in line))],
        solution=f"grep {word} {name} > {target}",
        files={name: "\n".join(lines) + "\n"},
        kept=[name],
    )


def replace(ask: str, name: str, old: str, new: str, text: str) -> Spec:
    return Spec(
        name=f"replace-{stem(name)}",
        level="hard",
        ask=ask,
        wanted=[holds(name, text.replace(old, new))],
        solution=f"sed -i 's/{old}/{new}/g' {name}",
        files={name: text + "\n"},
    )


def stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


TRAIN: list[Spec] = [
    folder("Create a folder named reports.", "reports"),
    folder("Create a folder named photos.", "photos"),
    folder("Create a folder named backup.", "backup"),
    folder("Create a directory named music.", "music"),
    folder("Create a new directory called downloads.", "downloads"),
    folder("Create the directory kitchen.", "kitchen"),
    folder("Create two folders named cats and dogs.", "cats", "dogs"),
    folder("Create two folders named images and videos.", "images", "videos"),
    folder("Create the directories alpha beta.", "alpha", "beta"),
    nested("Create the folder src/lib.", "src", "lib"),
    nested("Create the folder home/docs.", "home", "docs"),
    nested("Create the directory web/css.", "web", "css"),
    touch("Touch the file todo.txt.", "todo.txt"),
    touch("Touch the file plan.txt.", "plan.txt"),
    touch("Touch the file lock.txt.", "lock.txt"),
    write("Write the word cat to pet.txt.", "pet.txt", "cat"),
    write("Write the word monday to day.txt.", "day.txt", "monday"),
    write("Write the word apple to fruit.txt.", "fruit.txt", "apple"),
    write("Write the word green to color.txt.", "color.txt", "green"),
    write("Write the word done to status.txt.", "status.txt", "done"),
    write("Write the word coffee to drink.txt.", "drink.txt", "coffee"),
    write("Write the words good morning to greeting.txt.", "greeting.txt", "good morning"),
    delete("Delete the file junk.txt.", "junk.txt", keep="gold.txt"),
    delete("Delete the file secret.txt.", "secret.txt", keep="public.txt"),
    delete("Delete the file temp.log.", "temp.log", keep="main.log"),
    delete("Remove the file old.txt.", "old.txt", keep="new.txt"),
    delete("Remove the file trash.txt.", "trash.txt", keep="store.txt"),
    delete("Delete the files x.txt and y.txt.", "x.txt", "y.txt", keep="z.txt"),
    delete("Remove the files a.log and b.log.", "a.log", "b.log", keep="c.log"),
    rename("Rename the file apple.txt to pear.txt.", "apple.txt", "pear.txt", "sweet"),
    rename("Rename the file lion.txt to tiger.txt.", "lion.txt", "tiger.txt", "stripes"),
    rename("Rename the file draft.txt to final.txt.", "draft.txt", "final.txt", "dear reader"),
    rename("Rename start.txt to end.txt.", "start.txt", "end.txt", "a long way"),
    move("Move the file letter.txt into the folder mail.", "letter.txt", "mail", "dear friend"),
    move("Move the file song.txt into the folder music.", "song.txt", "music", "la la la"),
    move("Move book.txt into the folder library.", "book.txt", "library", "chapter one"),
    move("Move the file report.txt to archive.", "report.txt", "archive", "all well"),
    copy("Use cp to copy tea.txt to cup.txt.", "tea.txt", "cup.txt", "black tea"),
    copy("Copy the file a.txt to b.txt.", "a.txt", "b.txt", "1 2 3"),
    executable("Make the file test.sh executable.", "test.sh"),
    executable("Make the file run.sh executable.", "run.sh"),
    append("Append the word milk to list.txt.", "list.txt", "eggs", "milk"),
    count("Write the number of lines in names.txt to count.txt.", "names.txt", "count.txt", ["ann", "bob", "cy"]),
    sort("Sort words.txt into sorted.txt.", "words.txt", "sorted.txt", ["pear", "fig", "kiwi", "apple"]),
    find("Write the lines of app.log with error to bad.log.", "app.log", "bad.log", "error", ["fine", "error 7", "ok"]),
    replace("Replace the word red with blue in paint.txt.", "paint.txt", "red", "blue", "a red door"),
]

EVAL: list[Spec] = [
    folder("Create a folder named garden.", "garden"),
    folder("Create a directory named tools.", "tools"),
    folder("Create two folders named sun and moon.", "sun", "moon"),
    nested("Create the folder app/logs.", "app", "logs"),
    touch("Touch the file notes.txt.", "notes.txt"),
    touch("Touch the file index.html.", "index.html"),
    write("Write the word winter to season.txt.", "season.txt", "winter"),
    write("Write the word horse to animal.txt.", "animal.txt", "horse"),
    delete("Delete the file wrong.txt.", "wrong.txt", keep="right.txt"),
    delete("Remove the file stale.log.", "stale.log", keep="live.log"),
    delete("Delete the files p.txt and q.txt.", "p.txt", "q.txt", keep="r.txt"),
    rename("Rename the file lake.txt to river.txt.", "lake.txt", "river.txt", "cold water"),
    rename("Rename wolf.txt to bear.txt.", "wolf.txt", "bear.txt", "grey fur"),
    move("Move the file ticket.txt into the folder travel.", "ticket.txt", "travel", "seat 12"),
    move("Move photo.txt into the folder album.", "photo.txt", "album", "a beach"),
    copy("Use cp to copy poem.txt to verse.txt.", "poem.txt", "verse.txt", "roses"),
    executable("Make the file build.sh executable.", "build.sh"),
    count("Write the number of lines in cities.txt to total.txt.", "cities.txt", "total.txt", ["rome", "oslo", "lima"]),
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
    lines += ["cd /workspace || exit 0"]
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
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /workspace\n",
        "tests/test.sh": test_script(spec),
        "solution/solve.sh": f"#!/bin/bash\n{spec.solution}\n",
    }
    if spec.files:
        texts["environment/Dockerfile"] += "COPY files/ /workspace/\n"
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
