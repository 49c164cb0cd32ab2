"""From command-line overrides to a validated `RunConfig`; every error is one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.rl.config import RunConfig

GROUPS = ("recipe", "trainer", "engine", "eval", "log", "model", "task")  # in the order of composition


@dataclass(frozen=True)
class Composed:
    """A validated configuration, and for each of its keys the file or override that set it."""

    config: RunConfig
    sources: dict[str, str]


def compose(overrides: Sequence[str], *, run_dir: str | None = None) -> Composed:
    """Compose and validate. Raises UserError that names the nearest right key or value."""
    groups, values = _split(overrides)
    _check_keys(values, _leaves(_hydra(groups)))
    composed = _hydra([*groups, *values])
    choices = _choices(groups)
    plain = _resolved(composed)
    _refuse_missing(plain)
    plain["run_dir"] = run_dir or plain["run_dir"] or _default_run_dir(choices)
    config = _validate(plain)
    leaves = _leaves(config.model_dump(mode="json"))
    return Composed(config=config, sources=_sources(leaves, choices, values, run_dir))


def recompose(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with single values overridden, as a resume does. Raises UserError as `compose` does, and for groups."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    from scalerl.rl.errors import UserError

    groups, values = _split(overrides)
    if groups:
        raise UserError(f"'{groups[0]}' replaces a whole group; a resume takes single values, such as steps=500")
    tree = OmegaConf.create(config.model_dump(mode="json"))
    _check_keys(values, _leaves(tree))
    for text in values:
        override = OverridesParser.create().parse_override(text)
        if override.is_delete():
            raise UserError(f"'{text}': a resume can't take a key away")
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
    return _validate(_resolved(tree))


def _resolved(tree: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from scalerl.rl.errors import UserError

    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from None


def _hydra(overrides: Sequence[str]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from scalerl.rl.errors import UserError

    try:
        with initialize_config_module("scalerl.conf", version_base="1.3"):
            return hydra_compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_line(error)) from None


def _split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Group choices (`recipe=base`) and value overrides; raises UserError on syntax and on an unknown choice."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException, OverrideParseException

    from scalerl.rl.errors import UserError

    groups, values = [], []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except (OverrideParseException, HydraException):
            key, equals, value = text.partition("=")
            if key and equals:
                raise UserError(f"the value of '{text}' needs quotes of its own: '{key}=\"{value}\"'") from None
            raise UserError(f"'{text}' is not an override; write KEY=VALUE, for example recipe.loss=dapo") from None
        if override.is_sweep_override():
            raise UserError(f"'{text}' asks for several runs; `scalerl sweep axis KEY=V1,V2` makes them")
        if override.key_or_group in GROUPS and override.type is not None and not isinstance(override.value(), dict):
            _check_choice(override.key_or_group, str(override.value()))
            groups.append(text)
        else:
            values.append(text)
    return groups, values


def options(group: str) -> list[str]:
    """The names that a configuration group offers."""
    return sorted(f.name.removesuffix(".yaml") for f in files("scalerl.conf").joinpath(group).iterdir())


def _check_choice(group: str, choice: str) -> None:
    from scalerl.rl.errors import UserError

    if choice not in options(group):
        raise UserError(
            f"no {group} '{choice}'{_nearest(choice, options(group))}; there are {', '.join(options(group))}"
        )


def _check_keys(values: Sequence[str], leaves: Mapping[str, Any]) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from scalerl.rl.errors import UserError

    known = set(leaves) | {key.rsplit(".", depth)[0] for key in leaves for depth in range(1, key.count(".") + 1)}
    for text in values:
        override = OverridesParser.create().parse_override(text)
        if override.is_add() or override.is_force_add() or override.key_or_group in known:
            continue
        parent = override.key_or_group.rpartition(".")[0]
        if isinstance(leaves.get(parent), dict):
            continue
        raise UserError(f"no key '{override.key_or_group}'{_nearest(override.key_or_group, known)}")


def _validate(plain: dict[str, Any]) -> RunConfig:
    from pydantic import ValidationError

    from scalerl.rl.config import RunConfig
    from scalerl.rl.errors import UserError

    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        raise UserError(_validation_line(error, plain)) from None


def _validation_line(error: Any, plain: dict[str, Any]) -> str:
    first = error.errors()[0]
    # The tag of a discriminated union and of a `Literal | float` stands in the location without being a key.
    key = ".".join(_real_keys(first["loc"], plain))
    if first["type"] == "literal_error":
        allowed = [a.strip().strip("'") for a in first["ctx"]["expected"].replace(" or ", ", ").split(",")]
        given = first["input"]
        return f"{key}={given}{_nearest(str(given), allowed)}; one of {', '.join(allowed)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}" if key else message
    if first["type"] == "extra_forbidden":
        return f"no key '{key}'{_nearest(key, _leaves(plain).keys() - {key})}"
    if first["type"] == "missing":
        return f"{key} is missing; set it with {key}=VALUE"
    return f"{key}={first['input']}: {message[0].lower()}{message[1:]}"


def _real_keys(loc: Iterable[Any], plain: Any) -> Iterator[str]:
    for part in loc:
        inside = part in plain if isinstance(plain, dict) else isinstance(plain, list) and isinstance(part, int)
        if inside:
            plain = plain[part]
        elif not isinstance(plain, dict) or part == plain.get("kind"):
            continue  # the tag of a union, no key
        yield str(part)


def _refuse_missing(plain: dict[str, Any]) -> None:
    from scalerl.rl.errors import UserError

    for key, value in _leaves(plain).items():
        if value == "???":
            raise UserError(f"{key} is missing; set it with {key}=VALUE")


def _default_run_dir(choices: Mapping[str, str]) -> str:
    return f"runs/{choices['recipe']}-{choices['task']}-{datetime.now():%Y%m%d-%H%M%S}"


def _choices(groups: Sequence[str]) -> dict[str, str]:
    from omegaconf import OmegaConf

    root: Any = OmegaConf.load(str(files("scalerl.conf").joinpath("config.yaml")))
    choices = {k: v for entry in root.defaults if not isinstance(entry, str) for k, v in entry.items()}
    return choices | dict(text.split("=", 1) for text in groups)


def _sources(
    leaves: Mapping[str, Any], choices: Mapping[str, str], values: Sequence[str], run_dir: str | None
) -> dict[str, str]:
    """Replay the composition file by file, in its order; the last that sets a key is its source."""
    from omegaconf import OmegaConf

    conf = files("scalerl.conf")
    sources = dict.fromkeys(leaves, "config.yaml")
    for group in GROUPS:
        name = f"{group}/{choices[group]}.yaml"
        text = conf.joinpath(name).read_text()
        prefix = "" if "@package _global_" in text.split("\n", 1)[0] else f"{group}."
        content: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        for entry in content.pop("defaults", ()):
            inner, nested, package = entry.partition("@")  # `math@tasks.math`: that choice's keys under tasks.math
            if nested:
                _mark(sources, prefix + package, f"{group}/{inner}.yaml")
        for key in _leaves(content):
            _mark(sources, prefix + key, name)
    for text in values:
        _mark(sources, text.lstrip("+").split("=", 1)[0], "command line")
    if run_dir:
        sources["run_dir"] = "command line"
    return sources


def _mark(sources: dict[str, str], key: str, name: str) -> None:
    for leaf in sources:
        if leaf == key or leaf.startswith(key + "."):
            sources[leaf] = name


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested mapping; an empty mapping is a leaf."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(tree, DictConfig):
        tree = OmegaConf.to_container(tree, resolve=False)
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree} if prefix else {}
    return {k: v for key, value in tree.items() for k, v in _leaves(value, f"{prefix}{key}.").items()}


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
