"""A conversation with the engine: questions, answers, and what was said before."""

from __future__ import annotations

from dataclasses import dataclass, field

from reference_engine.engine import Completion, Engine
from reference_engine.request import RequestRefused
from reference_engine.sampling_params import SamplingParams


@dataclass
class Talk:
    """Questions that are asked one after the other, each when the answer to the last has come."""

    label: str
    colour: str
    questions: list[str]
    note: str = ""
    system: str | None = None
    samples: int = 1  # answers wanted to one question
    turns: list[list[Completion]] = field(default_factory=list)  # for each question asked: its answers
    refusal: str = ""  # why the next question could not be asked

    @property
    def completions(self) -> list[Completion]:
        return [completion for turn in self.turns for completion in turn]

    @property
    def latest(self) -> list[Completion]:
        return self.turns[-1] if self.turns else []

    @property
    def request_ids(self) -> set[int]:
        return {turn[0].request_id for turn in self.turns}

    @property
    def has_answer(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.latest)

    @property
    def is_over(self) -> bool:
        return self.has_answer and (len(self.turns) == len(self.questions) or bool(self.refusal))

    def name_of(self, completion: Completion) -> str:
        """The label, and which answer or which turn it is, where there are several."""
        if self.samples > 1:
            return f"{self.label}{completion.sample_index + 1}"
        return f"{self.label}{len(self.turns)}" if len(self.questions) > 1 else self.label

    def ask(self, engine: Engine, max_tokens: int) -> None:
        """Send the next question, together with all that was said before; note it if it is refused."""
        if engine.tokenizer is None:
            raise ValueError(f"{engine.model.path}: the model has no tokenizer")
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for question, (answer, *_) in zip(self.questions, self.turns, strict=False):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
        messages.append({"role": "user", "content": self.questions[len(self.turns)]})
        params = SamplingParams(
            temperature=0.9 if self.samples > 1 else 0.0,
            top_p=0.95,
            seed=7,
            n=self.samples,
            max_tokens=max_tokens,
        )
        try:
            request_id = engine.add(engine.tokenizer.encode_chat(messages), params)
        except RequestRefused as refusal:
            self.refusal = str(refusal)
        else:
            self.turns.append(engine.completions_of(request_id))
