"""The sampler: exact distributions, ties, keys, and that a row never depends on its neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reference_engine.sampler import distribution, sample, uniform
from reference_engine.sampling_params import SamplingParams


def defined_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The module's six steps, written down once more in the plainest way."""
    scaled = [(x - max(logits)) / params.temperature for x in logits]
    total = sum(math.exp(s) for s in scaled)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = [(i, math.exp(scaled[i]) / total) for i in order]
    if params.top_k:
        kept = kept[: params.top_k]
    mass, need = 0.0, params.top_p * sum(p for _, p in kept)
    for count, (_, p) in enumerate(kept, start=1):
        mass += p
        if params.top_p < 1 and mass >= need:
            kept = kept[:count]
            break
    kept = [(i, p) for i, p in kept if p >= params.min_p * kept[0][1]]
    result = [0.0] * len(logits)
    for i, p in kept:
        result[i] = p / sum(p for _, p in kept)
    return result


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999999),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05),
]


def rows(n: int, vocab: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * scale).astype(np.float32)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_distribution_is_the_defined_one(params: SamplingParams, ties: bool) -> None:
    for row in rows(5, 40):
        if ties:  # few distinct values, so that every cut falls among equals
            row = np.round(row)
        expected = defined_distribution([float(x) for x in row], params)
        np.testing.assert_allclose(distribution(row, params), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Pearson's chi-square, to five standard deviations; with fixed keys it passes or fails for good."""
    draws = 10000
    row = rows(1, 30, seed=1)
    probabilities = distribution(row[0], params)
    tokens, _ = sample(row.repeat(draws, axis=0), [params] * draws, [(7, 0, i) for i in range(draws)])
    counts = np.bincount(tokens, minlength=30)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * draws
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)


def test_the_chi_square_test_can_fail() -> None:
    """Tokens drawn at a slightly other temperature are told apart."""
    with pytest.raises(AssertionError):
        actual, claimed = SamplingParams(temperature=1.0), SamplingParams(temperature=1.1)
        row = rows(1, 30, seed=1)
        tokens, _ = sample(row.repeat(20000, axis=0), [actual] * 20000, [(7, 0, i) for i in range(20000)])
        expected = distribution(row[0], claimed) * 20000
        chi_square = ((np.bincount(tokens, minlength=30) - expected) ** 2 / expected).sum()
        assert chi_square <= 29 + 5 * math.sqrt(58)


@pytest.mark.parametrize("vocab", [1, 2, 1000, 50000])
def test_a_row_depends_on_nothing_but_itself(vocab: int) -> None:
    batch = rows(len(PARAMS), vocab, seed=2)
    keys = [(seed, seed % 3, 10 * seed) for seed in range(len(PARAMS))]
    together, _ = sample(batch, PARAMS, keys)
    backwards, _ = sample(batch[::-1], PARAMS[::-1], keys[::-1])
    alone = [sample(batch[i : i + 1], [PARAMS[i]], [keys[i]])[0][0] for i in range(len(PARAMS))]
    assert together == backwards[::-1] == alone
    columns_first = np.asfortranarray(batch)
    assert sample(columns_first, PARAMS, keys)[0] == together


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    row = np.array([[0, 3, 1, 3, -np.inf, 3]], dtype=np.float32)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, top_k=3, top_p=0.1),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-300),
    ):
        for position in range(20):
            assert sample(row, [params], [(0, 0, position)])[0] == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    row = np.array([-3e38, 5.0, 3e38, -np.inf], dtype=np.float32)
    probabilities = distribution(row, params)
    assert probabilities.sum() == pytest.approx(1) and probabilities[3] == 0
    if temperature <= 1e-3:
        assert probabilities[2] == 1
    else:
        np.testing.assert_allclose(probabilities[:3], 1 / 3)


def test_excluded_tokens_are_never_drawn() -> None:
    row = np.full((1, 50), -np.inf, dtype=np.float32)
    row[0, [3, 40]] = 0.0
    tokens, _ = sample(row.repeat(500, axis=0), [SamplingParams()] * 500, [(1, 0, i) for i in range(500)])
    assert set(tokens) == {3, 40}


def test_a_nucleus_ends_where_its_mass_is_reached() -> None:
    row = np.zeros(8, dtype=np.float32)
    for top_p, kept in ((0.125, 1), (0.25, 2), (0.2500001, 3), (0.5, 4), (0.875, 7), (0.88, 8)):
        probabilities = distribution(row, SamplingParams(top_p=top_p))
        np.testing.assert_array_equal(probabilities > 0, np.arange(8) < kept)


@pytest.mark.parametrize(("u", "token"), [(0.0, 2), (0.5 - 2**-53, 2), (0.5, 5), (1 - 2**-53, 5)])
def test_the_ends_of_the_line(u: float, token: int, monkeypatch) -> None:
    """Tokens without probability lie before, between and behind; no number falls on one."""
    monkeypatch.setattr("reference_engine.sampler.uniform", lambda *key: u)
    row = np.full((1, 8), -np.inf, dtype=np.float32)
    row[0, [2, 5]] = 1.0
    assert sample(row, [SamplingParams()], [(0, 0, 0)])[0] == [token]


def test_the_largest_number_still_falls_on_a_token() -> None:
    largest = 1 - 2**-53
    totals = np.random.default_rng(0).uniform(1, 50000, 100_000)
    totals = np.concatenate([totals, 2.0 ** np.arange(16), np.nextafter(2.0 ** np.arange(16), 1e9)])
    assert (largest * totals < totals).all()


def test_random_numbers_hang_on_every_part_of_the_key() -> None:
    keys = [(s, i, p) for s in (0, 1, 2**64 - 1) for i in range(4) for p in range(50)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0 <= u < 1 for u in numbers)
    assert [uniform(*key) for key in reversed(keys)] == numbers[::-1]


def test_random_numbers_are_pinned() -> None:
    """Seeds must go on giving the same texts with other releases and on other machines."""
    assert [uniform(0, 0, 0), uniform(1, 2, 3), uniform(2**64 - 1, 7, 10**6)] == [
        0.011546754286331562,
        0.6527702009682942,
        0.5896864800711731,
    ]


def test_random_numbers_are_even() -> None:
    numbers = np.array([uniform(5, sample_index, p) for sample_index in range(4) for p in range(5000)])
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() <= 49 + 5 * math.sqrt(98)
    series = numbers.reshape(4, 5000)
    correlations = np.corrcoef(np.vstack([series, np.roll(series, 1, axis=1)]))
    assert np.abs(correlations - np.eye(8)).max() < 0.06


def test_logprobs_are_of_the_models_own_distribution() -> None:
    row = rows(1, 100, seed=3)
    params = SamplingParams(temperature=0.5, top_k=3, logprobs=True)
    tokens, logprobs = sample(row, [params], [(1, 0, 0)])
    exact = row[0].astype(np.float64)
    assert logprobs[0] == pytest.approx(exact[tokens[0]] - np.log(np.exp(exact).sum()), rel=1e-12)
    _, without = sample(row, [SamplingParams()], [(1, 0, 0)])
    assert math.isnan(without[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", PARAMS + [SamplingParams(temperature=0)], ids=str)
def test_scores_that_are_no_numbers_are_refused(bad: float, params: SamplingParams) -> None:
    batch = rows(3, 20)
    batch[1, 13] = bad
    with pytest.raises(ValueError, match="row 1 .*finite.*token 13"):
        sample(batch, [params] * 3, [(0, 0, 0)] * 3)
    batch[1] = -np.inf
    with pytest.raises(ValueError, match="row 1 "):
        sample(batch, [params] * 3, [(0, 0, 0)] * 3)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="one entry per row of logits, 2; got 1 and 2"):
        sample(rows(2, 5), [SamplingParams()], [(0, 0, 0)] * 2)
    with pytest.raises(ValueError, match=r"logits must be float32 \[n, vocab\], got float64 \[2, 5\]"):
        sample(rows(2, 5).astype(np.float64), [SamplingParams()] * 2, [(0, 0, 0)] * 2)
    with pytest.raises(ValueError, match="logits must be"):
        sample(rows(2, 5)[0], [SamplingParams()], [(0, 0, 0)])
    assert sample(rows(0, 5), [], []) == ([], [])


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    batch = rows(4, 64)
    params, keys = [SamplingParams()] * 4, [(3, 0, i) for i in range(4)]
    assert sample(torch.from_numpy(batch), params, keys)[0] == sample(batch, params, keys)[0]
