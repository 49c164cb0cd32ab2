"""One batch has one gradient: the same for every split into micro-batches and ranks, to 1e-10 in float64.

The batch has ragged lengths, prompts that the filter drops, masked completions and injected tokens. The gradient of
every set of its rows is computed once; every partition of the rows must then add up to the gradient of them all, and
an empty micro-batch must add nothing. Ranks are checked with processes that reduce over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from scalerl.rl import entropy_control
from scalerl.rl.batch import assemble, tokens_of
from scalerl.rl.metrics import Metrics
from scalerl.rl.mismatch import mismatch_metrics
from scalerl.rl.objective import objective
from tests.rl.ranks import on_ranks

V = 5
LOSSES = ("cispo", "dapo", "grpo", "gspo", "reinforce")
AGGREGATIONS = ("prompt", "sample", "token")
NORMS = ("batch", "prompt", "none")
CORRECTIONS = [f"{kind}_{level}" for kind in ("tis", "mis") for level in ("token", "sequence", "geometric")]
KL_FORMS = ("k1_in_reward", "k2_as_loss", "k3_as_loss", "mse")
TIGHT = {
    "cispo": {"eps_max": 1.2},
    "dapo": {"eps_low": 0.2, "eps_high": 0.26},
    "gspo": {"eps_low": 0.05, "eps_high": 0.1},
}


class Policies:
    """Bigram softmaxes: the trained one, under theta_b, and the reference."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        start = torch.randn(V, V, generator=rng, dtype=torch.float64)
        self.theta = (start + 0.3 * torch.randn(V, V, generator=rng, dtype=torch.float64)).requires_grad_()
        self.old, self.reference = start, torch.randn(V, V, generator=rng, dtype=torch.float64)

    @staticmethod
    def logprobs(weights, rows):
        """(log-probabilities, entropies) of the rows' tokens, flat."""
        before = [t for r in rows for t in (r.prompt_ids[-1], *r.completion.tokens[:-1].tolist())]
        tokens = [t for r in rows for t in r.completion.tokens.tolist()]
        table = weights.log_softmax(-1)[torch.tensor(before, dtype=torch.int64)]
        logp = table.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None]).squeeze(1)
        return logp, -(table.exp() * table).sum(1)


def micro_batch(rows, policies, recipe, flags):
    tokens = tokens_of(
        rows, trainer_ratio=recipe.ratio == "trainer_old", device=torch.device("cpu"), dtype=torch.float64
    )
    chosen = torch.cat([flags[row.order] for row in rows]) if rows and flags else None
    return replace(
        tokens,
        logp_old=policies.logprobs(policies.old, rows)[0],
        logp_ref=policies.logprobs(policies.reference, rows)[0],
        policy_keep=chosen if recipe.entropy_control == "clip_cov" else None,
        kl_cov=chosen if recipe.entropy_control == "kl_cov" else None,
    )


def gradient(rows, policies, recipe, flags=None):
    """(objective, its gradient, metrics) of the rows as one micro-batch."""
    tokens = micro_batch(rows, policies, recipe, flags)
    logp, entropy = policies.logprobs(policies.theta, rows)
    value, metrics = objective(logp, entropy, tokens, recipe)
    merged = Metrics(dict(metrics))
    merged.update(mismatch_metrics(logp, tokens, 3))
    return value.detach(), torch.autograd.grad(value, policies.theta)[0], merged


def selected(rows, policies, recipe):
    """Entropy control's choice over the whole step, by row."""
    if recipe.entropy_control not in ("clip_cov", "kl_cov"):
        return None
    tokens = micro_batch(rows, policies, recipe, None)
    logp = policies.logprobs(policies.theta, rows)[0].detach()
    seed = torch.Generator().manual_seed(0)
    chosen = entropy_control.select(logp, tokens.advantage, tokens.mask, recipe, seed)
    lengths = [len(row.completion.tokens) for row in rows]
    return {row.order: part for row, part in zip(rows, chosen.split(lengths), strict=True)}


@pytest.fixture
def groups(make_completion, make_group):
    """Three prompts that train 2 + 2 + 2 rows, one dropped for zero variance and one for nothing unmasked."""

    def c(n, seed, **kind):
        return make_completion(n, seed=seed, versions=[(i + seed) % 4 for i in range(n)], **kind)

    return [
        make_group([c(3, 0), c(7, 1, injected=(2, 3)), c(4, 2, truncated=True)], [True, False, False], group=0),
        make_group([c(2, 3), c(5, 4)], [False, False], group=1),
        make_group([c(1, 5), c(9, 6), c(3, 7)], [False, True, None], group=2),
        make_group([c(6, 8, truncated=True)], [False], group=3),
        make_group([c(4, 9), c(8, 10, injected=(5,))], [True, False], group=4, task="hard"),
    ]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put the items into non-empty sets (203 for six)."""
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def assert_same(found: Metrics, expected: Metrics) -> None:
    assert found.items.keys() == expected.items.keys()
    for name, value in expected.compute().items():
        assert found.compute()[name] == pytest.approx(value, rel=1e-10, abs=1e-12), name


def check_every_partition(groups, recipe, rows_expected=6):
    policies, rows = Policies(), assemble(groups, recipe).rows
    assert len(rows) == rows_expected
    flags = selected(rows, policies, recipe)
    whole_value, whole, whole_metrics = gradient(rows, policies, recipe, flags)
    assert whole.abs().max() > 1e-3
    numbers = list(range(len(rows)))
    sets = {
        chosen: gradient([rows[i] for i in reversed(chosen)], policies, recipe, flags)
        for size in range(len(rows) + 1)
        for chosen in itertools.combinations(numbers, size)
    }
    assert sets[()][0] == 0 and (sets[()][1] == 0).all()
    for partition in partitions(numbers):
        parts = [sets[tuple(sorted(part))] for part in partition]
        assert abs(sum(value for value, _, _ in parts) - whole_value) < 1e-10
        assert (sum(g for _, g, _ in parts) - whole).abs().max() < 1e-10
    merged = Metrics()
    for i in [None, *numbers]:  # an empty micro-batch, then every row alone
        merged.update(sets[() if i is None else (i,)][2].items)
    assert_same(merged, whole_metrics)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_aggregation(loss, aggregation, groups, make_recipe):
    check_every_partition(groups, make_recipe(loss=loss, loss_aggregation=aggregation, loss_params=TIGHT))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("zero_variance", ["drop", "keep"])
def test_normalisation_and_filter(norm, zero_variance, groups, make_recipe):
    recipe = make_recipe(advantage_norm=norm, zero_variance=zero_variance, kl="k2_as_loss", kl_params={"beta": 0.1})
    check_every_partition(groups, recipe, 6 if zero_variance == "drop" else 8)


@pytest.mark.parametrize("length_control", ["penalty", "none"])
def test_length_control_and_scored_truncation(length_control, groups, make_recipe):
    recipe = make_recipe(
        length_control=length_control, penalty={"max_length": 8, "cache_length": 6}, truncation="score"
    )
    check_every_partition(groups, recipe, 7)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", KL_FORMS)
def test_kl(form, weighted, groups, make_recipe):
    params = {"beta": 0.2, "beta_by_task": {"hard": 0.9}, "importance_weighted": weighted}
    check_every_partition(groups, make_recipe(kl=form, kl_params=params, loss_aggregation="sample"))


@pytest.mark.parametrize("loss,ratio", [("grpo", "trainer_old"), ("reinforce", "generator")])
@pytest.mark.parametrize("how", CORRECTIONS)
def test_correction(how, loss, ratio, groups, make_recipe):
    check_every_partition(groups, make_recipe(loss=loss, ratio=ratio, mismatch_correction=how, mismatch_cap=1.5))


@pytest.mark.parametrize("loss", LOSSES)
def test_offpolicy_sequence_mask(loss, groups, make_recipe):
    recipe = make_recipe(loss=loss, offpolicy_sequence_mask=0.3, kl="k3_as_loss", kl_params={"beta": 0.1})
    check_every_partition(groups, recipe)


@pytest.mark.parametrize(
    "control,params",
    [
        ("clip_cov", {"share": 0.2, "cov_low": -10.0, "cov_high": 10.0}),
        ("kl_cov", {"share": 0.2}),
        ("bonus", {"coef": 0.5}),
    ],
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entropy_control(control, params, aggregation, groups, make_recipe):
    recipe = make_recipe(entropy_control=control, loss_aggregation=aggregation, **{control: params})
    check_every_partition(groups, recipe)


def test_a_mean_over_each_micro_batch_would_be_caught(groups, make_recipe):
    """The batch is uneven enough for the error that all this guards against to show."""
    recipe = make_recipe()
    policies, rows = Policies(), assemble(groups, recipe).rows
    _, whole, _ = gradient(rows, policies, recipe)
    by_mean = []
    for part in (rows[:2], rows[2:]):
        own = [replace(row, weight=1 / sum(int(r.mask.sum()) for r in part)) for row in part]
        by_mean.append(gradient(own, policies, recipe)[1])
    assert (sum(by_mean) / 2 - whole).abs().max() > 1e-4


def _rank(rank: int, store: str, rows: list, recipe, expected: torch.Tensor, expected_metrics: Metrics) -> None:
    """Ranks have uneven shares, and the last has an empty micro-batch only."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    shares = [[rows[4:], rows[:1]], [rows[1:4]], [[]]]
    total, metrics = torch.zeros_like(expected), Metrics()
    for part in shares[rank]:
        _, gradient_of_part, measured = gradient(part, Policies(), recipe)
        total += gradient_of_part
        metrics.update(measured.items)
    dist.all_reduce(total)
    gathered: list = [None] * 3
    dist.all_gather_object(gathered, metrics.items)
    merged = Metrics()
    for items in gathered:
        merged.update(items)
    assert (total - expected).abs().max() < 1e-10
    assert_same(merged, expected_metrics)
    dist.destroy_process_group()


def test_ranks_that_sum_their_gradients(groups, make_recipe, tmp_path):
    recipe = make_recipe(loss="gspo", kl="k3_as_loss", kl_params={"importance_weighted": True, "beta": 0.1})
    rows = assemble(groups, recipe).rows
    _, expected, metrics = gradient(rows, Policies(), recipe)
    on_ranks(3, _rank, str(tmp_path / "store"), rows, recipe, expected, metrics)
