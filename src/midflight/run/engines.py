"""The generator of a run: an engine in the rollout process, or a pool of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.config.sections import HttpEngineConfig
from midflight.engine.pulling import PullingGenerator
from midflight.errors import RecipeError, WeightsReplacedError
from midflight.generation.pool import EnginePool
from midflight.launch.build import recipe_schedule
from midflight.launch.engines import build_engine
from midflight.models.loading import load_config
from midflight.models.stopping import StopRules
from midflight.protocols import Generator, LocalEngine, PublishedVersions, WeightReceiver, WeightTransport
from midflight.run.evaluation import num_slots
from midflight.run.servers import server_pool
from midflight.tracing.spans import Tracer


@contextmanager
def open_generator(
    recipe: Recipe,
    run: RunDirectory,
    transport: WeightTransport,
    lineage: str,
    versions: PublishedVersions,
    note: Callable[[str], object],
    stop_rules: StopRules,
    tracer: Tracer,
) -> Iterator[Generator]:
    """Open the generator of a run whose trainer has published weights; `note` gets lines for the user.

    Raises: RecipeError if the transport has no end for an engine in this process.
    """
    if isinstance(recipe.engine, HttpEngineConfig):
        with server_pool(recipe, run, versions.newest_version() or 0, lineage, note) as pool:
            yield pool
        return
    receiver = transport.receiver()
    if receiver is None:
        raise RecipeError(
            f"weights.type = {recipe.weights.type!r} sends weights to servers only, but engine.type ="
            f" {recipe.engine.type!r} generates in the rollout process; weights.type = 'shared_memory' would work"
        )
    engine = _first_engine(recipe, receiver, stop_rules)

    def pausing() -> AbstractContextManager[None]:
        # The rollout loop itself measures the steps of an idle engine.
        return tracer.span("update") if engine.num_in_flight else nullcontext()

    with closing(PullingGenerator(engine, receiver, pausing=pausing)) as generator:
        yield generator


def _first_engine(recipe: Recipe, receiver: WeightReceiver, stop_rules: StopRules) -> LocalEngine:
    while (engine := _engine_of_newest(recipe, receiver, stop_rules)) is None:
        pass
    return engine


def _engine_of_newest(recipe: Recipe, receiver: WeightReceiver, stop_rules: StopRules) -> LocalEngine | None:
    """Return an engine with the newest weights; None if newer ones replaced them while the engine copied them."""
    incoming = receiver.receive()
    try:
        engine = build_engine(
            recipe,
            load_config(recipe.model.path),
            dict(incoming.tensors),
            max_num_seqs=recipe_schedule(recipe).max_in_flight + num_slots(recipe),
            version=incoming.version,
            stop_rules=stop_rules,
        )
        incoming.check()
    except WeightsReplacedError:
        return None
    return engine


def wait_for_engine(generator: Generator, timeout_s: float) -> bool:
    """Wait for the first server of a pool; return False after the timeout. An engine in this process needs no wait."""
    return not isinstance(generator, EnginePool) or generator.wait_for_member(timeout_s)


def advance(generator: Generator, version: int) -> bool:
    """Step a generator with nothing in flight; return True once it samples with `version` or a newer one."""
    generator.step()
    return generator.weight_version >= version
