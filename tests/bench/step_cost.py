"""Times vLLM's scheduler with the plugin's hooks and without, step by step in turn.

Run by the engine's Python with the plugin on its path, the target and draft model and the batch
as arguments; the samples go to files of PROMETHEUS_MULTIPROC_DIR as they do in a server. Prints
JSON. What is timed is schedule() and update_from_output(), in microseconds of CPU: what else runs
on the machine would drown a difference of wall times.
"""

import json
import random
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "image"))

import fake_worker

K = 7
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 900
ROUNDS = 4
WARM_UP_STEPS = 30
STEPS = 150  # of each, before the first request ends


class Steps:
    """One scheduler with a full batch; `run` returns what the next step took."""

    def __init__(self, target: str, draft: str, *, factory: str | None, batch: int) -> None:
        speculation = fake_worker.build_speculation(fake_worker.Situation(), draft)
        assert speculation is not None
        speculation["num_speculative_tokens_per_batch_size"] = [[1, 512, K]]
        self._scheduler = fake_worker.build_scheduler(
            target,
            speculation,
            is_async=False,
            factory=factory,
            max_num_seqs=batch,
            blocks=batch * 80,
            per_request_spec_decode_metrics="none",
        )
        self._run = fake_worker.Run(self._scheduler, is_async=False)
        for _ in range(batch):
            self._run.add(prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)

    def run(self) -> float:
        """Take one step; return its microseconds."""
        started = time.thread_time()
        output = self._scheduler.schedule()
        spent = time.thread_time() - started
        runner_output = self._run.sample(output)
        started = time.thread_time()
        self._scheduler.update_from_output(output, runner_output)
        spent += time.thread_time() - started
        self._run.propose(output)
        return spent * 1e6


def time_round(target: str, draft: str, batch: int, chance: random.Random) -> list[Any]:
    """Return (without, with) of each pair of steps, in drawn order."""
    kinds = [
        Steps(target, draft, factory=factory, batch=batch)
        for factory in (None, fake_worker.FACTORY)
    ]
    fake_worker.forget_plugin()
    pairs = []
    for number in range(WARM_UP_STEPS + STEPS):
        order = (0, 1) if chance.random() < 0.5 else (1, 0)
        times = {which: kinds[which].run() for which in order}
        if number >= WARM_UP_STEPS:
            pairs.append((times[0], times[1]))
    return pairs


def main() -> None:
    """Time the rounds and print what the hooks add."""
    target, draft, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    chance = random.Random(11)
    added, plain = [], []
    for _ in range(ROUNDS):
        pairs = time_round(target, draft, batch, chance)
        added.append(median(hooked - bare for bare, hooked in pairs))
        plain.append(median(bare for bare, _ in pairs))
    print(
        json.dumps(
            {
                "batch": batch,
                "k": K,
                "withoutMicroseconds": round(mean(plain), 1),
                "addedMicroseconds": round(mean(added), 1),
                "addedByRound": [round(one, 1) for one in added],
            }
        )
    )


if __name__ == "__main__":
    main()
