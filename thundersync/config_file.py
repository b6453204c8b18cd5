"""A TOML file and `--set` overrides -> a `Config`, or every fault of it at once, each with the nearest right name.

Other trainers' words are translated here, with a note (`config_names`); the defaults that `algo.type` sets are filled
in, so that the resolved configuration spells them out (`config_checks`).
"""

import difflib
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import tomli_w
from msgspec import Struct

from thundersync.config import Config, Section
from thundersync.config_checks import PRESETS, contradictions, refuse
from thundersync.config_names import ALIAS_NOTES, ALIASES, INACTIVE, REFUSED_VALUES, refusal, shown, translated
from thundersync.errors import ConfigError


class Loaded(Struct, frozen=True, kw_only=True):
    """A configuration that can be run, and what to tell the user about how it was read."""

    config: Config
    notes: list[str]


def load_config(path: str | Path, overrides: Sequence[str] = (), *, own_tasks: bool = False) -> Config:
    """The configuration in a file. `overrides` are `section.key=value`. With `own_tasks` it need not name any, because
    the program gives them to the engine. Raises: ConfigError."""
    return read_config(path, overrides, own_tasks=own_tasks).config


def read_config(path: str | Path, overrides: Sequence[str] = (), *, own_tasks: bool = False) -> Loaded:
    """As `load_config`, with the notes a user should see. Raises: ConfigError with all faults."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {path}", remedy="configs/quickstart.toml is a small one to start from."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    faults: list[str] = []
    for override in overrides:
        _override(raw, override, faults)
    if not own_tasks:
        faults.extend(_without_tasks(raw))
    return _convert(raw, str(path), faults)


def config_from(raw: Mapping[str, Any], *, origin: str = "the configuration") -> Config:
    """A configuration from plain dictionaries, under the same rules; it need not name tasks, because the program may
    give them to the engine. Raises: ConfigError."""
    return _convert(_copy(raw), origin, []).config


def to_toml(config: Config) -> str:
    """The resolved configuration, every default spelled out, as a file that loads to an equal one."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _convert(raw: dict[str, Any], origin: str, faults: list[str]) -> Loaded:
    notes: list[str] = []
    values = _section(Config, raw, "", faults, notes)
    algo = values.get("algo", {})
    for key, default in PRESETS.get(algo.get("type", "grpo"), {}).items():
        algo.setdefault(key, default)
    if not faults:
        config = msgspec.convert(values, Config)
        faults.extend(contradictions(config))
    refuse(faults, origin)
    return Loaded(config=config, notes=notes)


def _without_tasks(raw: Mapping[str, Any]) -> Iterator[str]:
    """Tables of tasks that say not where they are."""
    holders = [("env", raw)] + ([("eval.env", raw["eval"])] if isinstance(raw.get("eval"), Mapping) else [])
    for name, holder in holders:
        env = holder.get("env", {})
        if isinstance(env, Mapping) and not env.get("path"):
            yield f"{name}.path is missing"


def _section(
    kind: type[Section], raw: Mapping[str, Any], prefix: str, faults: list[str], notes: list[str]
) -> dict[str, Any]:
    """Check one table key by key, so that one fault does not hide the next. `prefix`: its place, as it was written."""
    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        dotted = prefix + key
        name = _canonical(dotted, hints, value, faults, notes)
        if name is None:
            continue
        if name in values:
            faults.append(f"{prefix}{name} is given twice, once as {dotted}")
            continue
        inner = _section_type(hints[name])
        if inner is None:
            values[name] = _value(dotted, ALIASES.get(_place(dotted), prefix + name), value, hints[name], faults, notes)
        elif get_origin(hints[name]) is list:
            values[name] = [
                _section(inner, table, place, faults, notes) for place, table in _tables(dotted, value, faults)
            ]
        elif isinstance(value, Mapping):
            values[name] = _section(inner, value, f"{dotted}.", faults, notes)
        else:
            faults.append(f"{dotted} is a table: write [{dotted}]")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values and not any(f.startswith(prefix + field.name) for f in faults):
            faults.append(f"{prefix}{field.name} is missing")
    return values


def _tables(dotted: str, value: Any, faults: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables of a key that takes one or several, each with its prefix."""
    if isinstance(value, Mapping):
        return [(f"{dotted}.", value)]
    if isinstance(value, list) and all(isinstance(table, Mapping) for table in value):
        return [(f"{dotted}[{index}]." if len(value) > 1 else f"{dotted}.", table) for index, table in enumerate(value)]
    faults.append(f"{dotted} is a table, or several: write [{dotted}] or [[{dotted}]]")
    return []


def _value(dotted: str, target: str, value: Any, hint: Any, faults: list[str], notes: list[str]) -> Any:
    """One value as its key's type; another trainer's word for it is translated. `target` is our name of the key."""
    word = translated(_place(target), value)
    if word is not None:
        notes.append(f"{dotted} = {shown(value)} is read as {shown(word.value)}{word.note}")
        value = word.value
    elif isinstance(value, str) and (why := REFUSED_VALUES.get((_place(target), value))):
        faults.append(f"{dotted} = {shown(value)} is not possible here: {why}")
        return None
    elif isinstance(value, str) and get_origin(_bare(hint)) is tuple:
        value = [value]
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        faults.append(f"{dotted} = {value!r}: {str(error).replace('`', '')}")
        return None


def _canonical(dotted: str, hints: Mapping[str, Any], value: Any, faults: list[str], notes: list[str]) -> str | None:
    """The key's own name within its section; None if it is refused or already dealt with."""
    key = dotted.rpartition(".")[2]
    if key in hints:
        return key
    place = _place(dotted)
    if (refused := refusal(place)) is not None:
        if not isinstance(value, bool) and value in refused.off:
            notes.append(f"{dotted} = {shown(value)}: {refused.note}")
        else:
            faults.append(f"{dotted} = {shown(value)} is not possible here: {refused.why}")
        return None
    if place in INACTIVE:
        notes.append(f"{dotted} is not kept: {INACTIVE[place]}")
        return None
    target = ALIASES.get(place)
    if target is not None and target.rpartition(".")[2] in hints:
        notes.append(f"{dotted} is read as {target}{ALIAS_NOTES.get(place, '')}")
        return target.rpartition(".")[2]
    nearest = _nearest(place)
    hint = f"; did you mean {nearest}?" if nearest else ""
    faults.append(f"{dotted} is not a setting{hint}")
    return None


def _place(dotted: str) -> str:
    """A key's place without which of several tables it is in."""
    return re.sub(r"\[\d+\]", "", dotted)


def _nearest(dotted: str) -> str:
    """The most similar setting: by the whole name, by the key alone in any section, or by another trainer's name."""
    known = list(_all_keys(Config, ""))
    key = dotted.rpartition(".")[2]
    for alias, target in ALIASES.items():
        if alias.rpartition(".")[2] == key:
            return target
    if close := difflib.get_close_matches(dotted, known, n=1, cutoff=0.75):
        return close[0]
    by_key: dict[str, str] = {}
    for name in known:
        by_key.setdefault(name.rpartition(".")[2], name)
    close = difflib.get_close_matches(key, list(by_key), n=1, cutoff=0.6)
    return by_key[close[0]] if close else ""


def _all_keys(kind: type[Section], prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner = _section_type(hint)
        yield prefix + name
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _section_type(hint: Any) -> type[Section] | None:
    """The section a key holds: as a table, as an optional table, or as a list of tables."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType, list) else (hint,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def _bare(hint: Any) -> Any:
    """A type without its constraints."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _override(raw: dict[str, Any], override: str, faults: list[str]) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        faults.append(f"--set {override}: write section.key=value")
        return
    *tables, key = dotted.strip().split(".")
    place: Any = raw
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            faults.append(f"--set {override}: {table} is not one table")
            return
    try:
        place[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        place[key] = text  # a bare word: --set stream.mode=lazy


def _copy(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of their own: overrides and defaults are written into them."""
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in raw.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value
