"""Rows of a data set, from a file, a folder of files, or the Hugging Face hub. Refuses to know what a row means."""

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from thundersync.errors import TaskError

Row: TypeAlias = dict[str, Any]
SUFFIXES = (".json", ".jsonl", ".parquet")
USUAL_SPLIT = "train"


def read_rows(path: str, *, split: str = USUAL_SPLIT, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Every row of `path`: a .json, .jsonl or .parquet file, a folder of such files (in the order of their names), or
    the id of a data set on the hub, e.g. `SWE-bench/SWE-bench_Verified`.

    Of a data set that has no split of the usual name, and one only of another, that one is read, and `say` told.
    Raises: TaskError when there is nothing, a line is torn, or a package that reads it is missing.
    """
    found = Path(path).expanduser()
    if found.is_file():
        return _read_file(found)
    if found.is_dir():
        files = sorted(each for each in found.iterdir() if each.suffix in SUFFIXES)
        if not files:
            raise TaskError(f"no rows in {found}", remedy=f"Rows lie in files that end with {', '.join(SUFFIXES)}.")
        return itertools.chain.from_iterable(map(_read_file, files))
    if is_hub_id(path):
        return _from_hub(path, split, say)
    raise TaskError(
        f"no rows at {path}", remedy="Give a .json, .jsonl or .parquet file, or a data set's id: owner/name."
    )


def is_hub_id(path: str) -> bool:
    """Whether `path` can only be the id of a data set: owner/name, and no such file here."""
    parts = path.split("/")
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~")) and not Path(path).exists()


def _read_file(path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".parquet":
            return _from_parquet(path)
        case ".jsonl":
            return _from_lines(path)
        case ".json":
            return _from_json(path)
    raise TaskError(f"{path} is no file of rows", remedy=f"Its name must end with one of {', '.join(SUFFIXES)}.")


def _from_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield _row(json.loads(line))
                except ValueError as error:
                    raise TaskError(f"{path}, line {number}: {error}", remedy="One JSON object a line.") from error


def _from_json(path: Path) -> Iterator[Row]:
    """A list of rows, or one row alone."""
    try:
        found = json.loads(path.read_bytes())
        rows = [_row(each) for each in (found if isinstance(found, list) else [found])]
    except ValueError as error:
        raise TaskError(f"{path}: {error}", remedy="A .json file of rows holds a list of objects.") from error
    yield from rows


def _from_parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise TaskError(f"{path} needs pyarrow, which is not installed", remedy="pip install pyarrow") from error
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _from_hub(name: str, split: str, say: Callable[[str], None]) -> Iterator[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise TaskError(
            f"there is no file {name}, and to look for a data set of this name on the hub needs `datasets`",
            remedy="Correct the path; or: pip install datasets",
        ) from error
    try:
        found = datasets.load_dataset(name, split=split)
    except Exception as error:  # whatever the hub's client raises, offline or for a wrong name
        splits = _splits(datasets, name)
        if split == USUAL_SPLIT and len(splits) == 1 and splits != [split]:
            say(f"the data set {name} has no split {split!r}; its only one, {splits[0]!r}, is taken")
            return _from_hub(name, splits[0], say)
        there = f" It has the splits {', '.join(splits)}." if splits else ""
        raise TaskError(
            f"the data set {name} (split {split!r}) cannot be loaded: {error}",
            remedy=f"Check its name and env.split.{there} Without a network, give the path of a downloaded file.",
        ) from error
    return (dict(row) for row in found)


def _splits(datasets: Any, name: str) -> list[str]:
    """Names of a data set's splits; none where the hub's client cannot say."""
    try:
        return list(datasets.get_dataset_split_names(name))
    except Exception:  # as above; what is told is why the rows could not be loaded
        return []


def _row(found: object) -> Row:
    if not isinstance(found, dict):
        raise ValueError(f"a row is a JSON object, and this is {type(found).__name__}")
    return found
