"""Who carries out a run's rollouts: the built-in agents, an agent function, or a program behind the endpoint.

Beside `assembly`, which makes what they share. How an agent works is in `rollout` and `serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sandboxes import Runtime
from thundersync.config import Config, RolloutConfig
from thundersync.core.types import GroupId
from thundersync.endpoint import Door
from thundersync.generate.base import Generator
from thundersync.live import Looked
from thundersync.own import Own
from thundersync.rollout.agent import OnContent, ShellAgent
from thundersync.rollout.attempt import Emit, OnTurn
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.functions import AgentFunction, FunctionAgent
from thundersync.rollout.manners import Manners
from thundersync.rollout.runner import Agent, RolloutRunner
from thundersync.score.judge import Judge
from thundersync.score.reward import RewardChecker

OnOpening = Callable[[GroupId, Sequence[int]], None]
"""Told what a rollout shows the model first, by agents whose opening nobody else knows."""


class Agents:
    """Makes agents of one kind, for training and for evaluation, and runs them on the run's engines."""

    def __init__(
        self,
        config: Config,
        own: Own,
        *,
        renderer: Renderer,
        runtime: Runtime,
        manners: Manners,
        door: Door | None,
        generators: Sequence[Generator],
        run_name: str,
        emit: Emit,
    ) -> None:
        self._config = config
        self._own = own
        self._renderer = renderer
        self._runtime = runtime
        self._manners = manners
        self._door = door
        self._generators = generators
        self._labels = {"thundersync.run": run_name}
        self._emit = emit
        self._checker = RewardChecker(runtime=runtime, pids=config.sandbox.pids, labels=self._labels)
        self._judge = own.judge(self._checker)
        self.made: list[Looked] = []
        """So far: they let a viewer look at a rollout while it lives."""

    def agent(
        self,
        rollout: RolloutConfig,
        *,
        on_turn: OnTurn | None = None,
        on_content: OnContent | None = None,
        on_opening: OnOpening | None = None,
    ) -> Agent:
        """An agent that samples by `rollout`; the callbacks are a training run's."""

        def of_function(function: AgentFunction, judge: Judge | None = None) -> FunctionAgent:
            made = FunctionAgent(
                function,
                renderer=self._renderer,
                runtime=self._runtime,
                checker=self._checker,
                judge=judge or self._judge,
                config=rollout,
                prompt=self._own.prompt(self._config),
                emit=self._emit,
                pids=self._config.sandbox.pids,
                labels=self._labels,
                on_turn=on_turn,
                on_content=on_content,
            )
            self.made.append(made)
            return made

        if self._own.agent is not None:
            return of_function(self._own.agent)
        if self._door is not None:
            return self._door.agent(rollout, of_function, on_opening=on_opening)
        shell = ShellAgent(
            renderer=self._renderer,
            runtime=self._runtime,
            checker=self._checker,
            judge=self._judge,
            config=rollout,
            prompt=self._manners,
            stop=rollout.stop,
            emit=self._emit,
            pids=self._config.sandbox.pids,
            labels=self._labels,
            on_turn=on_turn,
            on_content=on_content,
        )
        self.made.append(shell)
        return shell

    def runner(self, agent: Agent) -> RolloutRunner:
        """As many of its rollouts at once as engines and sandboxes take."""
        room = self._config.rollout.concurrency or sum(each.max_concurrency for each in self._generators)
        return RolloutRunner(
            agent=agent,
            generators=self._generators,
            on_failure=self._config.algo.on_failure,
            max_attempts=self._config.algo.max_attempts,
            emit=self._emit,
            concurrency=min(room, self._config.sandbox.max_containers),
        )
