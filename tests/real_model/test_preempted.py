"""A real model's answers are those of transformers, too, where the pool is too small for them."""

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.running import Running
from tests.real_model.alone import Alone
from tests.real_model.test_served import CLOSE, QUESTIONS, complete

NUM_TOKENS = 64


def num_preemptions(running: Running, kind: str) -> float:
    url = f"http://127.0.0.1:{running.metrics['scheduler']}/metrics"
    with urllib.request.urlopen(url) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith("num_preemptions_total") and sample.labels["kind"] == kind
    )


def test_preempted_answers_are_those_of_transformers(
    served_in_a_small_pool: tuple[Running, str], alone: Alone
) -> None:
    running, kind = served_in_a_small_pool
    asked = [alone.chat(question) for question in QUESTIONS]
    continued = partial(complete, running, max_tokens=NUM_TOKENS)
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(continued, asked))
    assert num_preemptions(running, kind) > 0
    for prompt, answer in zip(asked, answers, strict=True):
        assert alone.shortfall(prompt, answer["token_ids"]) < CLOSE
