"""A script of plans for tests in which no token may change."""

from shared.sampling import TokenBias
from tests.gpu_worker.conftest import prompt
from tests.gpu_worker.planner import Planner, sampling

DRAWN = sampling(temperature=0.9, min_p=0.01, seed=5)
PENALIZED = sampling(
    temperature=0.7,
    seed=7,
    repetition_penalty=1.05,
    frequency_penalty=1.8,
    presence_penalty=-0.3,
    # So few tokens are left that they repeat.
    logit_bias=tuple(TokenBias(token, 20.0) for token in range(100, 115)),
)
FILTERED = sampling(temperature=0.9, top_k=200, top_p=0.9, seed=6)


def everything(planner: Planner) -> list[list[int]]:
    """Chunks, decodes, forks, cached prefixes, prompt scores and steps of many sizes."""
    planner.admit(1, prompt(45), DRAWN)
    planner.fork(1, 2, 1)
    planner.step(s1=45)
    planner.admit(3, prompt(40) + prompt(9, 3), PENALIZED, like=1, num_computed=32)
    planner.admit(4, prompt(70, 4), sampling(num_logprobs=1))
    planner.step(s3=17, s4=31)
    planner.step()
    planner.admit(5, prompt(300, 5), sampling(num_prompt_logprobs=0))
    planner.step(s4=39, s5=300)
    planner.admit(6, prompt(20, 5), FILTERED)
    planner.step(s6=20)
    for handle in range(7, 16):
        planner.admit(handle, prompt(3 + handle, handle))
        planner.step(**{f"s{handle}": 3 + handle})
    planner.run(15, 9)
    return [seq.output[:9] for seq in planner.known.values()]
