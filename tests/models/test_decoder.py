"""The decoder's parts against their formulas in float64."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from reference_engine.models import Decoder, ModelConfig, ModelError  # noqa: E402
from reference_engine.models.config import RopeConfig, llama3_rescale, rope_frequencies  # noqa: E402
from reference_engine.models.decoder import linear, rotate  # noqa: E402

SHAPE = {
    "architecture": "test",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_q_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 8,
    "max_positions": 64,
    "norm": "rms",
    "norm_eps": 1e-5,
    "activation": "silu",
    "gated_mlp": True,
    "rope": RopeConfig(rope_frequencies(8, 100.0)),
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "tied_embeddings": True,
}


def config(**changes) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [64, 1100])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 128, 129, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype, k: int, num_tokens: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(k + num_tokens)
    x, weight = (
        torch.randn(n, k, generator=generator).div(k**0.25).to(dtype).contiguous() for n in (num_tokens, 40)
    )
    bias = torch.randn(40, generator=generator).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    actual = linear(x, weight, bias)
    assert actual.dtype == dtype and actual.shape == (num_tokens, 40)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    strided = linear(x.t().contiguous().t(), weight, bias)
    torch.testing.assert_close(strided.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_neighbours_of_queries_and_keys_only(dtype) -> None:
    shape = config()
    positions = torch.tensor([0, 1, 63, 100_000])
    fused = torch.randn(4, shape.num_heads_fused * 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    angles = positions[:, None, None] * torch.tensor(shape.rope.frequencies, dtype=torch.float64)
    before = fused.clone()
    turned = rotate(fused, torch.polar(torch.ones_like(angles), angles).to(torch.complex64), shape)
    assert torch.equal(fused, before)
    for token, position in enumerate(positions.tolist()):
        for head in range(5):
            for pair in range(4):
                at = 8 * head + 2 * pair
                a, b = before[token, at : at + 2].double().tolist()
                angle = position * 100.0 ** (-2 * pair / 8) if head < 4 else 0.0
                cos, sin = math.cos(angle), math.sin(angle)
                expected = [a * cos - b * sin, a * sin + b * cos]
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                assert turned[token, at : at + 2].tolist() == pytest.approx(
                    expected, rel=tolerance, abs=tolerance
                )
    assert torch.equal(turned[:, 32:], before[:, 32:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-4, 0.0), (100.0, 50.0)])
def test_rms_norm(dtype, scale: float, shift: float) -> None:
    """Rows with a large mean, which LayerNorm alone would take away, and rows so small that eps counts."""
    norm = Decoder(config(), dtype=dtype).final_norm
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32, generator=generator))
    x = (torch.randn(5, 32, generator=generator) * scale + shift).to(dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_llama3_rescaling_keeps_fast_pairs_and_divides_slow_ones() -> None:
    options = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 100}
    turn = 2 * math.pi / 100  # one turn over the original context
    assert llama3_rescale((5 * turn, 4 * turn), **options) == pytest.approx((5 * turn, 4 * turn))
    assert llama3_rescale((turn, turn / 2), **options) == pytest.approx((turn / 8, turn / 16))
    assert llama3_rescale((2.5 * turn,), **options) == pytest.approx((2.5 * turn * (0.5 + 0.5 / 8),))


def test_logits_of_some_rows() -> None:
    decoder = Decoder(config(), dtype=torch.bfloat16)
    rows = torch.randn(3, 32).bfloat16()
    scores = decoder.logits(rows)
    assert scores.dtype == torch.float32 and scores.shape == (3, 50) and scores.is_contiguous()
    assert decoder.logits(rows[:0]).shape == (0, 50)


def test_attend_sees_each_layer_once_in_order() -> None:
    decoder = Decoder(config(num_layers=4))
    seen = []

    def attend(layer, query, key, value):
        seen.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        return torch.zeros_like(query)

    with torch.inference_mode():
        hidden = decoder(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0]), attend)
    assert hidden.shape == (3, 32)
    assert seen == [(layer, (3, 3, 8), (3, 1, 8), (3, 1, 8)) for layer in range(4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_kv_heads": 2}, "num_q_heads must be a multiple of num_kv_heads, got 3 and 2"),
        ({"head_dim": 4}, "head_dim must be a multiple of 8 up to 576, got 4"),
        ({"head_dim": 16}, "rope must have head_dim / 2 = 8 frequencies, got 4"),
        ({"norm_eps": -1.0}, "norm_eps must be at least 0, got -1.0"),
        ({"norm_eps": math.nan}, "norm_eps must be at least 0, got nan"),
    ],
)
def test_configurations_that_do_not_fit(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config(**changes)
