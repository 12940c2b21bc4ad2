"""A real model whose 9 heads and 3 KV heads are split over two workers, which is uneven."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.deploy.running import Running
from tests.real_model.alone import Alone
from tests.real_model.test_served import CLOSE, NUM_TOKENS, complete, prompts
from tests.real_model.test_served_in_bfloat16 import ROUNDING


def test_prompts_are_continued_as_transformers_continues_them(
    served_by_two_workers: tuple[Running, str], alone: Alone
) -> None:
    running, dtype = served_by_two_workers
    asked = prompts(alone)[::4]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(partial(complete, running, max_tokens=NUM_TOKENS), asked))
    most = CLOSE if dtype == "float32" else ROUNDING
    for prompt, answer in zip(asked, answers, strict=True):
        assert alone.shortfall(prompt, answer["token_ids"]) < most
