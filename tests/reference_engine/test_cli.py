"""The command line as a user meets it: output, errors in one line, exit codes, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import save_checkpoint

from reference_engine.cli import main
from reference_engine.engine import Engine
from reference_engine.models.loader import load_model
from reference_engine.sampling_params import SamplingParams

LONG = ["--prompt=Hello", "--max-tokens=250", "--ignore-eos", "--temperature=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint("llama", path)
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "reference_engine", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PAGED_OPS_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def error_of(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """The one line that `arguments` end with."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_one_prompt_prints_its_text_and_nothing_else(folder: Path) -> None:
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5, max_tokens=20)
    ((wanted,),) = Engine(load_model(folder), num_blocks=64).generate(["Hello"], params)
    options = ["--temperature=0.7", "--top-k=20", "--top-p=0.9", "--seed=5", "--max-tokens=20"]
    process = start("generate", "--model", str(folder), *options, "--prompt", "Hello")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.removesuffix("\n").encode("utf-8", "replace") == wanted.text.encode("utf-8", "replace")


def test_several_prompts_and_samples_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(folder), "--max-tokens", "5", "--n", "2", "--temperature", "1"]
    assert main([*arguments, "--seed", "1", "--prompt", "a", "--prompt", "b", "--stats"]) == 0
    captured = capsys.readouterr()
    headings = [line for line in captured.out.splitlines() if line.startswith("---")]
    assert headings == [f"--- request {r}, sample {s}" for r in (0, 1) for s in (0, 1)]
    assert "20 tokens in" in captured.err and "Preemptions" in captured.err


def test_stop_and_chat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(folder), "--chat", "--system", "Be brief.", "--prompt", "Hi"]
    assert main([*arguments, "--max-tokens", "30"]) == 0
    whole = capsys.readouterr().out
    model = load_model(folder)
    prompt = "<system>Be brief.<user>Hi<assistant>"
    ((wanted,),) = Engine(model, num_blocks=64).generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=30)
    )
    assert whole == wanted.text + "\n"
    assert main([*arguments, "--max-tokens", "30", "--stop", whole[4:6]]) == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[4:6])] + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--model", "{folder}/config.json"], "config.json"),
        (["--top-p", "2"], "error: --top-p must be in (0, 1], got 2.0"),
        (["--max-tokens", "0"], "error: --max-tokens must be at least 1, got 0"),
        (["--num-blocks", "0"], "error: --num-blocks: is 0, wanted at least 1"),
        (["--num-blocks", str(10**10)], "GiB does not fit into memory"),
        (["--block-size", "0"], "error: --block-size: got 0, wanted at least 1"),
        (["--max-step-tokens", "0"], "error: --max-step-tokens: got 0, wanted at least 1"),
        (["--n", "100000"], "error: --n must be in 1..1024, got 100000"),
        (["--prompt", "\udcff"], "not valid Unicode"),
        (["--system", "x"], "--system needs --chat"),
    ],
)
def test_errors_are_one_clear_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    options = [option.format(folder=folder) for option in options]
    if "--model" not in options:
        options += ["--model", str(folder)]
    assert message in error_of(capsys, ["generate", "--prompt", "x", *options])


def test_a_prompt_that_is_too_long_is_reported_and_the_others_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "generate",
        "--model",
        str(folder),
        "--max-tokens",
        "3",
        "--prompt",
        "x" * 300,
        "--prompt",
        "y",
    ]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "error: prompt 1: request 0: the prompt has 300 tokens; "
        "the model's context of 256 leaves room for 255 at most\n"
    )
    assert captured.out.startswith("--- request 1, sample 0\n")


def test_a_missing_command_or_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["generate"], ["generate", "--prompt"], ["sing"]):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2
        assert "usage: python -m reference_engine" in capsys.readouterr().err


def test_the_demo_tells_all_talks_and_sums_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(folder), "--max-tokens", "12", "--num-blocks", "64"]) == 0
    out = capsys.readouterr().out
    for heading in ("A (two turns", "B (shares", "C (shares", "D (three samples", "\nE\n", "Summary"):
        assert out.count(heading) == 1
    assert "at its fullest" in out and " saved, at most " in out and "tokens/s" in out
    assert "3" in out.split("at its fullest")[1].split("letter:")[0]  # a block that three samples share


def test_the_demo_in_a_cramped_pool_preempts_and_still_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", str(folder), "--max-tokens", "48", "--num-blocks", "22"]) == 0
    out = capsys.readouterr().out
    assert "[interrupted]" not in out and "tokens need" not in out
    (line,) = [line for line in out.splitlines() if "Preemptions" in line]
    assert int(line.split()[1].rstrip(",")) > 0


def test_the_demo_tells_what_was_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(folder), "--max-tokens", "8", "--num-blocks", "8"]) == 2
    out = capsys.readouterr().out
    assert out.count("refused: request ") == 3 and out.count("; the pool has 8") == 3
    assert "1. " in out.split("D (three samples")[1] and "Summary" in out


def test_ctrl_c_ends_the_demo_with_what_there_is(folder: Path) -> None:
    process = start("demo", "--model", str(folder), "--max-tokens", "200", "--num-blocks", "200")
    assert process.stdout is not None
    process.stdout.readline()  # "Loaded ...": the talks begin
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""
    assert "[interrupted]" in out and "Summary" in out and "tokens/s" in out


def test_ctrl_c_ends_generate(folder: Path) -> None:
    process = start("generate", "--model", str(folder), *LONG, "--n=20")
    assert process.stdout is not None
    process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""


@pytest.mark.parametrize(
    "arguments", [["generate", *LONG, "--n=8"], ["demo", "--max-tokens=100"]], ids=["generate", "demo"]
)
def test_a_reader_that_goes_away_is_no_error(folder: Path, arguments: list[str]) -> None:
    process = start(*arguments, "--model", str(folder))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == 0
