"""A process that compiles grammars: it reads a tokenizer, then grammars, one JSON text a line.

For each it writes a line with the reason why it cannot be compiled, "" if it can. llguidance's own
limits do not bound every grammar's time and memory, and a thread that compiles cannot be stopped:
this process is ended by a timer, or by a limit on its memory.
"""

import json
import resource
import signal
import sys

from llguidance import LLMatcher, LLTokenizer

LIMIT_S = 1.0
"""Of CPU time for one grammar: how busy the machine is does not decide what is accepted."""

_MEMORY_BYTES = 2 * 1024**3  # of addresses; the tokenizer of a large vocabulary needs a tenth


def reason_against(tokenizer: LLTokenizer, grammar: str) -> str:
    """The reason why a grammar cannot be compiled, or has no text; "" if there is none."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return f"it cannot be compiled: {matcher.get_error()}"
    matcher.compute_bitmask()  # a grammar without any text is noticed here
    return "no text satisfies it" if matcher.is_error() else ""


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which ends the input
    tokenizer = LLTokenizer(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        grammar = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # SIGPROF ends this process
        reason = reason_against(tokenizer, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    main()
