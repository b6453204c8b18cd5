"""A TOML file and `--set` overrides -> a `Config`, or every fault of it at once, each with the nearest right name."""

import difflib
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from thundersync.config import ALIASES, REFUSED, STALENESS, Config, Loaded, Section
from thundersync.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a file. `overrides` are `section.key=value`. Raises: ConfigError."""
    return read_config(path, overrides).config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
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
    return _convert(raw, str(path), faults)


def config_from(raw: Mapping[str, Any], *, origin: str = "the configuration") -> Config:
    """A configuration from plain dictionaries, under the same rules. Raises: ConfigError."""
    return _convert(_copy(raw), origin, []).config


def to_toml(config: Config) -> str:
    """The resolved configuration, every default spelled out, as a file that loads to an equal one."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _convert(raw: dict[str, Any], origin: str, faults: list[str]) -> Loaded:
    notes: list[str] = []
    values = _section(Config, raw, "", faults, notes)
    config = None
    if not faults:
        config = msgspec.convert(values, Config)
        faults.extend(_contradictions(config))
    if faults or config is None:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise ConfigError(f"{origin} cannot be run:\n{listed}", remedy="Mend these and run again; nothing was started.")
    return Loaded(config=config, notes=notes)


def _section(
    kind: type[Section], raw: Mapping[str, Any], prefix: str, faults: list[str], notes: list[str]
) -> dict[str, Any]:
    """Check one table key by key, so that one fault does not hide the next."""
    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = _canonical(prefix + key, hints, value, faults, notes)
        if name is None:
            continue
        if name in values:
            faults.append(f"{prefix}{name} is given twice, once as {prefix}{key}")
            continue
        inner = _section_type(hints[name])
        if inner is not None:
            if not isinstance(value, Mapping):
                faults.append(f"{prefix}{name} is a table: write [{prefix}{name}]")
                continue
            values[name] = _section(inner, value, f"{prefix}{name}.", faults, notes)
            continue
        try:
            values[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            faults.append(f"{prefix}{name} = {value!r}: {str(error).replace('`', '')}")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values and not any(f.startswith(prefix + field.name) for f in faults):
            faults.append(f"{prefix}{field.name} is missing")
    return values


def _canonical(dotted: str, hints: Mapping[str, Any], value: Any, faults: list[str], notes: list[str]) -> str | None:
    """The key's own name within its section; None if it is refused or already dealt with."""
    key = dotted.rpartition(".")[2]
    if key in hints:
        return key
    if key in STALENESS:
        if value == 0:
            notes.append(f"{dotted} = 0 is how thundersync always works: nothing stale enters a step")
        else:
            faults.append(f"{dotted} = {value!r}: every rollout counts in the step it was made for; only 0 is possible")
        return None
    if dotted in REFUSED:
        faults.append(f"{dotted} is not possible here: {REFUSED[dotted]}")
        return None
    target = ALIASES.get(dotted)
    if target is not None and target.rpartition(".")[2] in hints:
        notes.append(f"{dotted} is read as {target}")
        return target.rpartition(".")[2]
    nearest = _nearest(dotted)
    hint = f"; did you mean {nearest}?" if nearest else ""
    faults.append(f"{dotted} is not a setting{hint}")
    return None


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
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


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
            faults.append(f"--set {override}: {table} is not a table")
            return
    try:
        place[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        place[key] = text  # a bare word: --set stream.mode=lazy


def _contradictions(config: Config) -> list[str]:
    """What each key alone cannot tell."""
    faults: list[str] = []
    if config.algo.group_size < 2:
        faults.append("algo.group_size = 1: a reward relative to its group of one is always zero; use 2 or more")
    if config.algo.min_group_size < 2:
        faults.append("algo.min_group_size = 1: one member has no advantage; use 2 or more")
    if config.algo.min_group_size > config.algo.group_size:
        faults.append(
            f"algo.min_group_size = {config.algo.min_group_size} is more than algo.group_size = "
            f"{config.algo.group_size}: every group would be dropped"
        )
    if config.rollout.max_tokens >= config.model.max_model_len:
        faults.append(
            f"rollout.max_tokens = {config.rollout.max_tokens} leaves no room for a prompt within "
            f"model.max_model_len = {config.model.max_model_len}"
        )
    if config.optim.warmup_steps > config.max_steps:
        faults.append(f"optim.warmup_steps = {config.optim.warmup_steps} is more than max_steps = {config.max_steps}")
    if config.name and (not re.fullmatch(r"[^/\\\0]{1,100}", config.name) or config.name in (".", "..")):
        faults.append(f"name = {config.name!r}: it names a folder, so at most 100 characters and no slash")
    slowest = max(config.rollout.timeout_s, config.rollout.command_timeout_s)
    if config.stall_timeout_s <= slowest:
        faults.append(
            f"stall_timeout_s = {config.stall_timeout_s:g} would end the run during one slow rollout of "
            f"{slowest:g} s (rollout.timeout_s); make it longer"
        )
    if config.engine.gpus and not config.trainer.gpus:
        faults.append("engine.gpus is given but trainer.gpus is not: say which GPUs learn")
    if config.trainer.gpus and not config.engine.gpus:
        faults.append("trainer.gpus is given but engine.gpus is not: say which GPUs generate")
    if both := sorted(set(config.engine.gpus) & set(config.trainer.gpus)):
        faults.append(f"GPUs {both} are in engine.gpus and in trainer.gpus: give each to one of them")
    if len(config.trainer.gpus) > 1:
        faults.append(f"trainer.gpus = {config.trainer.gpus}: one trainer worker is supported so far; name one GPU")
    return faults


def _copy(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in raw.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value
