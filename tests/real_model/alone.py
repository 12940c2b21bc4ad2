"""The real model in transformers alone: what PageStream is compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Tokens = list[int]


class Alone:
    """Transformers' model and tokenizer."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype
        ).eval()

    def in_bfloat16(self) -> "Alone":
        """The same model, in bfloat16."""
        return Alone(self._folder, torch.bfloat16)

    def chat(self, question: str) -> Tokens:
        """Token ids of a question in the model's chat format."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

    def encode(self, text: str) -> Tokens:
        """Token ids of a text of any length."""
        tokens: Tokens = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return tokens

    def prompt_logprobs(self, tokens: Tokens) -> torch.Tensor:
        """Log-probability of each token but the first, float32 [num_tokens - 1]."""
        return chosen(self._logprobs(tokens[:-1], len(tokens) - 1), tokens[1:])

    def shortfall(self, prompt: Tokens, output: Sequence[int]) -> float:
        """By how much the likeliest token's log-probability exceeds that of an output's, at most.

        Zero for what greedy generation gives.
        """
        after = self._logprobs([*prompt, *output[:-1]], len(output))
        return float((after.max(-1).values - chosen(after, output)).max())

    def generate(self, prompt: Tokens, num_tokens: int) -> Tokens:
        """Greedy output."""
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        output: Tokens = found[0, len(prompt) :].tolist()
        return output

    def _logprobs(self, tokens: Tokens, num_last: int) -> torch.Tensor:
        """Log-probabilities of what follows each of the last tokens, [num_last, vocab_size]."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens]), logits_to_keep=num_last).logits[0]
            found: torch.Tensor = logits.float().log_softmax(-1)
        return found


def chosen(logprobs: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """The log-probability of one token of each row, float32 [num_rows]."""
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
