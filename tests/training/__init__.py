"""How tests train: one loop (`loop`), and the jobs that most tests with ranks give it (`jobs`).

`Loop` is a user's training loop with places to look in and to plant in; every test that trains more than a line or two
goes through it. A `Job` says what is trained on which wrapper with which fault, and gives a `Record` of digests
(`digests`): bytes, taken without the guard's help.
"""

from tests.training.digests import copies, digest, digest_of_random, digests, random_digest, seed
from tests.training.jobs import WRAPPERS, Job, Record, Run, build, end_record, run_jobs, train, train_steps
from tests.training.loop import Loop, listening

__all__ = [
    "WRAPPERS",
    "Job",
    "Loop",
    "Record",
    "Run",
    "build",
    "copies",
    "digest",
    "digest_of_random",
    "digests",
    "end_record",
    "listening",
    "random_digest",
    "run_jobs",
    "seed",
    "train",
    "train_steps",
]
