r"""Mathematics: prompts from files, answers in `\boxed{...}`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from scalerl.rl.config import MathTask
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import final_part, unparsed
from scalerl.rl.tasks.boxes import last_box
from scalerl.rl.tasks.dataset import DatasetTask, load_dataset, put
from scalerl.rl.tasks.math_verifier import same_answer
from scalerl.rl.tasks.timed_pool import Failed, TimedPool
from scalerl.rl.types import Prompt, Verdict


class Math(DatasetTask):
    """The answer of a completion is its last closed box after the thinking; math-verify compares it to the data set's.

    A completion without a box is not correct and `unparsed`. One whose comparison fails or takes longer than
    `time_limit` is a verifier's error."""

    def __init__(self, config: MathTask, name: str) -> None:
        if find_spec("math_verify") is None:
            raise UserError("task=math needs math-verify: pip install 'scalerl[math]'")
        self.name = name
        self._reward = config.reward
        self._data = load_dataset(config.data, put(config.asking, name))
        self._pool = TimedPool(same_answer, workers=config.workers, seconds=config.time_limit, preload=["math_verify"])

    def verify(self, prompt: Prompt, completion: str) -> bool:
        (verdict,) = self.verify_batch([(prompt, completion)])
        if verdict.error:
            raise RuntimeError(f"no verdict on {completion!r}")
        return verdict.correct

    def verify_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Equal answers to a prompt are compared once."""
        answers = [(prompt.answer, last_box(final_part(completion))) for prompt, completion in pairs]
        asked = [pair for pair in dict.fromkeys(answers) if pair[1] is not None]
        found = dict(zip(asked, self._pool.map(asked), strict=True))
        return [unparsed(self._reward) if answer is None else _verdict(found[gold, answer]) for gold, answer in answers]


def _verdict(result: bool | Failed) -> Verdict:
    return Verdict(False, error=True) if isinstance(result, Failed) else Verdict(result)
