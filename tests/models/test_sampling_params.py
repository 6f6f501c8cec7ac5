"""SamplingParams: what is taken, and how what is not taken is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from reference_engine.sampling_params import SamplingParams

BAD = [
    ({"temperature": -0.1}, ValueError, "temperature must be 0 .greedy. or positive, got -0.1"),
    ({"temperature": math.nan}, ValueError, "temperature must be finite"),
    ({"temperature": math.inf}, ValueError, "temperature must be finite"),
    ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
    ({"temperature": True}, TypeError, "temperature must be a number, got True"),
    ({"top_k": -1}, ValueError, "top_k must be at least 0, got -1"),
    ({"top_k": 1.5}, TypeError, "top_k must be an integer, got 1.5"),
    ({"top_p": 0}, ValueError, r"top_p must be in \(0, 1\], got 0"),
    ({"top_p": 1.01}, ValueError, r"top_p must be in \(0, 1\], got 1.01"),
    ({"min_p": 1.5}, ValueError, r"min_p must be in \[0, 1\], got 1.5"),
    ({"min_p": -0.5}, ValueError, r"min_p must be in \[0, 1\], got -0.5"),
    ({"seed": -1}, ValueError, "seed must be in 0..18446744073709551615, got -1"),
    ({"seed": 2**64}, ValueError, "seed must be in 0..18446744073709551615"),
    ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
    ({"n": 0}, ValueError, "n must be in 1..1024, got 0"),
    ({"n": 1025}, ValueError, "n must be in 1..1024, got 1025"),
    ({"n": True}, TypeError, "n must be an integer, got True"),
    ({"stop": ""}, ValueError, "stop must not contain an empty string"),
    ({"stop": ["a", 3]}, TypeError, "stop must be a string or strings, got 3"),
    ({"stop": 3}, TypeError, "stop must be a list or tuple, got 3"),
    ({"stop_token_ids": 3}, TypeError, "stop_token_ids must be a list or tuple, got 3"),
    ({"stop_token_ids": [1, -2]}, ValueError, r"stop_token_ids\[1\] must be at least 0, got -2"),
    ({"stop_token_ids": "12"}, TypeError, "stop_token_ids must be a list or tuple, got '12'"),
    ({"ignore_eos": 1}, TypeError, "ignore_eos must be True or False, got 1"),
    ({"logprobs": 5}, TypeError, "logprobs must be True or False, got 5"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD, ids=[str(fields) for fields, _, _ in BAD])
def test_bad_values(fields: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_values_are_normalised() -> None:
    np = pytest.importorskip("numpy")
    params = SamplingParams(
        temperature=1, top_k=np.int32(5), stop="end", stop_token_ids=[np.int64(3)], seed=np.uint64(2**64 - 1)
    )
    assert params.stop == ("end",) and params.stop_token_ids == (3,) and params.seed == 2**64 - 1
    assert type(params.temperature) is float and type(params.top_k) is int and type(params.seed) is int
    assert hash(params) == hash(SamplingParams(top_k=5, stop=["end"], stop_token_ids=(3,), seed=2**64 - 1))


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=1e-9).greedy


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, reference_engine.sampling_params;"
        "print(any(module in sys.modules for module in ('torch', 'numpy')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
