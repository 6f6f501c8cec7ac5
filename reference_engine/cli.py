"""Command line: `generate` continues prompts, `demo` shows the engine at work."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from reference_engine.interrupt import EXIT_INTERRUPTED, EXIT_USAGE, interrupts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a user's error, 130 after Ctrl-C."""
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(
                errors="replace"
            )  # a terminal that lacks a character shows "?" instead of a traceback
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        sys.stderr.close()
        return 0
    except ModuleNotFoundError as error:
        print(f"error: {error}; the engine needs: pip install 'paged_ops[engine]'", file=sys.stderr)
        return EXIT_USAGE
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(f"error: {_as_typed(str(error), options)}", file=sys.stderr)
        return EXIT_USAGE


def _as_typed(message: str, options: argparse.Namespace) -> str:
    """A message that begins with an argument's name, with the option in its place that the user typed."""
    named = re.match(r"(\w+)(?=: | must )", message)
    if named is None or named[1] not in vars(options):
        return message
    return f"--{named[1].replace('_', '-')}{message[named.end() :]}"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m reference_engine", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="a small model answers several people at once, with a map of its memory"
    )
    demo.add_argument("--model", default="smollm2", help="as for generate; has to have a chat template")
    demo.add_argument("--max-tokens", type=int, default=96, help="per answer (default: 96)")
    demo.add_argument("--num-blocks", type=int, default=40, help="blocks of 16 tokens (default: 40)")
    demo.set_defaults(run=run_demo)

    generate = commands.add_parser("generate", help="continue prompts")
    generate.add_argument(
        "--model", default="smollm2", help="a Hugging Face folder, a .gguf file, or smollm2 (the default)"
    )
    generate.add_argument(
        "--prompt", action="append", required=True, help="may be given several times; all run at once"
    )
    generate.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    generate.add_argument("--system", help="with --chat: a system prompt for all of them")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    generate.add_argument(
        "--top-k", type=int, default=0, help="sample from the k most probable tokens; 0: all"
    )
    generate.add_argument("--top-p", type=float, default=1.0, help="sample from this mass of probability")
    generate.add_argument("--seed", type=int, help="for the same samples again")
    generate.add_argument("--n", type=int, default=1, help="samples per prompt, which share its memory")
    generate.add_argument("--max-tokens", type=int, default=128, help="per sample (default: 128)")
    generate.add_argument(
        "--stop", action="append", default=[], help="ends a text; may be given several times"
    )
    generate.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    generate.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's own"
    )
    generate.add_argument("--num-blocks", type=int, help="size of the KV pool (default: 512 MiB)")
    generate.add_argument("--block-size", type=int, default=16, help="tokens per block (default: 16)")
    generate.add_argument("--max-step-tokens", type=int, default=512, help="budget of a step (default: 512)")
    generate.add_argument("--stats", action="store_true", help="print figures of the run to standard error")
    generate.set_defaults(run=run_generate)
    return top


def run_demo(options: argparse.Namespace) -> int:
    from reference_engine.demo import run_demo as demo

    return demo(options.model, max_tokens=options.max_tokens, num_blocks=options.num_blocks)


def run_generate(options: argparse.Namespace) -> int:
    # Imported late: --help and wrong arguments need neither torch nor a model.
    from reference_engine.engine import Completion, Engine
    from reference_engine.models.loader import load_model
    from reference_engine.report import LABEL_WIDTH, summary
    from reference_engine.request import RequestRefused
    from reference_engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        n=options.n,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
    )
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat")
    model = load_model(options.model, dtype=_torch_dtype(options.dtype))
    engine = Engine(
        model,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_step_tokens=options.max_step_tokens,
    )
    completions: list[Completion] = []
    refused = False
    started = time.monotonic()
    for number, prompt in enumerate(options.prompt, 1):
        try:
            tokens = _chat_tokens(model, options.system, prompt) if options.chat else prompt
            completions += engine.completions_of(engine.add(tokens, params))
        except RequestRefused as refusal:
            print(f"error: prompt {number}: {refusal}", file=sys.stderr)
            refused = True
    printer = _InOrder(completions, named=len(options.prompt) * options.n > 1)
    with interrupts() as interrupted:
        while engine.has_work and not interrupted.is_set():
            engine.step()
            printer.update()
    printer.close()
    for completion in completions:
        if completion.error:
            print(f"error: request {completion.request_id}: {completion.error}", file=sys.stderr)
            refused = True
    if options.stats:
        for label, value in summary(engine, completions, time.monotonic() - started):
            print(f"{label:<{LABEL_WIDTH}}{value}", file=sys.stderr)
    if interrupted.is_set():
        return EXIT_INTERRUPTED
    return EXIT_USAGE if refused else 0


class _InOrder:
    """Prints texts that grow together one after the other, the first unfinished one as it comes."""

    def __init__(self, completions: Sequence[Any], *, named: bool) -> None:
        self._left, self._named = list(completions), named
        self._shown = 0  # characters of the first one
        self._begun = False

    def update(self) -> None:
        while self._left:
            completion = self._left[0]
            if self._named and not self._begun:
                print(f"--- request {completion.request_id}, sample {completion.sample_index}")
            self._begun = True
            print(completion.text[self._shown :], end="", flush=True)
            self._shown = len(completion.text)
            if completion.finish_reason is None:
                return
            self._left.pop(0)
            self._shown, self._begun = 0, False
            print()

    def close(self) -> None:
        """After an interruption: the line that was being written ends here."""
        if self._left and self._begun:
            print()


def _chat_tokens(model: Any, system: str | None, prompt: str) -> list[int]:
    if model.tokenizer is None:
        raise ValueError(f"{model.path}: the model has no tokenizer")
    messages = [{"role": "system", "content": system}] if system is not None else []
    tokens: list[int] = model.tokenizer.encode_chat([*messages, {"role": "user", "content": prompt}])
    return tokens


def _torch_dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)
