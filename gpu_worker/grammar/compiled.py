"""Compiles grammars on a thread of its own, and remembers them."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

_REMEMBERED_CHARS = 1024 * 1024
"""Of grammars; compiled they take some thirty times as much memory."""


class CompiledGrammars:
    """Grammars by their texts; the least recently used are forgotten.

    Not thread-safe. llguidance compiles without the GIL, so nothing else waits for it.

    Args:
        tokenizer: of the model; None: nothing can be compiled.
    """

    def __init__(self, tokenizer: LLTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "compile")
        self._known: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # the oldest first
        self._num_chars = 0

    def begin(self, grammar: str) -> Future[LLMatcher]:
        """Begin to compile, unless the grammar is remembered.

        Returns:
            A future of its matcher without any tokens, to be copied; it raises ValueError with the
            reason why there is none.
        """
        found = self._known.get(grammar)
        if found is not None:
            self._known.move_to_end(grammar)
            return found
        self._known[grammar] = found = self._thread.submit(self._compile, grammar)
        self._num_chars += len(grammar)
        while self._num_chars > _REMEMBERED_CHARS and len(self._known) > 1:
            oldest, _ = self._known.popitem(last=False)
            self._num_chars -= len(oldest)
        return found

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer for grammars")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher
