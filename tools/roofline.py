"""A roofline model of the CUDA kernels: what must move and run, and the time that the launch makes of it.

For a kernel and a shape: bytes of memory, operations, launches, CTAs without work, and a predicted time by a
fluid simulation of the grid. CTAs stream their keys under six limits: the memory's rate, the rates from L2 to
a multiprocessor and from its shared memory to its warps, what a CTA's ring of copies can have under way, the
instructions that can be issued, and the matrix units.
**Nothing here is measured.** Peaks are the vendors' figures, latencies are assumptions (`Latency`): the model
ranks launch policies and shows what bounds a kernel. Pure functions; `tools/audit.py` prints the table.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TILE_TOKENS = 16
CHUNK_TOKENS = 512  # attention_args.h
CHUNK_OVERHEAD_TILES = 4  # work_line.cuh
CHUNK_COST = CHUNK_TOKENS // TILE_TOKENS + CHUNK_OVERHEAD_TILES
PREFILL_CTAS = 264  # attention_config.h
SPLIT_COLUMN_TILES, MAX_SPLIT_HEAD_DIM = 8, 128
MAX_WORKSPACE_NBYTES = 1 << 30
STATIC_CTAS = 4096  # of the static grid that the table compares with


@dataclass(frozen=True)
class Chip:
    """Public peak figures."""

    name: str
    arch: str
    bytes_per_second: float
    multiprocessors: int
    hertz: float  # boost
    matrix_flops: float  # dense, 16-bit, per second

    @property
    def bytes_per_clock(self) -> float:
        return self.bytes_per_second / self.hertz

    @property
    def flops_per_clock(self) -> float:
        """Of a multiprocessor."""
        return self.matrix_flops / self.hertz / self.multiprocessors


CHIPS = (
    Chip("A100", "sm_80", 2.039e12, 108, 1.41e9, 312e12),
    Chip("H100", "sm_90", 3.35e12, 132, 1.98e9, 989e12),
    Chip("H200", "sm_90", 4.8e12, 132, 1.98e9, 989e12),
)


@dataclass(frozen=True)
class Latency:
    """Assumed clocks, from a prototype's model."""

    start: int = 2200  # of a CTA, or of a chunk in one, until its first bytes arrive
    end: int = 1800  # folding the warps' states of a chunk
    empty: int = 800  # a CTA that finds nothing to do
    merge: int = 2000  # folding the chunks of a row ...
    merge_chunk: int = 19  # ... and for each of them: 300 from L2, 16 at a time
    memory: int = 2100  # from asking for bytes to having them, under load: 1.1 us


LATENCY = Latency()
L2_BYTES_PER_CLOCK = 64  # to a multiprocessor
SHARED_BYTES_PER_CLOCK = 128  # to its warps, each of which reads all that it meets
ISSUE_PER_CLOCK = 4


@dataclass(frozen=True)
class Kernel:
    """What the audit knows of a compiled attention kernel."""

    columns: int  # (query token, head) pairs that share a pass over the keys
    ctas: int  # per multiprocessor
    ring_nbytes: int  # of a CTA: copies under way
    loop: int  # instructions per tile of 16 tokens, of a warp
    warps: int = 1  # that meet each tile, with as many columns each


@dataclass(frozen=True)
class Attention:
    """A call: `query_lens` None is decode. `capacity`: tokens that a row of the block table has room for."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    itemsize: int = 2
    capacity: int = 0
    window: int = 0  # 0: none; else the kernel for rules

    @property
    def max_chunks(self) -> int:
        return max(1, -(-max(self.capacity, *self.seq_lens) // CHUNK_TOKENS))

    @property
    def num_tokens(self) -> int:
        return len(self.seq_lens) if self.query_lens is None else sum(self.query_lens)

    @property
    def token_nbytes(self) -> int:
        """K and V of one KV head."""
        return 2 * self.head_dim * self.itemsize

    @property
    def queries(self) -> tuple[int, ...]:
        return self.query_lens or (1,) * len(self.seq_lens)

    def first_key(self, position: int) -> int:
        """That a query token at this position sees."""
        return max(0, position - self.window + 1) if self.window else 0

    @property
    def kv_nbytes(self) -> int:
        tokens = sum(n - self.first_key(n - q) for n, q in zip(self.seq_lens, self.queries, strict=True))
        return tokens * self.num_kv_heads * self.token_nbytes

    @property
    def memory_nbytes(self) -> int:
        """All that must cross the memory's pins: K and V once, query and output."""
        rows = self.num_tokens * self.num_kv_heads * self.group
        return self.kv_nbytes + 2 * rows * self.head_dim * self.itemsize

    @property
    def flops(self) -> int:
        """Of pairs that see each other: two products of two operations per dim."""
        pairs = sum(
            p + 1 - self.first_key(p)
            for n, q in zip(self.seq_lens, self.queries, strict=True)
            for p in range(n - q, n)
        )
        return 4 * pairs * self.head_dim * self.num_kv_heads * self.group

    def places(self, columns: int) -> list[int]:
        """Keys that each (tile of columns, KV head) walks, in the grid's order.

        With a window, from the first tile of it on: as if the grid of chunks began there.
        """
        keys = []
        for length, tokens in zip(self.seq_lens, self.queries, strict=True):
            for first in range(0, tokens * self.group, columns):
                last = min(first + columns, tokens * self.group) - 1
                begin = self.first_key(length - tokens + first // self.group) // TILE_TOKENS * TILE_TOKENS
                end = max(0, length - tokens + last // self.group + 1)
                keys += [end - begin] * self.num_kv_heads
        return keys


# ---- launch policies -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cta:
    """Tokens that a CTA streams in `chunks` pieces; `merges`: chunks that it folds as the last of a row."""

    tokens: int = 0
    chunks: int = 0
    merges: int = 0


def num_chunks(keys: int) -> int:
    return max(1, -(-keys // CHUNK_TOKENS))


def chunk_tokens(keys: int, chunk: int) -> int:
    return max(0, min(CHUNK_TOKENS, keys - chunk * CHUNK_TOKENS))


def one_cta_per_place(places: Sequence[int]) -> list[Cta]:
    return [Cta(keys, num_chunks(keys)) for keys in places]


def static_grid(places: Sequence[int], splits: int) -> list[Cta]:
    """`splits` CTAs for each place, whatever its length: those beyond its chunks find nothing to do."""
    ctas = []
    for split in range(splits):
        for keys in places:
            mine = range(split, num_chunks(keys), splits)
            last = num_chunks(keys) > 1 and split == min(splits, num_chunks(keys)) - 1
            ctas.append(
                Cta(sum(chunk_tokens(keys, c) for c in mine), len(mine), num_chunks(keys) if last else 0)
            )
    return ctas


def place_cost(keys: int) -> int:
    """In tiles; a chunk costs some more than its tiles."""
    return -(-keys // TILE_TOKENS) + num_chunks(keys) * CHUNK_OVERHEAD_TILES


def work_list(places: Sequence[int], num_ctas: int) -> list[Cta]:
    """CTA i does the chunks that begin in the i-th of `num_ctas` equal parts of the line of work."""
    costs = [place_cost(keys) for keys in places]
    part = -(-sum(costs) // num_ctas)
    tokens, chunks, merges = [0] * num_ctas, [0] * num_ctas, [0] * num_ctas
    begin = 0
    for keys, cost in zip(places, costs, strict=True):
        owners = [(begin + c * CHUNK_COST) // part for c in range(num_chunks(keys))]
        for chunk, owner in enumerate(owners):
            tokens[owner] += chunk_tokens(keys, chunk)
            chunks[owner] += 1
        if owners[0] != owners[-1]:
            merges[owners[-1]] += len(owners)
        begin += cost
    return [Cta(*parts) for parts in zip(tokens, chunks, merges, strict=True)]


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Bytes per clock: of the chip, of a multiprocessor, of a CTA."""

    chip: float
    multiprocessor: float
    cta: float


def simulate(ctas: Sequence[Cta], token_nbytes: int, multiprocessors: int, slots: int, limits: Limits,
             latency: Latency = LATENCY) -> float:  # fmt: skip
    """Clocks until all CTAs are done. They start in order wherever a slot is free, and share rates alike."""
    waiting = iter(ctas)
    now, serial = 0.0, 0
    events: list[tuple[float, int, int, Cta, bool]] = []  # when, tie, multiprocessor, CTA, whether it streams
    streams: dict[int, list[float]] = {}  # bytes left, the CTA's own limit, its multiprocessor
    running: dict[int, Cta] = {}
    streams_of = [0] * multiprocessors

    def start(place: int) -> None:
        nonlocal serial
        if (cta := next(waiting, None)) is None:
            return
        serial += 1
        delay = latency.start if cta.chunks else latency.empty
        heapq.heappush(events, (now + delay, serial, place, cta, cta.chunks > 0))

    for _ in range(slots):
        for place in range(multiprocessors):
            start(place)
    while events or streams:
        rates: dict[int, float] = {}
        if streams:
            share = limits.chip / len(streams)
            for key, (_, own, place) in streams.items():
                rates[key] = min(own, limits.multiprocessor / streams_of[int(place)])
            spare = limits.chip / sum(rates.values())
            if spare < 1:  # memory is the limit: equal shares, and what some cannot use goes to the others
                capped = {key: min(rate, share) for key, rate in rates.items()}
                left = limits.chip - sum(capped.values())
                room = sum(rates[key] - capped[key] for key in rates)
                rates = {key: capped[key] + (rates[key] - capped[key]) * left / room for key in rates}
        done = min((now + streams[key][0] / rates[key] for key in streams), default=float("inf"))
        then = min(done, events[0][0] if events else float("inf"))
        for key, stream in streams.items():
            stream[0] -= rates[key] * (then - now)
        now = then
        for key in [key for key, stream in streams.items() if stream[0] < 1]:
            place, cta = int(streams.pop(key)[2]), running.pop(key)
            streams_of[place] -= 1
            after = latency.end + (latency.merge + latency.merge_chunk * cta.merges if cta.merges else 0)
            heapq.heappush(events, (now + after, key, place, cta, False))
        while events and events[0][0] <= now:
            _, key, place, cta, begins = heapq.heappop(events)
            if begins and cta.tokens:
                # Between its chunks a CTA pauses; others fill the gap where memory is the limit.
                nbytes = cta.tokens * token_nbytes
                pauses = (cta.chunks - 1) * (latency.start + latency.end)
                streams[key] = [nbytes, nbytes / (nbytes / limits.cta + pauses), place]
                running[key] = cta
                streams_of[place] += 1
            else:
                start(place)
    return now


@dataclass(frozen=True)
class Prediction:
    """What the model says of a shape: seconds, and the share of the rooflines that they are."""

    shape: Attention
    chip: Chip
    launches: int
    num_ctas: int
    empty_ctas: int
    seconds: float
    bound: str

    @property
    def of_bandwidth(self) -> float:
        return self.shape.memory_nbytes / self.chip.bytes_per_second / self.seconds

    @property
    def of_matrix_peak(self) -> float:
        return self.shape.flops / self.chip.matrix_flops / self.seconds

    @property
    def of_roofline(self) -> float:
        """Of whichever of the two is lower for this shape."""
        return max(self.of_bandwidth, self.of_matrix_peak)


def plan(shape: Attention) -> tuple[int, bool]:
    """Columns that share a pass over the keys, and whether CTAs share chunks, as in attention_config.h."""
    num_seqs = len(shape.seq_lens)
    rows = shape.group * shape.num_tokens
    few_tokens = shape.query_lens is None or shape.num_tokens <= 8 * num_seqs
    workspace = rows * shape.num_kv_heads * shape.max_chunks * (4 * shape.head_dim + 8)
    can_share = shape.max_chunks > 1 and workspace <= MAX_WORKSPACE_NBYTES

    def num_places(columns: int) -> int:
        return (rows // columns + num_seqs + 1) * shape.num_kv_heads

    wide = shape.itemsize == 2 and rows > 8 * num_seqs
    most = 8 * SPLIT_COLUMN_TILES
    split = (
        wide
        and not few_tokens
        and shape.head_dim <= MAX_SPLIT_HEAD_DIM
        and rows >= most * num_seqs
        and num_places(most) >= (1 if can_share else 2) * PREFILL_CTAS
    )
    columns = most if split else 16 if wide else 8
    enough = (2 if split else 1) * PREFILL_CTAS
    return columns, can_share and (few_tokens or num_places(columns) < enough)


def launch(shape: Attention, kernel: Kernel, chip: Chip) -> tuple[list[Cta], int]:
    """The CTAs that attention_config.h asks for, and the number of launches."""
    places = shape.places(kernel.columns)
    if not plan(shape)[1]:
        return one_cta_per_place(places[::-1]), 1
    most = len(places) * shape.max_chunks
    return work_list(places, min(chip.multiprocessors * kernel.ctas, most)), 2


def predict(shape: Attention, kernel: Kernel, chip: Chip, ctas: Sequence[Cta], launches: int) -> Prediction:
    """Time of the CTAs; launches behind one another (`launches`) are counted, not timed."""
    streamed = sum(cta.tokens for cta in ctas) * shape.token_nbytes
    tile_nbytes = TILE_TOKENS * shape.token_nbytes
    issue = tile_nbytes / (kernel.warps * kernel.loop / ISSUE_PER_CLOCK)
    shared = SHARED_BYTES_PER_CLOCK / kernel.warps
    matrix = tile_nbytes / (4 * TILE_TOKENS * shape.head_dim * kernel.columns / chip.flops_per_clock)
    # What several CTAs read, memory gives once; the others find it in L2.
    memory = chip.bytes_per_clock * max(1.0, streamed / max(1, shape.kv_nbytes))
    limits = Limits(
        memory, min(L2_BYTES_PER_CLOCK, shared, issue, matrix), kernel.ring_nbytes / LATENCY.memory
    )
    clocks = simulate(ctas, shape.token_nbytes, chip.multiprocessors, kernel.ctas, limits)
    rates = {
        "memory": memory,
        "L2": L2_BYTES_PER_CLOCK * chip.multiprocessors,
        "shared memory": shared * chip.multiprocessors,
        "issue": issue * chip.multiprocessors,
        "matrix": matrix * chip.multiprocessors,
        "in flight": limits.cta * kernel.ctas * chip.multiprocessors,
    }
    bound = min(rates, key=lambda what: rates[what])
    if clocks > 2 * streamed / rates[bound]:
        bound = "latency"
    empty = sum(cta.chunks == 0 for cta in ctas)
    return Prediction(shape, chip, launches, len(ctas), empty, clocks / chip.hertz, bound)


def moved(nbytes: float, chip: Chip, in_flight: float) -> float:
    """Seconds of a kernel that only moves bytes, at that many under way per multiprocessor."""
    rate = min(chip.bytes_per_clock, in_flight / LATENCY.memory * chip.multiprocessors)
    return (nbytes / rate + LATENCY.start + LATENCY.end) / chip.hertz


# ---- shapes --------------------------------------------------------------------------------------

SHAPES = (
    Attention("decode 64 x 4096", (4096,) * 64),
    Attention("decode 64 x 4096, group 1", (4096,) * 64, group=1),
    Attention("decode 64 x 4096, group 16", (4096,) * 64, group=16),
    Attention("decode 64 x 4096, D 64", (4096,) * 64, head_dim=64),
    Attention("decode 64 x 4096, D 256", (4096,) * 64, head_dim=256),
    Attention("decode 256 x 1024", (1024,) * 256),
    Attention("decode 8 x 4096", (4096,) * 8),
    Attention("decode 1 x 131072", (131072,)),
    Attention("decode 1 x 131072, 1 KV head", (131072,), num_kv_heads=1),
    Attention("decode 63 x 512 + 1 x 65536", (512,) * 63 + (65536,)),
    Attention("decode 64 x 512..32768", tuple(512 * (i + 1) for i in range(64))),
    Attention("verify 16 x 8 of 8192", (8192,) * 16, (8,) * 16),
    Attention("prefill 1 x 4096", (4096,), (4096,)),
    Attention("prefill 1 x 4096, D 64", (4096,), (4096,), head_dim=64),
    Attention("prefill 1 x 4096, D 256", (4096,), (4096,), head_dim=256),
    Attention("prefill 2048 of 32768", (32768,), (2048,)),
    Attention("prefill 512 of 32768", (32768,), (512,)),
    Attention("decode 64 x 4096, window 1024", (4096,) * 64, window=1024),
    Attention("prefill 1 x 4096, window 1024", (4096,), (4096,), window=1024),
)


@dataclass(frozen=True)
class Move:
    """An op that only moves bytes: read and written, and bytes under way per multiprocessor."""

    name: str
    nbytes: int
    kernel: str  # the audit's name for it


MOVES = (
    Move("cache write, 64 tokens", 64 * 4 * 8 * 128 * 2, "cache_write_kernel<uint4, HeadRows>"),
    Move("cache write, 8192 tokens", 8192 * 4 * 8 * 128 * 2, "cache_write_kernel<uint4, HeadRows>"),
    Move("block copy, 64 x 2 MiB", 64 * 2 * (2 << 20), "block_copy_kernel<uint4>"),
    Move("gather, 64 x 4096 tokens", 64 * 4096 * 4 * 8 * 128 * 2, "gather_kernel<uint4, HeadRows>"),
)


def attention_rows(kernels: Mapping[tuple[str, int, int, bool], Kernel]) -> list[list[str]]:
    """The table of attention. `kernels`: by chip's architecture, head dim, columns and whether for rules."""
    rows = [["bf16, 8 KV heads, group 4, D 128", "chip", "MB", "GFLOP", "launches", "CTAs", "empty", "us",
             "of bandwidth", "of matrix peak", "bound by", "static grid"]]  # fmt: skip
    for shape in SHAPES:
        for chip in CHIPS:
            kernel = kernels.get((chip.arch, shape.head_dim, plan(shape)[0], shape.window > 0))
            if kernel is None:
                continue
            ctas, launches = launch(shape, kernel, chip)
            now = predict(shape, kernel, chip, ctas, launches)
            before = ""
            if launches == 2:
                places = shape.places(kernel.columns)
                grid = static_grid(places, min(shape.max_chunks, -(-STATIC_CTAS // len(places))))
                before = f"{predict(shape, kernel, chip, grid, 2).of_bandwidth:.2f}"
            rows.append(
                [shape.name, chip.name, f"{shape.memory_nbytes / 1e6:.0f}", f"{shape.flops / 1e9:.1f}",
                 str(launches), str(now.num_ctas), str(now.empty_ctas), f"{now.seconds * 1e6:.0f}",
                 f"{now.of_bandwidth:.2f}", f"{now.of_matrix_peak:.2f}", now.bound, before]
            )  # fmt: skip
    return rows


def move_rows(in_flight: Mapping[tuple[str, str], int]) -> list[list[str]]:
    """The table of ops that move bytes. `in_flight`: per multiprocessor, by architecture and kernel."""
    rows = [["bytes moved", "chip", "MB", "us", "of bandwidth"]]
    for move in MOVES:
        for chip in CHIPS:
            if (flight := in_flight.get((chip.arch, move.kernel))) is None:
                continue
            seconds = moved(move.nbytes, chip, flight)
            share = move.nbytes / chip.bytes_per_second / seconds
            rows.append(
                [move.name, chip.name, f"{move.nbytes / 1e6:.1f}", f"{seconds * 1e6:.1f}", f"{share:.2f}"]
            )
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def pad(i: int, cell: str) -> str:
        return cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])

    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(row)) for row in rows)
