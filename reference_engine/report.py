"""Report: what a run did, in lines of a label and a value."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from reference_engine.engine import Completion, Engine

LABEL_WIDTH = 21


def summary(engine: Engine, completions: Sequence[Completion], seconds: float) -> list[tuple[str, str]]:
    """The figures of a run over `completions` that took `seconds`."""
    counters, accounting, config = engine.scheduler.counters, engine.accounting, engine.scheduler.config
    generated = sum(len(c.token_ids) for c in completions)
    waits = [c.first_token_at - c.arrived_at for c in completions if c.first_token_at is not None]
    first = f"median {statistics.median(waits):.2f} s, longest {max(waits):.2f} s" if waits else "none came"
    used = accounting.peak_used_blocks

    def memory(num_slots: int, utilisation: float) -> str:
        return (
            f"{mebibytes(num_slots * engine.nbytes_per_token)} at most, {utilisation:.1%} of it held tokens"
        )

    return [
        (
            "Generated",
            f"{generated} tokens in {seconds:.1f} s, {generated / max(seconds, 1e-9):.1f} tokens/s",
        ),
        ("Time to first token", first),
        ("KV memory in use", memory(used * config.block_size, accounting.utilisation)),
        ("Had each reserved", ""),
        ("  the context", memory(accounting.peak_reserved_by_context, accounting.utilisation_by_context)),
        (
            "  what it may need",
            memory(accounting.peak_reserved_by_request, accounting.utilisation_by_request),
        ),
        (
            "Shared blocks",
            f"{accounting.sharing:.1%} saved, at most {accounting.peak_saved_blocks} at once, "
            f"{counters.copied_blocks} copied on write",
        ),
        ("Prefix cache", f"knew {counters.hit_tokens} of {counters.lookup_tokens} tokens looked up"),
        ("Preemptions", f"{counters.preemptions}, {counters.recomputed_tokens} tokens computed again"),
    ]


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
