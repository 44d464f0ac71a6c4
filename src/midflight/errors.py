"""Every error a user can meet.

MidflightError
├── RecipeError          the input was wrong: which key, what would work            exit code 2
├── ScenarioError        a scenario that cannot be: which field, what would work    exit code 2
├── RunDirectoryError    the run directory cannot be used as asked                  exit code 2
├── ModelError           the model directory or its tokenizer does not fit          exit code 2
├── RequestError         a generation request that cannot be served, and which number is wrong
├── GenerationError      generation failed: what was in flight is lost               exit code 1
├── GenerationLostError  a generation server cannot be reached or broke off         exit code 1
├── CheckpointError      a checkpoint could not be written or read                  exit code 1
├── StreamError          a record could not be written or read                      exit code 1
├── WeightUpdateError    new weights do not fit; the old ones go on serving         exit code 1
│   └── NonFiniteWeightsError  they have NaN or infinite values: no engine takes them
├── NonFiniteLossError   too many steps in a row had a loss that is not a number    exit code 1
├── RolloutError         nothing but failed rollouts: says why the last one failed  exit code 1
├── WorkerError          a worker process died; says which and where its log is     exit code 1
├── BenchmarkError       what is compared does not do the same work                 exit code 1
└── MissingExtraError    an optional package is needed; says how to install it      exit code 2
"""

from __future__ import annotations


class MidflightError(Exception):
    """Base of everything midflight raises on purpose; its text is one line a user can act on."""

    exit_code = 1


class RecipeError(MidflightError):
    exit_code = 2


class ScenarioError(MidflightError):
    exit_code = 2


class RunDirectoryError(MidflightError):
    exit_code = 2


class ModelError(MidflightError):
    exit_code = 2


class RequestError(MidflightError):
    exit_code = 2


class GenerationError(MidflightError):
    pass


class GenerationLostError(MidflightError):
    pass


class CheckpointError(MidflightError):
    pass


class StreamError(MidflightError):
    pass


class WeightUpdateError(MidflightError):
    pass


class NonFiniteWeightsError(WeightUpdateError):
    pass


class NonFiniteLossError(MidflightError):
    pass


class RolloutError(MidflightError):
    pass


class WorkerError(MidflightError):
    pass


class BenchmarkError(MidflightError):
    pass


class MissingExtraError(MidflightError):
    exit_code = 2

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the package {package}: pip install 'midflight[{extra}]'")
