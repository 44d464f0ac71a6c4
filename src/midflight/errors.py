"""Every error that midflight raises for its users.

MidflightError
├── RecipeError          a recipe is wrong: names the key and values that would work     exit code 2
├── ScenarioError        a scenario is wrong: names the key and values that would work   exit code 2
├── RunDirectoryError    the run directory cannot be used for this command               exit code 2
├── ModelError           the model directory or its tokenizer does not fit               exit code 2
├── PromptError          the chat template does not fit the prompts: gives its reason   exit code 2
├── RequestError         a generation request cannot be served: names the wrong number   exit code 2
├── GenerationError      generation failed, and the requests in flight are lost          exit code 1
├── GenerationLostError  a generation server is unreachable or dropped the connection    exit code 1
├── CheckpointError      a checkpoint could not be written or read                       exit code 1
├── StreamError          a record could not be written or read                           exit code 1
├── WeightUpdateError    new weights do not fit; the old weights keep serving            exit code 1
│   └── NonFiniteWeightsError  new weights have NaN or infinite values; engines refuse them
├── NonFiniteLossError   the loss was NaN or infinite in too many steps in a row         exit code 1
├── RolloutError         too many rollouts failed: gives the most frequent reason        exit code 1
├── WorkerError          a worker process died: names the process and its log            exit code 1
├── BenchmarkError       the compared implementations do not do the same work            exit code 1
└── MissingExtraError    an optional package is missing: says how to install it          exit code 2
"""

from __future__ import annotations


class MidflightError(Exception):
    """Base of every error that midflight raises on purpose; the text is one line that the user can act on."""

    exit_code = 1


class RecipeError(MidflightError):
    exit_code = 2


class ScenarioError(MidflightError):
    exit_code = 2


class RunDirectoryError(MidflightError):
    exit_code = 2


class ModelError(MidflightError):
    exit_code = 2


class PromptError(MidflightError):
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


class WeightsReplacedError(WeightUpdateError):
    """The sender has overwritten weights while they were read; newer ones are there."""


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
