"""Models: checkpoints in, a decoder and a tokenizer out; attention itself is the caller's."""

from reference_engine.models.config import ModelConfig, ModelError
from reference_engine.models.decoder import Attend, Decoder
from reference_engine.models.loader import LoadedModel, load_model
from reference_engine.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "Attend",
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "TextStream",
    "Tokenizer",
    "load_model",
]
