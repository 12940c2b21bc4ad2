"""Memory that long texts took is given back once they are tokenized."""

import ctypes
import subprocess
import sys

import pytest

from tests.gateway.conftest import DEMO_MODEL

LONG_TEXTS = """
import asyncio, sys
from gateway.prompts.tokenization import PromptReader
from gateway.text.tokenizer import Tokenizer

def resident_mib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

async def main():
    prompts = PromptReader(Tokenizer.load(sys.argv[1], False), 1)
    text = "word <b> text " * 50_000
    await prompts.text_tokens("word " * 2_000, False)
    before = resident_mib()
    for _ in range(2):
        await prompts.text_tokens(text, False)
    print(resident_mib() - before)
    prompts.close()

asyncio.run(main())
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library keeps what is free"
)
def test_long_texts_leave_little_memory_behind() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LONG_TEXTS, DEMO_MODEL], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 100
