"""vLLM's merge of two partial results against the oracle: LSEs by head, infinities, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_cases import put  # noqa: E402

from paged_ops.compat import vllm  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402
from paged_ops.testing.checks import merge_states  # noqa: E402
from paged_ops.testing.tolerance import Expected, expected_merge  # noqa: E402

SHAPE = (37, 3, 40)


def states(dtype: str, device: str = "cpu") -> tuple[Expected, dict[str, Any]]:
    """What has to come out, and the arguments; the outputs of states without keys hold NaN."""
    out_a, lse_a, out_b, lse_b = merge_states(*SHAPE, dtype)
    lse_a[5], lse_b[5] = -np.inf, -np.inf  # no keys in either
    given = {
        "output": put(np.full_like(out_a, np.nan), device),
        "prefix_output": put(out_a, device),
        "prefix_lse": put(lse_a.T, device),
        "suffix_output": put(out_b, device),
        "suffix_lse": put(lse_b.T, device),
        "output_lse": put(np.full_like(lse_a.T, np.nan), device),
    }
    return expected_merge(out_a, lse_a, out_b, lse_b, dtype), given


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values(target: Target, dtype: str) -> None:
    wanted, given = states(dtype, target.device)
    inputs = {n: t.clone() for n, t in given.items() if not n.startswith("output")}
    with target.use():
        assert vllm.merge_attn_states(*given.values()) is None
    wanted.check(given["output"], given["output_lse"].t())
    assert bool((given["output"][5] == 0).all()) and bool((given["output_lse"][:, 5] == -torch.inf).all())
    assert all(arrays.same_bits(given[name], tensor) for name, tensor in inputs.items())


def test_inf_is_no_keys_too() -> None:
    """FlashAttention gives rows without keys an LSE of inf."""
    wanted, given = states("float32")
    for name in ("prefix_lse", "suffix_lse"):
        given[name][given[name] == -torch.inf] = torch.inf
    vllm.merge_attn_states(**given)
    wanted.check(given["output"], given["output_lse"].t())


def test_without_output_lse() -> None:
    wanted, given = states("float32")
    vllm.merge_attn_states(*list(given.values())[:5])
    wanted.check(given["output"])
    assert given["output_lse"].isnan().all()


@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_over_one_of_the_inputs(side: str) -> None:
    wanted, given = states("bfloat16")
    given |= {"output": given[f"{side}_output"], "output_lse": given[f"{side}_lse"]}
    addresses = given["output"].data_ptr(), given["output_lse"].data_ptr()
    vllm.merge_attn_states(**given)
    wanted.check(given["output"], given["output_lse"].t())
    assert addresses == (given["output"].data_ptr(), given["output_lse"].data_ptr())


@pytest.mark.parametrize("with_context", [0, 1, 20, SHAPE[0]])
def test_tokens_without_a_prefix(with_context: int) -> None:
    """Theirs is the suffix, whatever the prefix holds."""
    wanted, given = states("float32")
    given["prefix_output"][with_context:] = torch.nan
    given["prefix_lse"][:, with_context:] = torch.nan
    vllm.merge_attn_states(**given, prefill_tokens_with_context=with_context)
    head = slice(0, with_context)
    merged = Expected(wanted.out[head], wanted.lse[head], wanted.out_bound[head], wanted.lse_bound[head])
    merged.check(given["output"][head], given["output_lse"][:, head].t())
    assert arrays.same_bits(given["output"][with_context:], given["suffix_output"][with_context:])
    assert arrays.same_bits(given["output_lse"][:, with_context:], given["suffix_lse"][:, with_context:])


def test_no_tokens() -> None:
    _, given = states("float32")
    none = {n: t[:0] if n.endswith("output") else t[:, :0] for n, t in given.items()}
    vllm.merge_attn_states(**none)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "LSE by token": (
        lambda g: {"suffix_lse": g["suffix_lse"].t()},
        ValueError,
        r"^suffix_lse: shape is \(37, 3\), wanted \[3, 37\]",
    ),
    "16-bit LSE": (lambda g: {"prefix_lse": g["prefix_lse"].half()}, TypeError, "^prefix_lse: dtype"),
    "output_lse": (lambda g: {"output_lse": g["output_lse"][:2]}, ValueError, "^output_lse: shape"),
    "flat output": (lambda g: {"output": g["output"].flatten(1)}, ValueError, "^output: shape"),
    "prefix of other heads": (
        lambda g: {"prefix_output": g["prefix_output"][:, :2]},
        ValueError,
        r"output.*\(from paged_ops.merge_attention_states\)",
    ),
    "suffix of another dtype": (
        lambda g: {"suffix_output": g["suffix_output"].half()},
        TypeError,
        r"^suffix_output: dtype.*\(from paged_ops.merge_attention_states\)",
    ),
    "context": (
        lambda g: {"prefill_tokens_with_context": 38},
        ValueError,
        "^prefill_tokens_with_context: is 38, wanted 0 to 37",
    ),
    "8-bit output": (lambda g: {"output_scale": torch.ones(1)}, NotImplementedError, "^output_scale"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input(what: str) -> None:
    _, given = states("float32")
    change, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        vllm.merge_attn_states(**given | change(given))
    assert given["output"].isnan().all() and given["output_lse"].isnan().all()


def test_a_head_dim_that_the_ops_refuse_names_the_op() -> None:
    given = [torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(1, 2), torch.zeros(2, 1, 4)]
    with pytest.raises(ValueError, match="^prefix_output: head_dim is 4.*paged_ops.merge_attention_states"):
        vllm.merge_attn_states(*given, torch.zeros(1, 2))
