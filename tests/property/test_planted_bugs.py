"""Planted bugs: the scenarios must catch each of these changes to the block manager or the scheduler."""

from __future__ import annotations

import inspect
import textwrap
from types import ModuleType

import pytest
from scheduler_shadow import run_scenario

import reference_engine.block_pool
import reference_engine.block_table
import reference_engine.prefix_index
import reference_engine.request
import reference_engine.scheduler
import reference_engine.step_plan

MAX_SCENARIOS = 1500


# In the source of module.Class.method: (what is wrong then, the code there, what it becomes).
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "scheduler.Scheduler._fork": [
        ("fork takes no references", "self.pool.retain(child.table.ids.tolist())", "pass"),
        ("a child is not in the books", "self._live[child.request.id].append(child)", "pass"),
    ],
    "request.Sequence.fork": [
        ("fork forgets what is computed", "self.num_computed,", "0,"),
    ],
    "scheduler.Scheduler._grow": [
        ("shared block written in place", "pool.refcount(table[written]) > 1", "False"),
        ("copy forgotten", "copies.append((shared, copy))", "pass"),
        ("copy the wrong way round", "(shared, copy))", "(copy, shared))"),
        ("copied though it is private by now", "pool.refcount(shared) > 1", "True"),
        ("shared block not released", "pool.release([shared])", "pass"),
        ("grows by a block too few", "self._blocks_for(needed)", "(needed // self.config.block_size)"),
    ],
    "scheduler.Scheduler._span": [
        ("publishes before the commit", "stop = min", "self._publish_early(sequence, budget); stop = min"),
        ("span starts late", "start = sequence.num_computed", "start = sequence.num_computed + 1"),
        ("samples in mid-prompt", "if stop == len(sequence.tokens)", "if True"),
    ],
    "scheduler.Scheduler._publish": [
        ("publishes half a block", "sequence.num_computed // size", "-(-sequence.num_computed // size)"),
        ("publishes the neighbour", "sequence.table[number]", "sequence.table[number - 1]"),
        (
            "chain without its parents",
            "sequence.published, tokens",
            "self.index.root(sequence.request.cache_salt), tokens",
        ),
    ],
    "prefix_index.PrefixIndex.root": [
        ("salt ignored", "self._roots.get(salt)", "self._roots.get(salt := '')"),
    ],
    "prefix_index.PrefixIndex._find": [
        ("hit without comparing tokens", "and entry.tokens == tokens", ""),
        ("hit without comparing the chain", "entry.parent is parent and", ""),
    ],
    "scheduler.Scheduler._admit": [
        ("last prompt token taken from the cache", "(len(tokens) - 1) //", "len(tokens) //"),
        ("revived blocks not counted", "missing + revived + len(ahead)", "missing + len(ahead)"),
        (
            "victim keeps its place in the chain",
            "sequence.num_published = len(hits)",
            "sequence.num_published = 0",
        ),
    ],
    "block_pool.BlockPool.allocate": [
        ("reuse leaves the index behind", "self._index.forget(block)", "pass"),
    ],
    "prefix_index.PrefixIndex.publish": [
        ("displaced entry keeps its block", "del self._by_block[displaced.block]", "pass"),
    ],
    "block_pool.BlockPool.retain": [
        ("revived block stays on the free list", "del self._cached[block]", "pass"),
    ],
    "scheduler.Scheduler._victims": [
        ("hits die with the victims", "and block not in kept", ""),
        ("victims from above", "reversed(self.running)", "self.running"),
        ("a victim may be anyone", "or victim.rank <= sequence.rank", "or victim is sequence"),
        ("victims for nothing", "return victims if enough() else None", "return victims"),
    ],
    "scheduler.Scheduler._release": [
        (
            "victim keeps its progress",
            "sequence.num_computed = sequence.num_published = 0",
            "sequence.num_published = 0",
        ),
        ("freed twice", "reversed(", "2 * ("),
    ],
    "scheduler.Scheduler.plan": [
        ("victim is scheduled again at once", "if sequence in preempted:", "if False:"),
        ("newcomers pass a victim", "if preempted or", "if"),
        ("newcomers pass one that waits", "or victims is None", ""),
        ("budget overrun", "budget -= len(spans[-1].tokens)", "budget -= 1"),
        ("a lone sequence outgrows the pool", "> self.config.num_blocks", "> 10**9"),
    ],
    "request.Sequence.rank": [
        ("order of arrival ignored", "request.priority, request.arrival", "request.priority, 0.0"),
    ],
    "scheduler.Scheduler.submit": [
        (
            "last in, first out",
            "bisect.insort(self.waiting, sequence, key=_rank)",
            "self.waiting.insert(0, sequence)",
        ),
        ("too long for the pool, but queued", "> config.num_blocks", "> config.num_blocks + 1"),
        ("too long for the model, but queued", "num_tokens + 1 > config", "num_tokens > config"),
        ("refused though it fits", "num_tokens + 1 > config", "num_tokens + 2 > config"),
    ],
    "scheduler.Scheduler.abort": [
        ("abort spares the children", "for sequence in sequences:", "for sequence in sequences[:1]:"),
    ],
    "scheduler.Scheduler.commit": [
        ("abort ignored in flight", "if sequence.state is not State.RUNNING:", "if False:"),
        (
            "computed one short",
            "sequence.num_computed = span.stop",
            "sequence.num_computed = max(0, span.stop - 1)",
        ),
    ],
    "scheduler.Scheduler.finish": [
        ("end without release", "self._release(sequence)", "pass"),
    ],
    "scheduler.Scheduler.cancel": [
        (
            "failed step taken for computed",
            "self._preempt(span.sequence)",
            "span.sequence.num_computed = min(span.stop, len(span.sequence.tokens) - 1)",
        ),
    ],
    "request.Sequence.samples": [
        ("children share one draw", "tuple(range(self.request.params.n))", "(0,) * self.request.params.n"),
    ],
    "scheduler.Scheduler._append": [
        ("stop tokens ignored", "request.is_stop_token(token)", "False"),
        ("one token too many", "sequence.num_output ==", "sequence.num_output - 1 =="),
    ],
    "block_table.BlockTable.slots": [
        ("slots off by one", "+ positions % self.block_size", "+ (positions + 1) % self.block_size"),
        (
            "slots of the next block",
            "positions // self.block_size]",
            "(positions + 1) // self.block_size - 1]",
        ),
    ],
    "block_table.BlockTable.fork": [
        ("fork shares the table itself", "return BlockTable(self.block_size, self.ids)", "return self"),
    ],
    "step_plan.StepArrays.of": [
        (
            "lengths without this step's tokens",
            "[span.stop for span in spans]",
            "[span.start for span in spans]",
        ),
        ("tables shifted", "= span.block_ids", "= span.block_ids[::-1]"),
    ],
}


def _publish_early(self: object, sequence: object, budget: int) -> None:
    computed = sequence.num_computed  # type: ignore[attr-defined]
    sequence.num_computed = min(len(sequence.tokens), computed + budget)  # type: ignore[attr-defined]
    self._publish(sequence)  # type: ignore[attr-defined]
    sequence.num_computed = computed  # type: ignore[attr-defined]


def plant(where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompile one method with the changed line."""
    module_name, class_name, method_name = where.split(".")
    module: ModuleType = getattr(reference_engine, module_name)
    owner = getattr(module, class_name)
    method = inspect.getattr_static(owner, method_name)
    for wrapped in ("fget", "func", "__func__"):  # property, cached_property, classmethod
        method = getattr(method, wrapped, method)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) == 1, f"{old!r} is not (once) in {where}"
    scope = dict(vars(module))
    future = "from __future__ import annotations\n"
    exec(compile(future + source.replace(old, new), f"<{where}>", "exec"), scope)
    planted = scope[method_name]
    if hasattr(planted, "__set_name__"):
        planted.__set_name__(owner, method_name)
    monkeypatch.setattr(owner, method_name, planted)
    monkeypatch.setattr(reference_engine.scheduler.Scheduler, "_publish_early", _publish_early, raising=False)


@pytest.mark.parametrize("where", MUTATIONS)
def test_planting_alone_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = where.split(".")[-1]
    plant(where, f"def {method}", f"def {method}", monkeypatch)
    for seed in range(20):
        run_scenario(seed)


@pytest.mark.parametrize(
    ("where", "old", "new"),
    [
        pytest.param(where, old, new, id=name.replace(" ", "-"))
        for where, mutations in MUTATIONS.items()
        for name, old, new in mutations
    ],
)
def test_mutation_is_caught(where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(where, old, new, monkeypatch)
    for seed in range(MAX_SCENARIOS):
        try:
            run_scenario(seed)
        except (AssertionError, RuntimeError, ValueError, LookupError):
            return  # but not NameError and the like: those would say that the planting went wrong
    pytest.fail(f"{MAX_SCENARIOS} scenarios did not notice")
