import tomllib
from pathlib import Path

import pytest
import tomli_w

from thundersync.config_file import config_from, load_config, read_config, to_toml
from thundersync.config_names import ALIASES
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
    full = {"eval": {"env": {"path": "e"}}, "model": {"name": "m", "lora": {}}}
    config = config_from(SMALL | full | {"algo": {"type": "opd"}, "teacher": {"name": "t"}})
    for target in ALIASES.values():
        place: object = config
        *tables, key = target.split(".")
        for table in tables:
            place = getattr(place, table)
            place = place[0] if isinstance(place, list) else place
        assert hasattr(place, key), target


@pytest.mark.parametrize(
    ("section", "key", "value", "ours", "meant"),
    [
        ("algo", "kl_loss_type", "low_var_kl", "kl_type", "k3"),
        ("algo", "kl_loss_type", "mse", "kl_type", "k2"),
        ("algo", "kl_loss_type", "kl", "kl_type", "k1"),
        ("algo", "kl_type", "k3+", "kl_type", "k2"),
        ("algo", "beta", 0.04, "kl_coef", 0.04),
        ("algo", "entropy_coeff", 0.01, "entropy_coef", 0.01),
        ("algo", "scale_rewards", "batch", "norm_by_std", "batch"),
        ("algo", "scale_rewards", "group", "norm_by_std", True),
        ("algo", "scale_rewards", "none", "norm_by_std", False),
        ("algo", "loss_agg_mode", "seq-mean-token-sum-norm", "loss_agg", "constant"),
        ("algo", "loss_reduction", "sequence_mean", "loss_agg", "seq_mean_token_mean"),
        ("algo", "use_tis", False, "mismatch", "none"),
        ("algo", "filter_zero_advantages", True, "zero_variance", "skip"),
        ("algo", "filter_zero_advantages", False, "zero_variance", "keep"),
        ("trainer", "gradient_checkpointing", True, "activation_checkpointing", True),
        ("optim", "cpu_offload", True, "offload", True),
    ],
)
def test_values_in_other_trainers_words_mean_ours_and_are_noted(
    tmp_path: Path, section: str, key: str, value: object, ours: str, meant: object
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(tomli_w.dumps(SMALL | {section: {key: value}}))
    loaded = read_config(file)
    assert getattr(getattr(loaded.config, section), ours) == meant
    assert loaded.notes


def test_reinforce_plus_plus_is_known_by_its_long_name() -> None:
    config = config_from(SMALL | {"algo": {"adv_estimator": "reinforce_plus_plus"}})
    assert (config.algo.type, config.algo.norm_by_std) == ("reinforce_pp", "batch")


def test_clipping_keys_are_noted_and_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(tomli_w.dumps(SMALL | {"algo": {"clip_ratio_high": 0.28, "epsilon": 0.2, "num_iterations": 1}}))
    loaded = read_config(file)
    assert loaded.config == config_from(SMALL)
    assert any("algo.clip_ratio_high is not kept: clipping is inactive" in note for note in loaded.notes)
    assert any("algo.num_iterations = 1: each rollout is used for exactly one" in note for note in loaded.notes)


def test_what_is_off_is_accepted_and_what_filters_is_refused() -> None:
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert config_from(SMALL | {"rollout": off}) == config_from(SMALL)
    told = faults(SMALL | {"rollout": {"top_k": 20, "min_p": 0.1}, "algo": {"ppo_epochs": 2, "clip_ratio_c": 3.0}})
    assert "rollout.top_k = 20 is not possible here: sampling filters change the policy" in told
    assert "rollout.min_p = 0.1 is not possible here" in told
    assert "algo.ppo_epochs = 2 is not possible here: each rollout is used for exactly one optimizer step" in told
    assert "a dual clip depends on the sign of the advantage" in told


def test_a_loss_that_depends_on_the_micro_batch_is_refused_with_the_reason() -> None:
    assert "not a function of the rollouts alone" in faults(SMALL | {"algo": {"loss_type": "bnpo"}})


def test_one_teacher_is_a_table_and_several_are_a_list_of_them() -> None:
    one = config_from(SMALL | {"algo": {"type": "opd"}, "teacher": {"name": "t"}})
    two = config_from(
        SMALL | {"algo": {"type": "opd"}, "teacher": [{"name": "t", "tasks": "git-*"}, {"base_url": "http://h:1/v1"}]}
    )
    assert [teacher.name for teacher in one.teacher] == ["t"]
    assert [teacher.tasks for teacher in two.teacher] == ["git-*", "*"]
    for config in (one, two):
        assert config_from(tomllib.loads(to_toml(config))) == config
    told = faults(SMALL | {"algo": {"type": "opd"}, "teacher": [{"name": "t"}, {"nme": "u"}]})
    assert "teacher[1].nme is not a setting; did you mean teacher.name?" in told
    assert "teacher is a table, or several" in faults(SMALL | {"teacher": "t"})


def test_a_teacher_is_found_under_its_other_name() -> None:
    config = config_from(SMALL | {"algo": {"type": "opd"}, "distillation": {"teacher": "t"}})
    assert config.teacher[0].name == "t"


def test_one_name_where_names_are_asked_for_is_a_list_of_one() -> None:
    config = config_from({"model": {"name": "m", "lora": {"r": 8, "target_modules": "q_proj"}}, "env": {"path": "p"}})
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.target_modules) == (8, ("q_proj",))
    assert config_from(tomllib.loads(to_toml(config))) == config


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
        ({"engine": {"gpus": [0]}, "trainer": {"gpus": [1, 2], "workers": 3}}, "each GPU has one worker"),
        ({"engine": {"gpus": [0, 0]}, "trainer": {"gpus": [1]}}, "names a GPU twice"),
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
    config = load_config(file, own_tasks="[bench]" in file.read_text())  # which replays its own work
    assert config_from(tomllib.loads(to_toml(config))) == config
