"""Worker bodies of a run on one machine, by role: trainer, rollout, preprocess."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch

from midflight.actor.actor import Actor
from midflight.actor.loop import RolloutLoop
from midflight.actor.partials import PartialBuffer
from midflight.actor.shares import Shares
from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.launch.build import (
    build_actor_config,
    build_grader,
    build_learning_rates,
    build_preprocessing,
    build_scorer,
    build_trainer,
    join_training,
    num_threads,
    recipe_schedule,
    trainer_device,
)
from midflight.launch.environments import build_all_environments
from midflight.launch.metrics import open_sinks
from midflight.launch.objectives import build_objective
from midflight.launch.prompts import build_prompts
from midflight.launch.streams import open_batches, open_groups, open_scores, open_unscored, scoring_workers
from midflight.launch.weights import build_transport
from midflight.models.loading import load_tokenizer
from midflight.models.prompts import PromptFormat
from midflight.preprocess.ahead import AheadOfBatches, OtherWorker, SendAhead
from midflight.preprocess.loop import PreprocessAtOnce, PreprocessLoop, Preprocessor, ScoringLoop
from midflight.protocols import Generator, PublishedVersions, Stream, TrainerBackend, WeightSender, WeightTransport
from midflight.run.engines import advance, open_generator, wait_for_engine
from midflight.run.evaluated import best_checkpoint_of
from midflight.run.evaluation import evaluation_during_run
from midflight.run.resuming import actor_checkpoint
from midflight.run.roles import preprocess_role, trainer_role
from midflight.run.worker_process import WorkerContext, start_together
from midflight.tracing.spans import Tracer
from midflight.trainer.checkpoints import checkpoint_of, load_state, newest_whole_checkpoint
from midflight.trainer.loop import LoopSettings, TrainLoop
from midflight.trainer.process_group import ProcessGroup
from midflight.trainer.state import TrainerState
from midflight.trainer.step import TrainStep
from midflight.types import ActorCheckpoint, ChosenBatch
from midflight.weights.null_sender import NullSender


def trainer_body(context: WorkerContext, rank: int = 0) -> None:
    recipe, run = context.recipe, context.run
    config = recipe.trainer
    if config.threads is None:
        torch.set_num_threads(max(1, num_threads(None, recipe_schedule(recipe).colocated) // config.num_ranks))
    else:
        torch.set_num_threads(config.threads)
    torch.manual_seed(recipe.run.seed)
    # All ranks restart together, and a rendezvous file can be used only once.
    rendezvous = context.weights_directory / f"ranks-{context.num_restarts}"
    note = functools.partial(context.tell, "note")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(join_training(recipe, rank, rendezvous))
        sender: WeightSender = NullSender() if rank else _transport(context).sender()
        stack.enter_context(contextlib.closing(sender))
        backend = build_trainer(recipe, sender, group)
        backend.init(rank)
        state = _resume(backend, group, context)
        backend.publish_weights(state.version)
        batches = stack.enter_context(contextlib.closing(open_batches(run, recipe)))
        metrics = None if rank else open_sinks(recipe, run, state.version, note)
        stack.enter_context(contextlib.closing(metrics) if metrics else contextlib.nullcontext())
        tracer = stack.enter_context(_tracer(run, trainer_role(rank)))
        device = trainer_device(recipe, rank)
        step = TrainStep(backend, build_objective(recipe), build_learning_rates(recipe), group, device)
        loop = TrainLoop(loop_settings(recipe, run), step, batches, state, tracer, metrics, sender)
        start_together(context, functools.partial(_serve_weights, context, loop))
        loop.run(context.should_stop)


def _serve_weights(context: WorkerContext, loop: TrainLoop, happens: Callable[[float], bool]) -> None:
    """Serve weights until something happens: the rollout process is set up once an engine has weights."""
    if not loop.serve_weights(happens, context.should_stop):
        raise SystemExit(0)


def _resume(backend: TrainerBackend, group: ProcessGroup, context: WorkerContext) -> TrainerState:
    """Load the newest undamaged checkpoint, which rank 0 determines for all ranks."""
    newest_version, checkpoints = -1, context.run.checkpoints
    if group.rank == 0:
        newest = newest_whole_checkpoint(checkpoints, lambda text: context.tell("note", text))
        newest_version = load_state(newest).version if newest else -1
    version = group.broadcast(newest_version)
    if version < 0:
        return TrainerState()
    checkpoint = checkpoint_of(checkpoints, version)
    backend.load(checkpoint)
    return load_state(checkpoint)


def rollout_body(context: WorkerContext) -> None:
    recipe, run = context.recipe, context.run
    schedule = recipe_schedule(recipe)
    torch.set_num_threads(num_threads(recipe.engine.threads, schedule.colocated))
    transport = _transport(context)
    prompts = build_prompts(recipe, load_tokenizer(recipe.model.path))
    checkpoint = actor_checkpoint(run, recipe)
    environment = build_all_environments(recipe)
    environment.problem(0)  # loads a dataset before the clock of the run starts
    with (
        _tracer(run, "rollout") as tracer,
        build_grader(recipe) as grader,
        contextlib.closing(transport.versions()) as versions,
        _generator(context, transport, versions, prompts, tracer) as generator,
        contextlib.closing(_batch_sink(run, recipe, tracer)) as sink,
        contextlib.closing(PartialBuffer(run.partials)) as partials,
        contextlib.ExitStack() as stack,
    ):
        unscored = [
            stack.enter_context(contextlib.closing(open_unscored(run, recipe, worker)))
            for worker in scoring_workers(recipe)
        ]
        on_ready = SendAhead(unscored, build_preprocessing(recipe), tracer) if unscored else None
        shares = Shares(generator, grader)
        evaluation = evaluation_during_run(recipe, run, generator.weight_version, shares, environment, prompts)
        actor_config = build_actor_config(recipe, prompts)
        actor = Actor(actor_config, shares.generator, environment, shares.grader, prompts, checkpoint, on_ready)
        loop = RolloutLoop(actor, shares.generator, schedule, versions, sink, tracer, partials, evaluation=evaluation)
        context.wait_until(grader.wait_until_ready)
        context.wait_until(lambda timeout_s: wait_for_engine(generator, timeout_s))
        start_together(context)
        with tracer.span("wait"):
            _catch_up(generator, versions, checkpoint, context)
        loop.run(context.should_stop)


def preprocess_body(context: WorkerContext, worker: int) -> None:
    recipe, run = context.recipe, context.run
    torch.set_num_threads(recipe.preprocess.threads or 1)
    with contextlib.ExitStack() as stack:
        tracer = stack.enter_context(_tracer(run, preprocess_role(worker)))
        loop = (_scoring_loop if worker else _batch_loop)(run, recipe, tracer, worker, stack)
        start_together(context)
        loop.run(context.should_stop)


def _scoring_loop(
    run: RunDirectory, recipe: Recipe, tracer: Tracer, worker: int, stack: contextlib.ExitStack
) -> ScoringLoop:
    share = stack.enter_context(contextlib.closing(open_unscored(run, recipe, worker)))
    scores = stack.enter_context(contextlib.closing(open_scores(run, recipe, worker)))
    return ScoringLoop(share, scores, build_scorer(recipe, tracer, worker), tracer)


def _batch_loop(
    run: RunDirectory, recipe: Recipe, tracer: Tracer, worker: int, stack: contextlib.ExitStack
) -> PreprocessLoop:
    groups = stack.enter_context(contextlib.closing(open_groups(run, recipe)))
    batches = stack.enter_context(contextlib.closing(open_batches(run, recipe)))
    preprocessing, scored = build_preprocessing(recipe), None
    if workers := scoring_workers(recipe):
        shares = [stack.enter_context(contextlib.closing(open_unscored(run, recipe, each))) for each in workers]
        scores = [stack.enter_context(contextlib.closing(open_scores(run, recipe, each))) for each in workers[1:]]
        others = [OtherWorker(*streams) for streams in zip(shares[1:], scores, strict=True)]
        scored = AheadOfBatches(build_scorer(recipe, tracer), preprocessing, tracer, shares[0], others)
    return PreprocessLoop(groups, batches, Preprocessor(preprocessing, tracer, scored), tracer)


def _batch_sink(run: RunDirectory, recipe: Recipe, tracer: Tracer) -> Stream[ChosenBatch] | PreprocessAtOnce:
    """Return the sink of the rollout loop. Only the processes that preprocess load the reference model."""
    if recipe.num_preprocess_workers:
        return open_groups(run, recipe)
    preprocessing, scored = build_preprocessing(recipe), None
    if recipe.loss.kl_coefficient is not None:
        scored = AheadOfBatches(build_scorer(recipe, tracer), preprocessing, tracer)
    return PreprocessAtOnce(open_batches(run, recipe), Preprocessor(preprocessing, tracer, scored))


def loop_settings(recipe: Recipe, run: RunDirectory) -> LoopSettings:
    trainer = recipe.trainer
    return LoopSettings(
        max_steps=trainer.max_steps,
        max_seconds=trainer.max_seconds,
        checkpoint_every=trainer.checkpoint_every,
        keep_checkpoints=trainer.keep_checkpoints,
        evaluated_every=recipe.eval.interval,
        best=best_checkpoint_of(recipe, run),
        max_nonfinite_steps=trainer.max_nonfinite_steps,
        checkpoints=run.checkpoints,
        rejected_batches=run.rejected_batches,
    )


def _tracer(run: RunDirectory, role: str) -> Tracer:
    return Tracer(run.spans(role), role)


def _transport(context: WorkerContext) -> WeightTransport:
    note = functools.partial(context.tell, "note")
    return build_transport(context.recipe, context.run, context.weights_path, context.lineage, note)


def _generator(
    context: WorkerContext,
    transport: WeightTransport,
    versions: PublishedVersions,
    prompts: PromptFormat,
    tracer: Tracer,
) -> contextlib.AbstractContextManager[Generator]:
    """Open the generator of the run, once the trainer has published its first weights."""
    _wait_for_version(versions, 0, context)
    note = functools.partial(context.tell, "note")
    return open_generator(
        context.recipe, context.run, transport, context.lineage, versions, note, prompts.stop_rules, tracer
    )


def _wait_for_version(versions: PublishedVersions, version: int, context: WorkerContext) -> None:
    context.wait_until(lambda timeout_s: versions.wait(newer_than=version - 1, timeout_s=timeout_s))


def _catch_up(
    generator: Generator, versions: PublishedVersions, checkpoint: ActorCheckpoint | None, context: WorkerContext
) -> None:
    """Wait until the engine has weights at least as new as the restored rollouts' tokens.

    Versions must not decrease along a rollout. After a kill the trainer is back at its checkpoint, and rollouts may
    have tokens of later versions, which the trainer makes again from the batches in the stream.
    """
    if checkpoint is None:
        return
    newest = max((int(rollout.generated.weight_versions.max(initial=0)) for rollout in checkpoint.rollouts), default=0)
    if generator.weight_version < newest:
        _wait_for_version(versions, newest, context)
        generator.adopt(newest)
        context.wait_until(lambda timeout_s: advance(generator, newest))
