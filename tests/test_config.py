import tomllib
from pathlib import Path

import pytest

from thundersync.config import ALIASES, Config
from thundersync.config_file import config_from, load_config, read_config, to_toml
from thundersync.errors import ConfigError

REPO = Path(__file__).resolve().parent.parent
SMALL = {"model": {"name": "m"}, "env": {"path": "p"}}


def faults(raw: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from(raw)
    return str(caught.value)


def test_all_faults_are_told_at_once_each_with_the_nearest_name() -> None:
    told = faults(
        {
            "model": {"nme": "m"},
            "env": {"path": "p"},
            "algo": {"grup_size": 4, "adv_eps": -1.0},
            "sandbox": {"runtime": "chroot"},
            "max_stepz": 4,
        }
    )
    assert "algo.grup_size is not a setting; did you mean algo.group_size?" in told
    assert "max_stepz is not a setting; did you mean max_steps?" in told
    assert "algo.adv_eps = -1.0" in told
    assert "sandbox.runtime = 'chroot'" in told
    assert "model.name is missing" in told or "model.nme is not a setting; did you mean model.name?" in told


def test_names_of_other_trainers_are_accepted_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('total_training_steps = 5\n[model]\npath = "m"\n[env]\npath = "p"\n[algo]\nnum_generations = 4\n')
    loaded = read_config(file)
    assert (loaded.config.max_steps, loaded.config.model.name, loaded.config.algo.group_size) == (5, "m", 4)
    assert "algo.num_generations is read as algo.group_size" in loaded.notes


def test_every_alias_leads_to_a_setting() -> None:
    for target in ALIASES.values():
        kind: object = Config
        *tables, key = target.split(".")
        for table in tables:
            kind = type(getattr(config_from(SMALL | {"eval": {"env": {"path": "e"}}}), table))
        assert key in kind.__struct_fields__, target  # type: ignore[attr-defined]


def test_an_alias_in_a_foreign_section_is_refused_with_the_right_place() -> None:
    assert "rollout.n is not a setting; did you mean algo.group_size?" in faults(SMALL | {"rollout": {"n": 4}})


def test_a_batch_key_of_unclear_unit_is_refused_with_the_two_clear_ones() -> None:
    assert "algo.prompts_per_step (groups) and algo.group_size" in faults(SMALL | {"algo": {"train_batch_size": 64}})


def test_staleness_is_accepted_as_zero_and_refused_otherwise() -> None:
    assert config_from(SMALL | {"max_staleness": 0})
    assert "only 0 is possible" in faults(SMALL | {"max_staleness": 2})


def test_sampling_filters_are_refused_with_the_reason() -> None:
    assert "the gradient would not be exact" in faults(SMALL | {"rollout": {"top_p": 0.9}})


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"algo": {"group_size": 1}}, "relative to its group of one"),
        ({"algo": {"group_size": 2, "min_group_size": 3}}, "every group would be dropped"),
        ({"rollout": {"max_tokens": 4096}, "model": {"name": "m", "max_model_len": 4096}}, "no room for a prompt"),
        ({"engine": {"gpus": [0, 1]}, "trainer": {"gpus": [1]}}, "give each to one of them"),
        ({"name": "a/b"}, "no slash"),
        ({"name": ".."}, "no slash"),
        ({"optim": {"betas": [2.0, 0.9]}}, "optim.betas"),
        ({"model": "m"}, "model is a table: write [model]"),
        ({"optim": {"lr": "fast"}}, "optim.lr = 'fast'"),
    ],
)
def test_contradictions_are_told_before_anything_starts(raw: dict[str, object], told: str) -> None:
    assert told in faults(SMALL | raw)


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\nname = "m"\n[env]\npath = "p"\n')
    config = load_config(file, ["stream.mode=lazy", "optim.betas=[0.8, 0.9]", "seed=3"])
    assert (config.stream.mode, config.optim.betas, config.seed) == ("lazy", (0.8, 0.9), 3)
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        load_config(file, ["seed"])


def test_a_missing_or_broken_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")


@pytest.mark.parametrize("file", sorted((REPO / "configs").glob("*.toml")), ids=lambda file: file.name)
def test_shipped_configurations_load_and_survive_being_written_out(file: Path) -> None:
    config = load_config(file)
    assert config_from(tomllib.loads(to_toml(config))) == config
