"""Memory that long texts took is given back once they are tokenized."""

import ctypes
import os
import platform
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


_THREADS_THAT_ALLOCATE = """
import ctypes, sys, threading
from gateway.text.memory_release import limit_free_memory
if sys.argv[1] == "limited":
    limit_free_memory()
c = ctypes.CDLL(None)
c.malloc.restype = c.fopen.restype = ctypes.c_void_p
all_there = threading.Barrier(6)

def allocate():
    all_there.wait()
    c.malloc(1000)
    all_there.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
c.malloc_info(0, ctypes.c_void_p(c.fopen(b"/dev/stdout", b"w")))
c.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
@pytest.mark.parametrize("kind", ["limited", "as it is"])
def test_all_threads_share_few_arenas(kind: str) -> None:
    environ = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = [sys.executable, "-c", _THREADS_THAT_ALLOCATE, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert (done.stdout.count("<heap nr=") <= 2) == (kind == "limited")
