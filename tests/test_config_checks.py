"""What `algo.type` sets, and what contradicts it."""

import tomllib
from typing import get_args

import msgspec
import pytest

from thundersync.config import AlgoConfig, AlgoType, Config, EnvConfig, ModelConfig, TeacherConfig
from thundersync.config_checks import PRESETS, check, contradictions
from thundersync.config_file import config_from, to_toml
from thundersync.errors import ConfigError

SMALL: dict[str, object] = {"model": {"name": "m"}, "env": {"path": "p"}}
TEACHERS = {"opd": {"teacher": {"name": "t"}}, "opsd": {"teacher": {"privileged": "solution"}}}


def faults(**sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from(SMALL | sections)
    return str(caught.value)


@pytest.mark.parametrize("kind", get_args(AlgoType))
def test_each_type_runs_with_its_own_defaults_and_spells_them_out(kind: str) -> None:
    config = config_from(SMALL | {"algo": {"type": kind}} | TEACHERS.get(kind, {}))
    for key, value in PRESETS[config.algo.type].items():
        assert getattr(config.algo, key) == value
    assert config_from(tomllib.loads(to_toml(config))) == config


def test_what_the_file_says_wins_over_the_types_default() -> None:
    assert config_from(SMALL | {"algo": {"type": "rloo", "loss_agg": "token_mean"}}).algo.loss_agg == "token_mean"
    assert (
        config_from(SMALL | {"algo": {"type": "opd", "min_group_size": 2}} | TEACHERS["opd"]).algo.min_group_size == 2
    )


@pytest.mark.parametrize(
    ("algo", "told"),
    [
        ({"type": "dr_grpo", "norm_by_std": True}, 'say algo.type = "grpo"'),
        ({"type": "dr_grpo", "norm_by_std": "batch"}, 'say algo.type = "grpo"'),
        ({"type": "dr_grpo", "loss_agg": "token_mean"}, "divides by a constant, not by lengths"),
        ({"type": "rloo", "norm_by_std": True}, "never divides by a deviation"),
        ({"type": "reinforce_pp", "norm_by_std": False}, "mean and deviation of the whole step"),
        ({"type": "reinforce_pp", "zero_variance": "skip"}, "has an advantage here"),
        ({"type": "reinforce_pp", "group_size": 1, "prompts_per_step": 1}, "one reward has no deviation"),
        ({"type": "dapo", "loss_agg": "seq_mean_token_mean"}, "mean over all tokens of the step"),
        ({"type": "grpo", "loss_constant": 100}, 'is for algo.loss_agg = "constant"'),
        ({"type": "grpo", "mismatch": "icepop", "mismatch_low": 2.0}, "is not below"),
        ({"type": "grpo", "group_size": 1}, "relative to its group of one"),
        ({"type": "opd"}, "needs a [teacher]"),
        ({"type": "opsd"}, 'privileged = "solution"'),
    ],
)
def test_a_type_that_its_keys_contradict_is_refused_with_the_remedy(algo: dict[str, object], told: str) -> None:
    assert told in faults(algo=algo)


@pytest.mark.parametrize("kind", ["reinforce_pp", "opd"])
def test_a_group_of_one_is_legal_where_no_group_is_compared(kind: str) -> None:
    assert config_from(SMALL | {"algo": {"type": kind, "group_size": 1}} | TEACHERS.get(kind, {}))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"teacher": {"name": "t"}, "algo": {"type": "grpo"}}, "would never be asked"),
        ({"teacher": {"name": "t", "base_url": "http://h"}}, "both are given"),
        ({"teacher": {"topk": 3}}, "neither is given"),
        ({"teacher": {"base_url": "h:80"}}, "begins with http"),
        ({"teacher": {"base_url": "http://h", "topk": -1}}, "holds the teacher's weights in each trainer worker"),
        ({"teacher": {"base_url": "http://h", "gpus": [0]}}, "a server has its own"),
        ({"teacher": {"name": "t", "topk": -1, "replicas": 2}}, "it is in the trainer workers"),
        ({"teacher": {"name": "t", "tokenizer": "folder"}}, "a named model brings its own"),
        ({"teacher": {"name": "t", "privileged": "solution"}}, 'is for algo.type = "opsd"'),
        ({"teacher": {"name": "t", "kl": "forward"}}, "has the sampled token only"),
        ({"teacher": {"name": "t", "topk": 5, "kl": "mixed", "mix": 1.0}}, 'say teacher.kl = "reverse"'),
        ({"teacher": [{"name": "t", "topk": 5}, {"name": "u"}]}, "one loss is one formula"),
        ({"teacher": [{"name": "t", "topk": -1}, {"name": "u", "topk": -1}]}, "each trainer worker holds one"),
        ({"teacher": {"name": "t"}, "rollout": {"temperature": 0.8}}, "at temperature 1 only"),
        ({"teacher": {"name": "t"}, "stream": {"release": "content"}}, "waits for no reward"),
        ({"teacher": {"name": "t"}, "algo": {"type": "opd", "mismatch": "seq_mask"}}, "before its sequence is whole"),
        ({"teacher": {"name": "t"}, "algo": {"type": "opd", "kl_coef": 0.1, "kl_type": "k1"}}, "taken off the reward"),
        ({"teacher": {"name": "t"}, "algo": {"type": "opd", "norm_by_std": True}}, "no reward is learned from"),
        ({"teacher": {"name": "t"}, "algo": {"type": "opsd"}}, "the teacher is the policy itself"),
        ({"teacher": {"privileged": "solution", "topk": -1}, "algo": {"type": "opsd"}}, "reads what the policy reads"),
        (
            {"teacher": {"name": "t", "gpus": [1]}, "engine": {"gpus": [0]}, "trainer": {"gpus": [1]}},
            "teacher.gpus and",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_with_the_reason(sections: dict[str, object], told: str) -> None:
    assert told in faults(**({"algo": {"type": "opd"}} | sections))


@pytest.mark.parametrize(
    "url",
    ["train.example.org", "ftp://h", "https://", "https://me:secret@h", "https://h:99999", "https://h/?a", "http://[h"],
)
def test_a_public_url_that_nothing_can_be_written_behind_is_refused(url: str) -> None:
    assert "is no base URL" in faults(serve={"public_url": url})


@pytest.mark.parametrize("url", ["https://train.example.org", "http://[fd00::7]:8791/", "https://h:1/door"])
def test_a_public_url_may_have_a_port_and_a_path(url: str) -> None:
    assert config_from(SMALL | {"serve": {"public_url": url}})


def test_the_whole_vocabulary_may_be_compared_at_any_temperature() -> None:
    sections = {"algo": {"type": "opd"}, "teacher": {"name": "t", "topk": -1}, "rollout": {"temperature": 0.8}}
    assert config_from(SMALL | sections)


@pytest.mark.parametrize(
    ("stream", "told"),
    [
        ({"turns": "immediate"}, "needs a teacher"),
        ({"turns": "forward"}, "needs a teacher"),
        ({"mode": "lazy", "turns": "forward"}, 'contradicts stream.mode = "lazy"'),
        ({"mode": "lazy", "release": "content"}, 'contradicts stream.mode = "lazy"'),
        ({"mode": "group", "turns": "immediate"}, 'contradicts stream.mode = "group"'),
        ({"mode": "group", "release": "content"}, 'contradicts stream.mode = "group"'),
    ],
)
def test_a_stream_that_contradicts_itself_is_refused(stream: dict[str, object], told: str) -> None:
    assert told in faults(stream=stream)


def test_groups_are_not_final_by_themselves_where_rewards_of_the_whole_step_are_compared() -> None:
    assert "no group is final by itself" in faults(stream={"mode": "group"}, algo={"type": "reinforce_pp"})


def test_a_configuration_built_in_python_meets_the_same_checks() -> None:
    config = Config(model=ModelConfig(name="m"), env=EnvConfig(path="p"))
    assert list(contradictions(config)) == []
    check(config)
    with pytest.raises(ConfigError, match=r"contradicts algo\.type"):
        check(msgspec.structs.replace(config, algo=AlgoConfig(type="dr_grpo")))
    with pytest.raises(ConfigError, match="would never be asked"):
        check(msgspec.structs.replace(config, teacher=[TeacherConfig(name="t")]))


def test_the_constant_of_the_loss_is_the_most_that_a_rollout_can_sample() -> None:
    def tokens(**algo: object) -> int:
        rollout = {"max_tokens": 100, "max_turns": 5}
        model = {"name": "m", "max_model_len": 400}
        return config_from(
            {"model": model, "env": {"path": "p"}, "rollout": rollout, "algo": algo}
        ).loss_constant_tokens

    assert tokens(type="dr_grpo") == 400
    assert tokens(type="dr_grpo", loss_scale_factor=250) == 250
