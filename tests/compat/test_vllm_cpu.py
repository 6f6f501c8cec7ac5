"""vLLM's CPU backend by its own calls, write, plan, attend, against the oracle, in its layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_cases import (  # noqa: E402
    as_bytes,
    kv_cache_dtype,
    put,
    put_scale,
)

from paged_ops import reference  # noqa: E402
from paged_ops.compat import vllm  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402
from paged_ops.testing.cases import Case, Inputs, build  # noqa: E402
from paged_ops.testing.checks import expected, rows_to_write  # noqa: E402
from paged_ops.testing.tolerance import expected_attention  # noqa: E402

# A whole prompt, a chunk, one token, none, and more than one chunk of keys.
LENGTHS, QUERIES = (20, 37, 16, 30, 520), (20, 5, 1, 0, 9)
CASES = [
    Case(LENGTHS, QUERIES, num_q_heads=8, block_size=32),
    Case(LENGTHS, QUERIES, dtype="bfloat16", num_q_heads=6, window=7, soft_cap=3.0),
    Case(LENGTHS, QUERIES, dtype="float16", head_dim=80, block_size=32, alibi=True, scale=0.2, padding=2),
    Case(LENGTHS, QUERIES, num_q_heads=8, sinks=True, window=1),
    Case(LENGTHS, QUERIES, dtype="bfloat16", causal=False, block_size=32),
    Case((1, 33, 0, 515), (1, 1, 1, 1), dtype="bfloat16", head_dim=128, num_q_heads=8, block_size=32),
    Case(LENGTHS, QUERIES, dtype="bfloat16", cache_dtype="float8_e4m3fn", block_size=32),
    Case(LENGTHS, QUERIES, cache_dtype="float8_e5m2", scales="tensor", alibi=True),
]


def heads_first(cache: np.ndarray) -> np.ndarray:
    """[num_blocks, block_size, heads, dim] as [num_blocks, heads, block_size, dim]."""
    num_blocks, block_size, heads, dim = cache.shape
    turned = np.empty((num_blocks, heads, block_size, dim), cache.dtype)
    block, token, head, d = np.indices(cache.shape)
    turned[block, head, token, d] = cache[block, token, head, d]
    return turned


def caches_of(inputs: Inputs, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM allocates them: one tensor, in whose blocks each head has its keys and then its values."""
    halves = [as_bytes(heads_first(cache)) for cache in (inputs.key_cache, inputs.value_cache)]
    key_cache, value_cache = put(np.concatenate(halves, axis=2), device).chunk(2, dim=2)
    return key_cache, value_cache


def attention_arguments(inputs: Inputs, device: str = "cpu") -> dict[str, Any]:
    """Of ``cpu_attention_with_kv_cache``, by name."""
    case = inputs.case
    key_cache, value_cache = caches_of(inputs, device)
    rules = {n: None if x is None else put(x, device) for n, x in vars(inputs).items() if n in RULES}
    cu_seqlens_q, seq_lens = put(inputs.cu_seqlens_q, device), put(inputs.seq_lens, device)
    window = -1 if case.window is None else case.window
    plan = vllm.cpu_attn_get_scheduler_metadata(
        len(case.seq_lens), case.num_q_heads, case.num_kv_heads, case.head_dim, seq_lens,
        getattr(torch, case.dtype), cu_seqlens_q, case.causal, window, "vec", True,
    )  # fmt: skip
    plain = case.cache_dtype is None
    return {
        "query": put(inputs.query, device),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "output": put(inputs.new_out(), device),
        "query_start_loc": cu_seqlens_q,
        "seq_lens": seq_lens,
        "scale": case.applied_scale,
        "causal": case.causal,
        "alibi_slopes": rules["alibi_slopes"],
        "sliding_window": window,
        "block_table": put(inputs.block_tables, device),
        "softcap": case.soft_cap or 0.0,
        "scheduler_metadata": plan,
        "s_aux": rules["sinks"],
        "dynamic_causal": None,
        "k_scale": 1.0 if plain else put_scale(inputs.k_scale, device),
        "v_scale": 1.0 if plain else put_scale(inputs.v_scale, device),
        "kv_cache_dtype": kv_cache_dtype(case),
    }


RULES = ("alibi_slopes", "sinks")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(target: Target, case: Case) -> None:
    """Into `output`, and into nothing else; NaN in all unused slots."""
    given = attention_arguments(build(case), target.device)
    before = given["key_cache"].clone(), given["value_cache"].clone()
    address = given["output"].data_ptr()
    with target.use():
        assert vllm.cpu_attention_with_kv_cache(*given.values()) is None
    expected(case).check(given["output"])
    assert given["output"].data_ptr() == address
    assert arrays.same_bits(given["key_cache"], before[0])
    assert arrays.same_bits(given["value_cache"], before[1])


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[6], CASES[7]], ids=str)
def test_write(target: Target, case: Case) -> None:
    """Only the slots that are named; the instruction set's name changes nothing."""
    inputs, wanted = build(case), build(case)
    quantised = case.cache_dtype is not None
    scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale} if quantised else {}
    rows = rows_to_write(case)
    reference.write_kv_cache(*rows[:2], wanted.key_cache, wanted.value_cache, rows[2], **scales)
    for isa in ("amx", "vec16"):
        key_cache, value_cache = caches_of(inputs, target.device)
        options = {"kv_cache_dtype": kv_cache_dtype(case)} if quantised else {}
        options |= {name: put_scale(scale, target.device) for name, scale in scales.items()}
        key, value, slots = (put(x, target.device) for x in rows)
        with target.use():
            vllm.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, **options)
        assert arrays.same_bits(key_cache, as_bytes(heads_first(wanted.key_cache)))
        assert arrays.same_bits(value_cache, as_bytes(heads_first(wanted.value_cache)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_write_then_attend(compiled: bool) -> None:
    """A prompt's own keys and values through both calls, also in one graph, as with vLLM's ops."""
    case = Case((40, 23), (40, 23), dtype="bfloat16", num_q_heads=8, block_size=32)
    inputs = build(case)
    given = attention_arguments(inputs)
    places = [
        (inputs.block_tables[s, t // 32], t % 32) for s, n in enumerate(case.seq_lens) for t in range(n)
    ]
    rows = [put(np.stack([c[p] for p in places])) for c in (inputs.key_cache, inputs.value_cache)]
    slots = torch.tensor([int(block) * 32 + offset for block, offset in places])
    for name in ("key_cache", "value_cache"):
        given[name].fill_(torch.nan)

    def step(arguments: dict[str, Any]) -> torch.Tensor:
        caches = arguments["key_cache"], arguments["value_cache"]
        vllm.cpu_attn_reshape_and_cache(*rows, *caches, slots, "amx")
        vllm.cpu_attention_with_kv_cache(**arguments)
        return arguments["output"] + 1

    if compiled:
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    result = step(given)
    expected(case).check(given["output"])
    assert torch.equal(result, given["output"] + 1)


def test_bfloat16_sinks() -> None:
    inputs = build(CASES[3])
    given = attention_arguments(inputs)
    given["s_aux"] = given["s_aux"].bfloat16()
    vllm.cpu_attention_with_kv_cache(**given)
    inputs.sinks[:] = given["s_aux"].float().numpy()
    expected_attention(inputs).check(given["output"])


@pytest.mark.parametrize("window", [(-1, -1), (6, 0), (0, 0)])
def test_window_as_a_pair(window: tuple[int, int]) -> None:
    """(tokens before, after), as older releases have it."""
    case = Case(LENGTHS, QUERIES, window=window[0] + 1 if window[0] >= 0 else None)
    given = attention_arguments(build(case)) | {"sliding_window": window}
    vllm.cpu_attention_with_kv_cache(**given)
    expected(case).check(given["output"])


@pytest.mark.parametrize("causal", [True, False])
def test_dynamic_causal_takes_the_place_of_causal(causal: bool) -> None:
    case = Case(LENGTHS, QUERIES, causal=causal)
    given = attention_arguments(build(case))
    given |= {"causal": not causal, "dynamic_causal": torch.full((len(LENGTHS),), int(causal)).int()}
    vllm.cpu_attention_with_kv_cache(**given)
    expected(case).check(given["output"])


def test_metadata_says_nothing() -> None:
    given = attention_arguments(build(CASES[0]))
    plan = given["scheduler_metadata"]
    assert plan.dtype == torch.int8 and plan.device.type == "cpu" and plan.numel() == 0
    vllm.cpu_attention_with_kv_cache(**given | {"scheduler_metadata": torch.zeros(9, dtype=torch.int8)})
    expected(CASES[0]).check(given["output"])


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "sequences of both kinds": (
        lambda a: {"dynamic_causal": torch.tensor([0, 1, 1, 1, 1])},
        NotImplementedError,
        "^dynamic_causal: .*paged_ops.paged_attention",
    ),
    "a window without causal": (
        lambda a: {"causal": False, "sliding_window": 7},
        NotImplementedError,
        "^sliding_window: .*both sides.*paged_ops.paged_attention",
    ),
    "tokens first": (
        lambda a: {"key_cache": a["key_cache"].flatten(2)},
        ValueError,
        r"^key_cache: shape is .*wanted \[num_blocks, num_kv_heads, block_size, head_dim\]",
    ),
    "output of other heads": (
        lambda a: {"output": a["output"][:, 1:]},
        ValueError,
        r"^output: shape.*\(from paged_ops.paged_attention\)",
    ),
    "int64 offsets": (
        lambda a: {"query_start_loc": a["query_start_loc"].long()},
        TypeError,
        "^query_start_loc: dtype is int64, wanted int32",
    ),
    "int64 table": (lambda a: {"block_table": a["block_table"].long()}, TypeError, "^block_table: dtype"),
    "a block that is none": (
        lambda a: {"block_table": a["block_table"].clone().fill_(10**6)},
        ValueError,
        "^block_table.*1000000",
    ),
    "a soft cap below 0": (lambda a: {"softcap": -1.0}, ValueError, "^softcap"),
    "sinks of other heads": (lambda a: {"s_aux": torch.zeros(3)}, ValueError, "^s_aux: shape"),
    "another format": (
        lambda a: {"kv_cache_dtype": "int4"},
        NotImplementedError,
        "^kv_cache_dtype: is 'int4'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input(what: str) -> None:
    given = attention_arguments(build(CASES[0]))
    change, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        vllm.cpu_attention_with_kv_cache(**given | change(given))
    assert given["output"].isnan().all()


def test_bad_write() -> None:
    given = attention_arguments(build(CASES[0]))
    caches = given["key_cache"], given["value_cache"]
    before = [cache.clone() for cache in caches]
    key = torch.zeros(1, 2, 64)
    write = vllm.cpu_attn_reshape_and_cache
    with pytest.raises(ValueError, match="^value_cache: shape"):
        write(key, key, caches[0], caches[1][0], torch.zeros(1, dtype=torch.int64), "vec")
    with pytest.raises(TypeError, match=r"^slot_mapping: dtype is int32.*\(from paged_ops.write_kv_cache\)"):
        write(key, key, *caches, torch.zeros(1, dtype=torch.int32), "vec")
    with pytest.raises(TypeError, match="^key_cache: dtype is torch.float32, and kv_cache_dtype 'fp8_e5m2'"):
        write(key, key, *caches, torch.zeros(1, dtype=torch.int64), "vec", kv_cache_dtype="fp8_e5m2")
    assert all(map(arrays.same_bits, before, caches))
