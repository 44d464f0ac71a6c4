"""Recipes: a wrong recipe raises one line that names the key and values that would work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midflight import cli
from midflight.config import describe_recipe, dump_toml, load_recipe, recipe_warnings
from midflight.config.algorithms import GroupAdvantageConfig, ValueAdvantageConfig
from midflight.config.schedules import ConventionalConfig, PipelineConfig
from midflight.config.sections import (
    EmbeddedEngineConfig,
    FsdpTrainerConfig,
    OwnEngineConfig,
    SharedMemoryWeightsConfig,
    SingleTrainerConfig,
)
from midflight.config.tasks import OwnTaskConfig
from midflight.errors import RecipeError
from midflight.run.directory import open_run
from narrowing import instance


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npath = "model"\n[schedule]\ntype = "pipeline"\nnum_in_flight = 48\n')
    return path


def test_shipped_demo_loads_by_name_and_passes_all_checks() -> None:
    from midflight.launch.build import check_recipe

    check_recipe(load_recipe(Path("cpu_demo")))


def test_file_hides_the_shipped_recipe_of_its_name(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe_file.rename(tmp_path / "cpu_demo").parent)
    assert instance(load_recipe(Path("cpu_demo")).schedule, PipelineConfig).num_in_flight == 48


def test_unknown_recipe_lists_the_shipped_recipes() -> None:
    with pytest.raises(
        RecipeError, match=r"cannot read the recipe demo: No such file .*ship with midflight: .*cpu_demo"
    ):
        load_recipe(Path("demo"))


def test_options_of_every_loss_need_no_type(recipe_file: Path) -> None:
    loss = load_recipe(recipe_file, ["loss.kl_coefficient=0.5"]).loss
    assert (loss.type, loss.kl_coefficient) == ("reinforce", 0.5)
    with pytest.raises(RecipeError, match=r"clip_low"):
        load_recipe(recipe_file, ["loss.clip_low=0.1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.num_inflight=3", "unknown key schedule.num_inflight; did you mean schedule.num_in_flight?"),
        ("trainner.max_steps=3", "unknown key trainner; did you mean trainer?"),
        ("trainer.max_steps=many", "trainer.max_steps: should be a valid integer"),
        ("trainer.max_steps=0", "trainer.max_steps: should be greater than or equal to 1, got 0"),
        ("trainer.learning_rate=nan", "trainer.learning_rate: "),
        ("schedule.type=magic", "schedule.type: there is no 'magic'; known are pipeline, conventional, april, bounded"),
        ("schedule.over_sampling=2", "schedule.over_sampling is a key of april, but schedule.type = 'pipeline'"),
        ("schedule.when_full=explode", "schedule.when_full: should be 'block' or 'drop_oldest', got 'explode'"),
        ("batch.batch_size=20", "batch.batch_size = 20 is not a multiple of batch.group_size = 8; 16 or 24 would work"),
        ("batch.batch_size=4", "batch.batch_size = 4 is not a multiple of batch.group_size = 8; 8 would work"),
        ("trainer.num_ranks=2", "trainer.num_ranks is a key of fsdp and deepspeed, but trainer.type = 'single'"),
        ("trainer.zero_stage=3", "trainer.zero_stage is a key of deepspeed, but trainer.type = 'single'"),
        ("batch.max_tokens=100", "batch.max_tokens = 100 cannot hold one sequence"),
        (
            "schedule.queue_capacity=8",
            "schedule.queue_capacity = 8 is less than batch.batch_size = 32: the batch could never fill up; 32 or more",
        ),
        ("preprocess.process=own", "preprocess.process is now preprocess.num_workers: 0 for 'rollout', 1 or more for"),
        ("preprocess.num_workers=-1", "preprocess.num_workers: should be greater than or equal to 0, got -1"),
        (
            "preprocess.threads=2",
            "preprocess.threads is for preprocessing processes, but preprocess.num_workers = 0; preprocess.num_workers",
        ),
        (
            "preprocess.num_workers=2",
            "preprocess.num_workers = 2: processes share the work of the reference model, but loss.kl_coefficient is",
        ),
        ("preprocess.device=cpu", "preprocess.device = 'cpu' is for a reference model in a process of the run, which"),
        ("schedule.max_lag=-1", "schedule.max_lag: should be greater than or equal to 0, got -1"),
        ("max_steps=3", "'max_steps=3' does not have the form section.key=value"),
        ("trainer.max_steps", "'trainer.max_steps' does not have the form section.key=value"),
        ("model.path.deep=3", "override model.path.deep: path is a value, not a section"),
    ],
)
def test_wrong_override_is_one_line(recipe_file: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe_file, [override])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("april", "over_sampling=0.5"), "schedule.over_sampling: should be greater than or equal to 1, got 0.5"),
        (("april", "over_sampling=inf"), "schedule.over_sampling: should be a finite number, got inf"),
        (("april", "max_versions=0"), "schedule.max_versions: should be greater than or equal to 1, got 0"),
        (("bounded", "max_lag=-1"), "schedule.max_lag: should be greater than or equal to 0, got -1"),
        (("conventional", "steps_per_rl_step=0"), "steps_per_rl_step: should be greater than or equal to 1, got 0"),
        (("one_step_off", "max_lag=2"), "schedule.max_lag is a key of pipeline and bounded, but schedule.type = 'one"),
    ],
)
def test_wrong_schedule_is_one_line(recipe_file: Path, overrides: tuple[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe_file, [f"schedule.type={overrides[0]}", f"schedule.{overrides[1]}"])
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(
            (
                [f"advantage.type={baseline}", "batch.group_size=1"],
                f"advantage.type = '{baseline}' compares the rollouts of a group, but batch.group_size = 1: every"
                " advantage would be 0; a larger group, or advantage.type = 'value' or 'none' would work",
            )
            for baseline in ("group_mean", "group_mean_std", "leave_one_out")
        ),
        (
            ["advantage.type=value", "advantage.normalize_batch=true"],
            "advantage.normalize_batch is a key of group_mean and group_mean_std and leave_one_out and none and"
            " package.module:name, but advantage.type = 'value'",
        ),
        (
            ["loss.type=ppo"],
            "loss.type = 'ppo' learns a value function, but advantage.type = 'group_mean_std' has none;",
        ),
        (
            ["trainer.type=fsdp", "trainer.num_ranks=3"],
            "batch.batch_size = 32 cannot be shared equally by trainer.num_ranks = 3; 24 or 48 would work",
        ),
        (
            ["trainer.type=fsdp", "trainer.num_ranks=64"],
            "batch.batch_size = 32 cannot be shared equally by trainer.num_ranks = 64; 64 would work",
        ),
        (
            ["trainer.type=fsdp", "trainer.num_ranks=2", "trainer.device=cuda:1"],
            "trainer: device = 'cuda:1' is a single device, but num_ranks = 2; 'cuda' would work",
        ),
        (
            ["trainer.type=deepspeed", "trainer.lora_rank=8"],
            "trainer: type = 'deepspeed' does not support lora_rank; type = 'fsdp' would work",
        ),
        (
            ["trainer.type=deepspeed", "trainer.zero_stage=1"],
            "trainer.zero_stage: should be 2 or 3, got 1",
        ),
        (["reference.path=other"], "[reference] is used only with loss.kl_coefficient, which is not set"),
        (["reference.url=http://localhost:8000"], "[reference] is used only with loss.kl_coefficient, which is not"),
        (
            ["reward.overlong_buffer=160"],
            "reward.overlong_buffer = 160 is not less than sampling.max_tokens = 160: every response would be",
        ),
        (
            ["loss.token_mask=[0.1, 0.9]"],
            "loss: token_mask = [0.1, 0.9] does not contain a ratio of 1; [0.125, 8.0] would work",
        ),
        (["loss.sequence_mask=[1.0, 2.0]"], "loss: sequence_mask = [1.0, 2.0] does not contain a ratio of 1;"),
        (["loss.token_mask=[0.5]"], "loss.token_mask"),
        (["loss.type=grpo", "loss.clip_low=0"], "loss.clip_low: should be greater than 0, got 0"),
        (["loss.type=grpo", "loss.clip_low=1.5"], "loss.clip_low: should be less than or equal to 1, got 1.5"),
        (["loss.type=dapo", "loss.clip_high=0"], "loss.clip_high: should be greater than 0, got 0"),
        (["loss.max_ratio=0"], "loss.max_ratio: should be greater than 0, got 0"),
        (["loss.kl_coefficient=-1"], "loss.kl_coefficient: should be greater than or equal to 0, got -1"),
        (["loss.kl_estimator=k4"], "loss.kl_estimator: should be 'k1', 'k2' or 'k3', got 'k4'"),
        (
            ["loss.type=reinforce", "loss.clip_high=2"],
            "loss.clip_high is a key of grpo and dapo and gspo and cispo and ppo and decoupled_ppo, but loss.type ="
            " 'reinforce'",
        ),
        (["loss.type=grpo", "loss.options={}"], "loss.options is a key of package.module:name, but loss.type = 'grpo'"),
        (
            ["loss.type=magic"],
            "loss.type: there is no 'magic'; known are reinforce, grpo, dapo, gspo, cispo, ppo, decoupled_ppo,"
            " package.module:name",
        ),
        (
            ["advantage.type=value", "advantage.gae_lambda=1.5"],
            "advantage.gae_lambda: should be less than or equal to 1, got 1.5",
        ),
        (["advantage.gae_lambda=1"], "advantage.gae_lambda is a key of value, but advantage.type = 'group_mean_std'"),
        (["advantage.type=critic"], "advantage.type: there is no 'critic'; known are group_mean, group_mean_std, "),
    ],
)
def test_wrong_objective_is_one_line(recipe_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe_file, overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.group_size=1", "advantage.type=none"],
        ["batch.group_size=1", "advantage.type=value"],
        ["batch.group_size=1", "advantage.type=value", "loss.type=ppo"],
        ["loss.type=grpo", "advantage.type=value"],
        ["reference.path=other", "loss.kl_coefficient=0"],
        ["reward.overlong_buffer=159"],
        ["loss.type=cispo", "loss.clip_low=1.0"],
        ["loss.token_mask=[0.125, 8]", "loss.sequence_mask=[0.999, 1.001]"],
    ],
)
def test_advice_of_the_error_messages_works(recipe_file: Path, overrides: list[str]) -> None:
    load_recipe(recipe_file, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model is missing"),
        ("[model]\n", "model.path is missing"),
        ("[model\n", "is not valid TOML"),
        ("model = 3\n", "model: "),
        ('[model]\npath = "m"\n[novelty]\nx = 1\n', "unknown key novelty; known are "),
    ],
)
def test_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "none.toml")


def test_loading_a_dumped_recipe_gives_the_same_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["trainer.max_seconds=3.5", "task.options={seed = 3, names = ['a']}"])
    copy = recipe_file.with_name("copy.toml")
    copy.write_text(dump_toml(recipe))
    assert load_recipe(copy) == recipe
    own = ["streams.type=redis", "engine.type=a:B", "engine.options.x=1", "metrics.sinks=['a:B', {type = 'a:C'}]"]
    copy.write_text(dump_toml(load_recipe(recipe_file, own)))
    assert load_recipe(copy) == load_recipe(recipe_file, own)


def test_relative_paths_start_at_the_recipe_or_working_directory(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a recipe, paths are relative to the recipe; on the command line, to the working directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_recipe(recipe_file).model.path == tmp_path / "model"
    assert load_recipe(recipe_file, ["model.path=mine"]).model.path == elsewhere / "mine"


def test_new_type_of_a_section_drops_its_old_keys(recipe_file: Path) -> None:
    kept = load_recipe(recipe_file, ["schedule.type=pipeline"]).schedule
    assert isinstance(kept, PipelineConfig)
    assert kept.num_in_flight == 48
    changed = load_recipe(recipe_file, ["schedule.type=conventional", "schedule.steps_per_rl_step=4"]).schedule
    assert changed == ConventionalConfig(steps_per_rl_step=4)
    with pytest.raises(RecipeError, match=r"schedule\.max_lag is a key of pipeline"):
        load_recipe(recipe_file, ["schedule.type=conventional", "schedule.max_lag=4"])


@pytest.fixture
def typed_file(tmp_path: Path) -> Path:
    path = tmp_path / "typed.toml"
    path.write_text(
        '[model]\npath = "model"\n'
        '[trainer]\ntype = "deepspeed"\nlearning_rate = 0.5\nnum_ranks = 2\nzero_stage = 3\n'
        '[engine]\ntype = "http"\nthreads = 3\njoin_timeout_s = 5\n'
        '[advantage]\ntype = "value"\ngae_lambda = 0.9\n'
        '[weights]\ntype = "files"\ndirectory = "there"\n'
        '[task]\ntype = "a:B"\nnum_graders = 4\noptions = {depth = 2}\n'
    )
    return path


def test_change_of_type_keeps_keys_of_both_types(typed_file: Path) -> None:
    types = {"trainer": "fsdp", "engine": "embedded", "advantage": "group_mean", "weights": "shared_memory"}
    recipe = load_recipe(typed_file, [f"{section}.type={name}" for section, name in types.items()])
    assert recipe.trainer == FsdpTrainerConfig(learning_rate=0.5, num_ranks=2)
    assert recipe.engine == EmbeddedEngineConfig(threads=3)
    assert recipe.advantage == GroupAdvantageConfig(type="group_mean")
    assert recipe.weights == SharedMemoryWeightsConfig()
    assert load_recipe(typed_file, ["trainer.type=single"]).trainer == SingleTrainerConfig(learning_rate=0.5)


def test_change_of_type_drops_the_old_options(typed_file: Path) -> None:
    assert instance(load_recipe(typed_file, ["task.type=a:B"]).task, OwnTaskConfig).options == {"depth": 2}
    changed = instance(load_recipe(typed_file, ["task.type=a:C", "task.options.type=deep"]).task, OwnTaskConfig)
    assert (changed.options, changed.num_graders) == ({"type": "deep"}, 4)
    engine = load_recipe(typed_file, ["engine.type=a:B", "engine.options.x=1", "engine.type=a:C"]).engine
    assert engine == OwnEngineConfig(type="a:C", options={"x": 1}, threads=3)


def test_overrides_apply_to_the_chosen_type_in_any_order(typed_file: Path) -> None:
    recipe = load_recipe(typed_file, ["trainer.zero_stage=2", "trainer.type=fsdp", "trainer.type=deepspeed"])
    assert recipe.trainer.type == "deepspeed"
    with pytest.raises(RecipeError, match=r"trainer\.zero_stage is a key of deepspeed, but trainer.type = 'fsdp'"):
        load_recipe(typed_file, ["trainer.zero_stage=2", "trainer.type=fsdp"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.backend=fsdp"], "trainer.backend is now trainer.type"),
        (["schedule.max_waiting=256"], "schedule.max_waiting is now schedule.queue_capacity"),
        (["loss.type=custom", "loss.function=mine:loss"], "loss.function is now loss.type"),
        (["engine.type=http", "engine.update_timeout_s=9"], "engine.update_timeout_s is now weights.timeout_s"),
        (["engine.max_update_pause_s=1"], "engine.max_update_pause_s is now not needed: .+; remove the key"),
    ],
)
def test_renamed_key_is_refused_with_its_new_name(recipe_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{message}$"):
        load_recipe(recipe_file, overrides)


def test_run_of_version_0_1_is_refused_with_the_new_key(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "model"\n[trainer]\nbackend = "single"\nnum_ranks = 1\n')
    with pytest.raises(RecipeError, match=r"^trainer\.backend is now trainer\.type$"):
        open_run(tmp_path, [])


def test_section_without_type_has_the_default_type(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npath = "model"\n[loss]\nmax_ratio = 3\n[schedule]\nmax_lag = 4\n')
    recipe = load_recipe(path, ["loss.kl_coefficient=0.1"])
    assert (recipe.loss.type, recipe.loss.max_ratio, recipe.loss.kl_coefficient) == ("reinforce", 3, 0.1)
    assert recipe.schedule == PipelineConfig(max_lag=4)
    assert load_recipe(path, ["loss.type=reinforce"]).loss.max_ratio == 3
    with pytest.raises(RecipeError, match=r"loss\.clip_high is a key of grpo"):
        load_recipe(path, ["loss.clip_high=0.3"])


def test_every_key_has_a_description() -> None:
    rows = {key: description for key, _, _, description in describe_recipe()}
    assert "schedule.max_lag" in rows
    assert "schedule.steps_per_rl_step" in rows
    undescribed = [key for key, description in rows.items() if not description and not key.endswith(".type")]
    assert undescribed == []
    assert rows["trainer.zero_stage"].endswith("(of deepspeed)")
    assert rows["engine.join_timeout_s"].endswith("(of http)")
    assert "(of" not in rows["trainer.learning_rate"]


def test_keys_of_tables_in_a_list_are_listed() -> None:
    rows = {key: (kind, default) for key, kind, default, _ in describe_recipe()}
    assert rows["eval.sets"] == ("list of tables", "[]")
    assert rows["eval.sets[].name"] == ("str", "required")
    assert rows["task.sources[].weight"] == ("float", "1.0")
    assert rows["task.sources[].task"] == ("table", "required")
    assert not [key for key in rows if key.startswith("task.sources[].task.")]


def test_advantage_options_may_precede_the_type(recipe_file: Path) -> None:
    advantage = load_recipe(recipe_file, ["advantage.gae_lambda=0.9", "advantage.type=value"]).advantage
    assert instance(advantage, ValueAdvantageConfig).gae_lambda == 0.9


def test_truncation_below_the_clip_is_one_line(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"max_ratio = 1.1 is less than 1 \+ clip_high = 1.2"):
        load_recipe(recipe_file, ["loss.type=grpo", "loss.max_ratio=1.1"])
    assert load_recipe(recipe_file, ["loss.type=cispo", "loss.max_ratio=1.1"]).loss.max_ratio == 1.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["streams.url=redis://host:6379"], "streams.url is a key of redis, but streams.type = 'sqlite'"),
        (["streams.type=redis", "streams.url=redis://:secret@host"], "set $MIDFLIGHT_REDIS_URL instead"),
        (["streams.type=redis", "streams.url=host:6379"], "streams.url: "),
        (["streams.type=kafka"], "streams.type: there is no 'kafka'; known are sqlite, redis, "),
    ],
)
def test_wrong_streams_are_one_line(recipe_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe_file, overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_truncated_sampling_warns_once_with_its_keys(recipe_file: Path) -> None:
    assert recipe_warnings(load_recipe(recipe_file, [])) == []
    (warning,) = recipe_warnings(load_recipe(recipe_file, ["sampling.top_p=0.9", "sampling.min_p=0.1"]))
    assert warning.startswith("sampling.top_p = 0.9, sampling.min_p = 0.1: ")
    assert "the importance ratios are biased" in warning


def test_check_prints_warnings(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["midflight", "config", "check", "cpu_demo", "sampling.top_k=5"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    stdout, stderr = capfd.readouterr()
    assert stdout == "cpu_demo: ok\n"
    assert stderr.startswith("midflight: warning: sampling.top_k = 5: ")
