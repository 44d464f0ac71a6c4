"""Calling conventions: ours, TRL's and verl's, async ones and those for whole groups; wrong ones are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midflight.config.tasks import RewardTerm
from midflight.envs.rewards.terms import RewardError, Rewards
from midflight.errors import RecipeError
from midflight.launch.rewards import build_rewards
from midflight.types import Grade, Problem

CHAT = Problem(
    "row/0",
    [{"role": "user", "content": "2 + 2?"}],
    answer="4",
    source="sums",
    columns={"level": 2, "solution": "$4$"},
)
TEXT = Problem("row/1", "2 + 2 =", answer="4")


def built(name: str, **options: Any) -> Rewards:
    path = name if ":" in name else f"{__name__}:{name}"
    return build_rewards([RewardTerm(type=path, name="term", options=options)])


def value(name: str, problem: Problem, response: str, **options: Any) -> float:
    return built(name, **options).grade(problem, response).reward


def refused(name: str, **options: Any) -> str:
    with pytest.raises(RecipeError) as raised:
        built(name, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_sees(
    prompts: list[Any], completions: list[Any], answer: list[str], ground_truth: list[str], **kwargs: list[Any]
) -> list[float]:
    assert answer == ground_truth == ["4"]
    assert len(prompts) == len(completions) == 1
    if isinstance(prompts[0], str):
        assert completions == ["four"]
        assert "level" not in kwargs
        return [1.0]
    assert prompts[0] == CHAT.prompt
    assert completions == [[{"role": "assistant", "content": "four"}]]
    assert kwargs == {"level": [2], "solution": ["$4$"]}
    return [2.0]


def trl_column(completions: list[Any], level: list[int]) -> list[float | None]:
    return [None if item > 1 else 1.0 for item in level]


def trl_two_values(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0, 2.0]


def trl_number(completions: list[Any], **kwargs: Any) -> float:
    return 1.0


def trl_state(completions: list[Any], trainer_state: Any) -> list[float]:
    return [0.0]


def trl_optional(completions: list[Any], completion_ids: Any = None, log_extra: Any = None) -> list[float]:
    return [float(completion_ids is None and log_extra is None)]


def test_trl_function_gets_columns_and_messages_as_lists() -> None:
    assert value("trl_sees", CHAT, "four") == 2.0
    assert value("trl_sees", TEXT, "four") == 1.0


def test_none_adds_nothing_and_has_no_component() -> None:
    assert built("trl_column").grade(CHAT, "") == Grade(0.0)


def test_missing_column_is_named() -> None:
    with pytest.raises(RewardError, match="trl_column, problem 'row/1': missing column 'level'"):
        built("trl_column").grade(TEXT, "")
    with pytest.raises(RecipeError, match="trl_column needs the column 'level'; the rows have no further columns"):
        built("trl_column").check(TEXT)
    built("trl_column").check(CHAT)


def test_trl_result_must_have_one_value_per_response() -> None:
    with pytest.raises(RewardError, match="trl_two_values returned a list of 2 values for 1 responses"):
        value("trl_two_values", CHAT, "")
    with pytest.raises(RewardError, match=r"trl_number returned 1.0 of type float, not a list"):
        value("trl_number", CHAT, "")


def test_arguments_that_rewards_do_not_get_are_refused() -> None:
    assert "trl_state needs trainer_state, which rewards do not get" in refused("trl_state")
    assert value("trl_optional", CHAT, "") == 1.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("get_soft_overlong_punishment", {"max_completion_len": 9, "soft_punish_cache": 3}),
        ("get_repetition_penalty_reward", {"ngram_size": 2}),
        ("get_cosine_scaled_reward", {"max_len": 9}),
    ],
)
def test_functions_of_trl_that_need_tokens_are_refused(name: str, options: dict[str, Any]) -> None:
    text = refused(f"trl.rewards:{name}", **options)
    assert text.startswith(f"task.rewards: trl.rewards:{name} needs completion_ids, which rewards do not get")


@pytest.mark.parametrize(
    ("name", "response", "options", "expected"),
    [
        ("accuracy_reward", r"so \boxed{4}", {}, 1.0),
        ("accuracy_reward", r"so \boxed{5}", {}, 0.0),
        ("reasoning_accuracy_reward", r"<think>\boxed{5}</think> \boxed{4}", {}, 1.0),
        ("reasoning_accuracy_reward", r"<think>\boxed{4}", {}, 0.0),
        ("reasoning_accuracy_reward", r"hm END \boxed{4}", {"reasoning_delimiters": ["END"]}, 1.0),
        ("think_format_reward", "<think>\nhm\n</think>\n4", {}, 1.0),
        ("think_format_reward", "hm 4", {}, 0.0),
    ],
)
def test_functions_of_trl_work_unchanged(name: str, response: str, options: dict[str, Any], expected: float) -> None:
    assert value(f"trl.rewards:{name}", CHAT, response, **options) == expected


# --- verl -------------------------------------------------------------------------------------------------------------


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert data_source == "sums"
    assert extra_info == CHAT.columns
    return float(solution_str == ground_truth)


def verl_dict(data_source: str, solution_str: str, ground_truth: str, bonus: float = 0.0, **kwargs: Any) -> Any:
    return {"score": 1.0 + bonus, "acc": True, "pred": solution_str, "note": "seen"}


def test_verl_function_gets_the_row() -> None:
    assert value("compute_score", CHAT, "4") == 1.0
    assert value("compute_score", CHAT, "5") == 0.0


def test_verl_dict_has_score_components_and_answer() -> None:
    assert built("verl_dict", bonus=0.5).grade(CHAT, "4") == Grade(1.5, {"term": 1.5, "term/acc": 1.0}, answer="4")


# --- async and groups -------------------------------------------------------------------------------------------------


_arrived: list[str] = []


async def meets(problem: Problem, response: str) -> float:
    """Return only when all three responses of a group are being graded."""
    _arrived.append(response)
    while len(_arrived) < 3:
        await asyncio.sleep(0)
    return float(len(response))


async def fails(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    raise OSError("the judge is down")


async def ranks(problem: Problem, responses: list[str]) -> list[float]:
    return [float(sorted(responses).index(response)) for response in responses]


async def verl_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(solution_str == ground_truth)


class Client:
    """Reward with state that belongs to one event loop."""

    def __init__(self, *, base: float) -> None:
        self._base = base
        self._loops: set[Any] = set()

    async def __call__(self, problem: Problem, response: str) -> float:
        self._loops.add(asyncio.get_running_loop())
        return self._base + len(self._loops)


def test_async_functions_of_a_group_run_at_the_same_time() -> None:
    _arrived.clear()
    terms = [RewardTerm(type=f"{__name__}:{name}") for name in ("ranks", "meets")]
    grades = build_rewards(terms).grade_group(CHAT, ["b", "cc", "a"])
    assert [grade.reward for grade in grades if isinstance(grade, Grade)] == [2.0, 4.0, 1.0]


def test_async_functions_of_each_convention() -> None:
    assert value("verl_async", CHAT, "4") == 1.0
    with pytest.raises(RewardError, match="fails, problem 'row/0': OSError: the judge is down"):
        value("fails", CHAT, "4")


def test_async_calls_share_one_event_loop() -> None:
    rewards = built("Client", base=1.0)
    assert [rewards.grade(CHAT, "").reward for _ in range(3)] == [2.0, 2.0, 2.0]


# --- refusals ---------------------------------------------------------------------------------------------------------


def unknown(prompt: str, text: str) -> float:
    return 0.0


def needs_limit(problem: Problem, response: str, limit: int) -> float:
    return float(limit)


def makes_number(size: int) -> int:
    return size


class Choosy:
    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit = {limit} is too small")


def test_unknown_signature_names_those_that_work() -> None:
    text = refused("unknown")
    assert text.startswith(f"task.rewards: {__name__}:unknown(prompt: ")
    assert "missing a required argument: 'prompt'" in text
    assert "these would work: reward(problem, response), reward(problem, responses), reward(completions, **c" in text


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("needs_limit", {}, "missing a required argument: 'limit'"),
        ("needs_limit", {"limit": 1, "limits": 2}, "got an unexpected keyword argument 'limits'"),
        ("needs_limit", {"limit": 1, "problem": 2}, "options must not have problem, which is an argument"),
        ("trl_column", {"lvl": 3}, "got an unexpected keyword argument 'lvl'"),
        ("makes_number", {"size": 3}, "makes_number makes an object of type int; these would work"),
        ("Choosy", {"limit": 0}, "ValueError: limit = 0 is too small (tests/unit/envs/rewards/test_signatures.py:"),
        ("Choosy", {"limits": 0}, "missing a required argument: 'limit'"),
        ("nowhere:reward", {}, "cannot import 'nowhere:reward': No module named 'nowhere'"),
        ("missing", {}, "has no attribute 'missing'"),
    ],
)
def test_wrong_options_and_paths_are_refused(name: str, options: dict[str, Any], expected: str) -> None:
    assert expected in refused(name, **options)


def test_unknown_name_lists_built_in_rewards() -> None:
    with pytest.raises(RecipeError, match=r"task\.rewards: there is no 'mth'; known are .*exact, .*math, "):
        build_rewards([RewardTerm(type="mth")])
