"""Compiles what requests ask for, in processes of their own, and remembers what was compiled."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from gateway.grammars.compile_child import CompileChild
from gateway.grammars.constraints import Structure
from gateway.http.errors import invalid
from gateway.prompts.fair_threads import FairThreads

MAX_BYTES = 256 * 1024
"""Of a grammar: as many take some ten milliseconds to compile, some a few hundred."""

MAX_BYTES_OF_CALL = 4 * 1024 * 1024
"""Of the grammars of all prompts of a call: each prompt is a request with a grammar of its own."""

_THREADS = 2
_THREADS_PER_CALLER = 1
_REMEMBERED_BYTES = 4 * 1024 * 1024
_SHOWN_CHARS = 400  # of llguidance's reason, which may quote all of the grammar


class GrammarCompiler:
    """Compiles structures for one tokenizer.

    Args:
        tokenizer: makes the text of a ``tokenizer.json``; None: the tokenizer has none.
    """

    def __init__(self, tokenizer: Callable[[], str] | None) -> None:
        self._has_tokenizer = tokenizer is not None
        # One for each thread; a thread takes any that is free.
        self._children = [CompileChild(tokenizer) for _ in range(_THREADS)] if tokenizer else []
        self._lock = Lock()
        self._threads = FairThreads(_THREADS, _THREADS_PER_CALLER, "grammar")
        self._compiled: OrderedDict[str, None] = OrderedDict()  # grammars, the oldest first
        self._num_bytes = 0

    async def compile(
        self,
        caller: str,
        path: str,
        structure: Structure,
        num_prompts: int,
    ) -> str:
        """The grammar of a structure.

        Args:
            caller: threads are shared fairly between callers.
            path: of the field, for errors.
            structure: to compile.
            num_prompts: of the call.

        Raises:
            ApiError: 400 with the reason.
        """
        if not self._has_tokenizer:
            raise invalid(path, f"{path}: this model's tokenizer is not one for structured output")
        try:
            return await self._threads.run(caller, lambda: self._compile(structure, num_prompts))
        except ValueError as error:
            raise invalid(path, f"{path}: {_shown(str(error))}") from None

    def close(self) -> None:
        """Stop the threads and processes."""
        self._threads.close()
        with self._lock:
            for child in self._children:
                child.close()

    def _compile(self, structure: Structure, num_prompts: int) -> str:
        """The same, on a thread.

        Raises:
            ValueError: the reason.
        """
        try:
            grammar = structure.grammar()
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        num_bytes = len(grammar.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_BYTES:
            raise ValueError(f"it is a grammar of {num_bytes} bytes; at most {MAX_BYTES} may be")
        if num_bytes * num_prompts > MAX_BYTES_OF_CALL:
            raise ValueError(
                f"it is a grammar of {num_bytes} bytes for each of {num_prompts} prompts; "
                f"together at most {MAX_BYTES_OF_CALL} may be"
            )
        if self._is_remembered(grammar):
            return grammar
        with self._lock:
            child = self._children.pop()
        try:
            child.check(grammar)
        finally:
            with self._lock:
                self._children.append(child)
        self._remember(grammar, num_bytes)
        return grammar

    def _is_remembered(self, grammar: str) -> bool:
        with self._lock:
            if grammar not in self._compiled:
                return False
            self._compiled.move_to_end(grammar)
            return True

    def _remember(self, grammar: str, num_bytes: int) -> None:
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = None
                self._num_bytes += num_bytes
            while self._num_bytes > _REMEMBERED_BYTES:
                oldest, _ = self._compiled.popitem(last=False)
                self._num_bytes -= len(oldest.encode())


def _shown(reason: str) -> str:
    """The reason without llguidance's state, and of bounded length."""
    line = reason.partition("\n<state>")[0].strip()
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "…"
