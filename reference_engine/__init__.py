"""A thin LLM engine over paged_ops: block manager, scheduler, small decoders, demo.

From the inside out:

- pure (standard library, NumPy): `block_pool`, `prefix_index` and `block_table` know who holds which block;
  `request` what is wanted; `scheduler` decides, step by step, and writes a `step_plan`; `accounting` and
  `pool_map` tell what the memory is used for; `stop_strings` ends texts.
- runs: `models` load checkpoints, `runner` carries a plan out through the ops, `sampler` draws tokens, and
  `engine` is the facade over all of it.
- shows: `cli`, `demo` (with `talk` and `demo_view`) and `report`.

Importing the package loads none of them, so that the pure part can be used without torch.
"""
