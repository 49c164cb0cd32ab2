"""Off-policy schedules as pure bookkeeping: what may be dispatched, what is trained next, when the weights move.

Groups are numbered in the order of their dispatch and batches take them in that order, so no batch is biased towards
short completions and nothing is ever dropped (ScaleRL, arXiv 2510.13786, 3.1 and A.11; PipelineRL).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from scalerl.rl.recipe import Recipe


@dataclass
class Schedule(ABC):
    """P groups a batch. A *round* is the batches that are trained between two moves of the generator's weights.

    `dispatched` and `trained` count groups; `end` is the number of groups that the run trains in all, beyond which none
    is dispatched."""

    k: int
    prompts_per_batch: int
    end: int
    dispatched: int = 0
    trained: int = 0

    @abstractmethod
    def may_dispatch(self) -> int:
        """How many groups may be dispatched now."""

    @abstractmethod
    def batches_per_round(self) -> int:
        """Batches of the next round."""

    def next_round(self) -> list[range]:
        """Dispatch numbers of the batches of the next round, in order."""
        p = self.prompts_per_batch
        starts = [self.trained + i * p for i in range(self.batches_per_round())]
        return [range(start, start + p) for start in starts]

    def dispatch(self, n: int) -> None:
        self.dispatched += n

    def finish_batch(self) -> None:
        self.trained += self.prompts_per_batch

    def state_dict(self) -> dict[str, int]:
        return {"dispatched": self.dispatched, "trained": self.trained, "end": self.end}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dispatched, self.trained, self.end = state["dispatched"], state["trained"], state["end"]

    @property
    def done(self) -> bool:
        return self.trained >= self.end


class Pipeline(Schedule):
    """PipelineRL-k: the generator streams and takes new weights after every batch, with completions unfinished.

    At most (k+1)P groups are dispatched and untrained. A group dispatched under version v is therefore trained by batch
    v+k at the latest: the lag of its oldest token is at most k. k=0 is synchronous on-policy training."""

    def may_dispatch(self) -> int:
        room = (self.k + 1) * self.prompts_per_batch - (self.dispatched - self.trained)
        return min(room, self.end - self.dispatched)

    def batches_per_round(self) -> int:
        return 1


class PPO(Schedule):
    """PPO-k: k batches are generated with fixed weights, then trained by k steps, then the weights move: lag <= k-1."""

    def may_dispatch(self) -> int:
        """Asked between rounds. What is out already is a round, or the part of one at which the prompts had run out."""
        room = self.k * self.prompts_per_batch - (self.dispatched - self.trained)
        return min(room, self.end - self.dispatched)

    def batches_per_round(self) -> int:
        return min(self.k, (self.end - self.trained) // self.prompts_per_batch)


def build_schedule(recipe: Recipe, steps: int) -> Schedule:
    kind = {"pipeline": Pipeline, "ppo": PPO}[recipe.off_policy]
    return kind(k=recipe.k, prompts_per_batch=recipe.prompts_per_batch, end=steps * recipe.prompts_per_batch)
