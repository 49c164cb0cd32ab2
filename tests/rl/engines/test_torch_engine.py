"""The embedded engine against plain forward passes of the library's models."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import DynamicCache

from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.torch_engine import TorchEngine
from scalerl.rl.errors import UserError
from scalerl.rl.types import Completion, Interrupt, Request, Sampling

END_THINK = 5
PHRASE = (7, 1, END_THINK)  # 1 is a stop id: injected, it must not stop
INTERRUPT = Interrupt(PHRASE, END_THINK, answer_budget=4)


def ragged(groups: int = 5, n: int = 3, budgets: tuple[int, ...] | None = None, stream: int = 11) -> list[Request]:
    """Groups whose prompts all have different lengths."""
    rng = np.random.default_rng(3)
    lengths = [4, 1, 9, 6, 2, 7, 3, 5][:groups]
    return [
        Request(g, tuple(rng.integers(2, 23, length).tolist()), n, stream, budgets) for g, length in enumerate(lengths)
    ]


def same(a: Completion, b: Completion) -> bool:
    """Equal to the bit, kept sets included."""
    fields = ("tokens", "logprobs", "versions", "injected", "entropy")
    kept = zip(a.kept or (), b.kept or (), strict=True)
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in fields) and all(np.array_equal(*k) for k in kept)


@pytest.mark.parametrize(
    "name",
    ["llama", "llama_tied", "llama3_rope", "llama_dynamic_rope", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe"],
)
def test_logprobs_equal_a_full_forward_pass(name, make_model, make_engine, run, full_forward):
    """Ragged prompts, slots refilled (4 for 15 completions), interruption, temperature."""
    model = make_model(name)
    engine = make_engine(model, temperature=0.8, max_tokens=14, stop_ids=(0, 1), interrupt=INTERRUPT)
    requests = ragged(budgets=(3, 5, 8))
    groups = run(engine, requests)
    completions = [(r, c) for r in requests for c in groups[r.group]]
    assert len({len(c.tokens) for _, c in completions}) > 3
    assert any(c.interrupted for _, c in completions) and any(not c.interrupted for _, c in completions)
    for request, completion in completions:
        logprobs = full_forward(model, request, completion, temperature=0.8)
        expected = logprobs.gather(-1, torch.tensor(completion.tokens[:, None]).long())[:, 0].numpy()
        expected[completion.injected] = 0
        entropy = -(logprobs.exp() * logprobs).sum(-1).numpy()
        entropy[completion.injected] = 0
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(completion.entropy, entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_tied", "llama_dynamic_rope"])
def test_a_bfloat16_engine_is_as_close_as_bfloat16_gets(name, make_model, make_engine, run, full_forward):
    model, requests = make_model(name), ragged()
    groups = run(make_engine(model, dtype=torch.bfloat16), requests)
    gaps = []
    for request in requests:
        for completion in groups[request.group]:
            logprobs = full_forward(model, request, completion)
            gaps.append(logprobs.gather(-1, torch.tensor(completion.tokens[:, None]).long())[:, 0].numpy())
            gaps[-1] -= completion.logprobs
    gap = np.abs(np.concatenate(gaps))
    assert 1e-4 < gap.mean() < 0.05 and gap.max() < 0.3


def test_families_take_the_path_meant_for_them(make_model):
    def kind(name: str) -> str:
        model = make_model(name)
        return type(load_decoder(model, dtype=torch.float32, head_dtype=torch.float32, device="cpu")).__name__

    assert {kind(name) for name in ("llama", "qwen2", "qwen3", "llama3_rope")} == {"DenseDecoder"}
    assert {kind(name) for name in ("qwen3_moe", "llama_dynamic_rope")} == {"HFDecoder"}


def fit_of(draws: np.ndarray, probs: np.ndarray) -> float:
    """p-value of a chi-square test that draws come from probs, rare tokens (fewer than 5 expected) pooled."""
    expected = probs / probs.sum() * len(draws)
    observed = np.bincount(draws, minlength=len(probs))
    rare = expected < 5
    if rare.any():
        observed, expected = (np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected))
    return float(stats.chisquare(observed, expected).pvalue)


def test_tokens_follow_the_models_distribution(make_model, make_engine, run, full_forward):
    model = make_model("qwen3")
    engine = make_engine(model, slots=2000, max_tokens=2, stop_ids=())
    request = Request(0, (3, 9, 4), 6000, stream=5)
    pairs = np.array([c.tokens for c in run(engine, [request])[0]])
    first = np.bincount(pairs[:, 0]).argmax()
    probe = Completion(np.array([first, 0]), *(np.zeros(2),) * 3, finish="length")
    by_position = full_forward(model, request, probe).exp().double().numpy()
    for draws, probs in ((pairs[:, 0], by_position[0]), (pairs[pairs[:, 0] == first, 1], by_position[1])):
        assert len(draws) > 500
        assert fit_of(draws, probs) > 1e-3
        assert fit_of(draws, (probs + np.roll(probs, 1)) / 2) < 1e-9  # the test has the power to fail


def stale_reference(models, prompt: tuple[int, ...], completion: Completion) -> np.ndarray:
    """Log-probabilities of a completion whose token t was computed by the weights of version versions[t], over keys and
    values that were each computed by the weights current when their token was fed."""
    cache, out = DynamicCache(), []
    feed, tokens = torch.tensor([prompt]), completion.tokens.tolist()
    for token, version in zip(tokens, completion.versions.tolist(), strict=True):
        with torch.inference_mode():
            output = models[version](input_ids=feed, past_key_values=cache, use_cache=True)
        out.append(float(output.logits[0, -1].float().log_softmax(-1)[token]))
        feed = torch.tensor([[token]])
    return np.array(out)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*")
@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "qwen3_moe"])
def test_unfinished_completions_go_on_from_a_stale_cache(name, make_model, make_engine):
    models = {version: make_model(name, seed=version) for version in range(3)}
    engine = make_engine(models[0], slots=5, max_tokens=10, stop_ids=(0,))
    requests = ragged(groups=4, n=4)
    engine.submit(requests)
    groups = {}
    for tick in range(100):
        if tick in (3, 7):
            version = engine.version + 1
            engine.update_weights(models[version].state_dict(), version)
        groups.update({g.group: g.completions for g in engine.tick()})
        if engine.idle:
            break
    assert len(groups) == 4
    completions = [(r, c) for r in requests for c in groups[r.group]]
    assert any(len(set(c.versions.tolist())) > 1 for _, c in completions)
    for request, completion in completions:
        assert (np.diff(completion.versions) >= 0).all()
        expected = stale_reference(models, request.prompt_ids, completion)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)
    changed = next((r, c) for r, c in completions if len(set(c.versions.tolist())) > 1)
    fresh = replace(changed[1], versions=np.full_like(changed[1].versions, changed[1].versions[-1]))
    gap = np.abs(stale_reference(models, changed[0].prompt_ids, fresh) - changed[1].logprobs)
    assert gap.max() > 1e-2  # the reference can tell a stale cache from a fresh one


def test_a_kept_prompt_outlives_an_update_and_queued_groups_do_not(make_model, make_engine, run):
    models = [make_model(seed=seed) for seed in (0, 1)]
    engine = make_engine(models[0], slots=2, max_tokens=4, stop_ids=())
    engine.submit([Request(0, (3, 4), 4, stream=1), Request(1, (5, 6), 2, stream=1)])
    engine.tick()
    engine.update_weights(models[1].state_dict(), 1)
    groups = run(engine, [])
    late = groups[0][2]
    assert late.versions.tolist() == [0, 1, 1, 1]  # first token from the kept logits
    assert [c.versions.tolist() for c in groups[1]] == [[1] * 4] * 2


def test_a_group_shares_one_prefill_and_work_is_counted_exactly(make_model, make_engine, run):
    engine = make_engine(make_model(), slots=3, max_tokens=6)
    requests = ragged(groups=4, n=5)
    groups = run(engine, requests)
    prompts = [len(r.prompt_ids) for r in requests]
    assert engine.work.prefill_tokens == sum(prompts)
    assert engine.work.prefill_context == sum(sum(range(1, p + 1)) for p in prompts)
    lengths = [(p, len(c.tokens)) for r, p in zip(requests, prompts, strict=True) for c in groups[r.group]]
    assert engine.work.decode_tokens == sum(t - 1 for _, t in lengths)
    assert engine.work.generated_tokens == sum(t for _, t in lengths)
    assert engine.work.decode_context == sum(sum(range(p + 1, p + t)) for p, t in lengths)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_completions_do_not_depend_on_slots_or_neighbours(name, make_model, make_engine, run):
    model, requests = make_model(name), ragged(groups=5, n=4)
    wide = run(make_engine(model, slots=64), requests)
    for slots in (1, 3):
        narrow = run(make_engine(model, slots=slots), requests)
        for group, completions in wide.items():
            for a, b in zip(completions, narrow[group], strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
    alone = run(make_engine(model), [requests[2]])[2]
    assert [c.tokens.tolist() for c in alone] == [c.tokens.tolist() for c in wide[2]]
    other = run(make_engine(model), [replace(requests[2], stream=12)])[2]
    assert [c.tokens.tolist() for c in other] != [c.tokens.tolist() for c in wide[2]]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("ticks", [0, 1, 9])
def test_a_restored_engine_continues_to_the_bit(name, ticks, make_model, make_engine, run):
    model = make_model(name)
    extras = dict(interrupt=INTERRUPT, top_p=0.9, return_kept=True, aux_token=True, return_experts=name == "qwen3_moe")

    def fresh() -> TorchEngine:
        return make_engine(model, slots=5, max_tokens=16, version=7, **extras)

    engine, restored = fresh(), fresh()
    engine.submit(ragged(groups=5, n=4, budgets=(2, 5, 7, 12)))
    for _ in range(ticks):
        engine.tick()
    state = pickle.loads(pickle.dumps(engine.state_dict()))
    expected = run(engine, [])
    restored.load_state_dict(state)
    assert restored.n_unfinished == len(expected)
    continued = run(restored, [])
    assert list(continued) == list(expected)
    for group, completions in expected.items():
        for a, b in zip(completions, continued[group], strict=True):
            assert same(a, b)
            assert a.kept is not None and a.aux_tokens is not None and np.array_equal(a.aux_tokens, b.aux_tokens)
            assert (a.experts is None) == (name == "llama")
            assert a.experts is None or np.array_equal(a.experts, b.experts)
    assert restored.work == engine.work


def test_saving_does_not_disturb_and_is_not_disturbed(make_model, make_engine, run):
    model, requests = make_model(), ragged(n=4)
    watched, plain, restored = (make_engine(model, return_kept=True) for _ in range(3))
    expected = run(plain, requests)
    watched.submit(requests)
    done = {g.group: g.completions for _ in range(6) for g in watched.tick()}
    state = watched.state_dict()
    rest = run(watched, [])
    restored.load_state_dict(state)
    again = run(restored, [])
    for group, completions in expected.items():
        for candidate in (done.get(group) or rest[group], done.get(group) or again[group]):
            assert all(map(same, completions, candidate))


def test_state_of_another_sampling_is_refused(make_model, make_engine):
    model = make_model()
    with pytest.raises(ValueError, match="sampling"):
        make_engine(model, max_tokens=5).load_state_dict(make_engine(model, max_tokens=6).state_dict())


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 3), (0.8, 4), (1.0, 0)])
def test_kept_sets_renormalise(top_p, top_k, make_model, make_engine, run, full_forward):
    model = make_model("qwen2")
    requests = ragged(groups=3, n=4, budgets=(3, 4, 6, 9))
    engine = make_engine(model, top_p=top_p, top_k=top_k, return_kept=True, temperature=1.3, interrupt=INTERRUPT)
    for group, completions in run(engine, requests).items():
        for completion in completions:
            full = full_forward(model, requests[group], completion, temperature=1.3).double()
            assert completion.kept is not None and len(completion.kept) == len(completion.tokens)
            for t, (kept, token) in enumerate(zip(completion.kept, completion.tokens, strict=True)):
                assert kept.dtype == np.int32
                if completion.injected[t]:
                    assert len(kept) == 0
                    continue
                ordered = full[t].exp().sort(descending=True).values
                size = 1 + int((ordered.cumsum(0)[:-1] < top_p).sum())
                assert len(kept) == (min(size, top_k) if top_k else size)
                assert set(kept) == set(full[t].topk(len(kept)).indices.tolist())
                renormalised = full[t, kept].log_softmax(-1)
                index = kept.tolist().index(token)
                assert completion.logprobs[t] == pytest.approx(float(renormalised[index]), abs=1e-5)
                entropy = -float((renormalised.exp() * renormalised).sum())
                assert completion.entropy[t] == pytest.approx(entropy, abs=1e-5)


def test_truncated_sampling_without_kept_sets_reports_the_full_distribution(make_model, make_engine, run, full_forward):
    model, requests = make_model(), ragged(groups=1)
    for completion in run(make_engine(model, top_k=2), requests)[0]:
        full = full_forward(model, requests[0], completion)
        for t, token in enumerate(completion.tokens):
            assert token in full[t].topk(2).indices
            assert completion.logprobs[t] == pytest.approx(float(full[t, token]), abs=1e-5)
        assert completion.kept is None


def test_aux_tokens_do_not_change_the_completion(make_model, make_engine, run):
    model, requests = make_model(), ragged()
    plain, aux = run(make_engine(model), requests), run(make_engine(model, aux_token=True), requests)
    for group, completions in plain.items():
        assert all(map(same, completions, aux[group]))
        assert all(len(c.aux_tokens) == len(c.tokens) for c in aux[group])
    drawn = np.concatenate([c.aux_tokens for completions in aux.values() for c in completions])
    taken = np.concatenate([c.tokens for completions in aux.values() for c in completions])
    assert 0 < (drawn == taken).mean() < 0.9


def test_interruption(make_model, make_engine, run):
    model = make_model()

    def one(budget: int | None = None, answer_budget=4, stop_ids=(), max_tokens=20, phrase=()) -> Completion:
        interrupt = None if budget is None else Interrupt(phrase, phrase[-1], answer_budget)
        engine = make_engine(model, stop_ids=stop_ids, max_tokens=max_tokens, interrupt=interrupt)
        return run(engine, [Request(0, (3, 9), 1, stream=1, thinking_budgets=None if budget is None else (budget,))])[
            0
        ][0]

    free = one()
    tokens = free.tokens.tolist()
    at = max(tokens.index(token) for token in tokens[:12])  # a token that had not come before
    end, absent = tokens[at], [token for token in range(23) if token not in tokens]
    phrase = (absent[0], absent[1], end)

    # `end` sampled exactly at the budget: thinking has ended, and only the total budget truncates
    ended = one(at + 1, phrase=phrase)
    assert same(ended, free) and not ended.interrupted and ended.finish == "length"

    # one less, and the phrase comes instead of it, then at most the answer budget
    cut = one(at, phrase=phrase)
    assert cut.tokens[: at + 3].tolist() == [*tokens[:at], *phrase]
    assert np.flatnonzero(cut.injected).tolist() == [at, at + 1, at + 2]
    assert (cut.logprobs[cut.injected] == 0).all() and (cut.logprobs[~cut.injected] < 0).all()
    assert cut.interrupted and cut.finish == "length" and len(cut.tokens) == at + 3 + 4

    # a stop token right after the phrase ends it; a stop id inside the phrase does not
    answer = int(cut.tokens[at + 3])
    assert answer not in tokens[:at], "the model's draws have changed: take another stream"
    stopped = one(at, stop_ids=(answer, phrase[1]), phrase=phrase)
    assert stopped.tokens.tolist() == cut.tokens[: at + 4].tolist()
    assert stopped.finish == "stop" and stopped.interrupted

    # no answer budget: the phrase is the end, and a truncated one
    bare = one(at, answer_budget=0, phrase=phrase)
    assert bare.tokens.tolist() == cut.tokens[: at + 3].tolist() and bare.finish == "length"

    # the total budget cuts the phrase, or comes before it
    short = one(at, max_tokens=at + 2, phrase=phrase)
    assert short.tokens.tolist() == cut.tokens[: at + 2].tolist() and short.finish == "length" and short.interrupted
    beyond = one(at, max_tokens=at, phrase=phrase)
    assert beyond.tokens.tolist() == tokens[:at] and not beyond.interrupted and beyond.finish == "length"


def test_stop_on_the_last_place_is_a_stop(make_model, make_engine, run):
    model, request = make_model(), Request(0, (3, 9), 1, stream=2)
    tokens = run(make_engine(model, stop_ids=(), max_tokens=6), [request])[0][0].tokens.tolist()
    place = max(tokens.index(token) for token in tokens)
    stopped = run(make_engine(model, stop_ids=(tokens[place],), max_tokens=place + 1), [request])[0][0]
    assert stopped.finish == "stop" and not stopped.truncated and stopped.tokens.tolist() == tokens[: place + 1]


def test_engines_share_a_decoder_without_sharing_state(make_model, run):
    decoder = load_decoder(make_model(), dtype=torch.float32, head_dtype=torch.float32, device="cpu")

    def engine() -> TorchEngine:
        return TorchEngine(decoder, slots=3, sampling=Sampling(1.0, 8, (0,)))

    requests = ragged(groups=3)
    expected = run(engine(), requests)
    first, second = engine(), engine()
    first.submit(requests)
    first.tick()
    evaluation = run(second, requests)
    rest = run(first, [])
    assert all(same(a, b) for g in expected for a, b in zip(expected[g], evaluation[g], strict=True))
    assert all(same(a, b) for g in expected for a, b in zip(expected[g], rest[g], strict=True))


def test_experts_are_those_the_router_chose(make_model, make_engine, run):
    model = make_model("qwen3_moe")
    requests = ragged(groups=3, n=3, budgets=(3, 5, 7))
    groups = run(make_engine(model, slots=4, return_experts=True, interrupt=INTERRUPT), requests)
    for request in requests:
        for completion in groups[request.group]:
            ids = torch.tensor([[*request.prompt_ids, *completion.tokens.tolist()]])[:, :-1]
            with torch.inference_mode():
                logits = model.model(input_ids=ids, output_router_logits=True).router_logits
            expected = torch.stack([layer.topk(2).indices for layer in logits], dim=1)
            assert completion.experts is not None and completion.experts.dtype == np.int32
            assert np.array_equal(np.sort(completion.experts), np.sort(expected.numpy()))


def test_engines_that_want_no_experts_share_a_decoder_that_records_them(make_model, run):
    decoder = load_decoder(make_model("qwen3_moe"), dtype=torch.float32, head_dtype=torch.float32, device="cpu")
    plain = Sampling(1.0, 8, (0,))
    training = TorchEngine(decoder, slots=3, sampling=replace(plain, return_experts=True))
    evaluation = TorchEngine(decoder, slots=3, sampling=plain)
    requests = ragged(groups=3)
    with_experts, without = run(training, requests), run(evaluation, requests)
    for group, completions in with_experts.items():
        assert all(map(same, completions, without[group]))
        assert all(c.experts is not None for c in completions)
        assert all(c.experts is None for c in without[group])


def test_dense_models_have_no_experts(make_model, make_engine):
    with pytest.raises(UserError, match="router_replay"):
        make_engine(make_model("qwen3"), return_experts=True)
    with pytest.raises(UserError, match="router_replay"):
        make_engine(make_model("llama_dynamic_rope"), return_experts=True)


def test_requests_and_settings_that_make_no_sense_are_refused(make_model, make_engine):
    model = make_model()
    engine = make_engine(model)
    with pytest.raises(UserError, match="max_position_embeddings=64"):
        engine.submit([Request(0, (3,) * 60, 1, 0)])
    with pytest.raises(UserError, match="max_position_embeddings=64"):
        make_engine(model, max_tokens=64)
    with pytest.raises(ValueError, match="prompt"):
        engine.submit([Request(0, (), 1, 0)])
    with pytest.raises(ValueError, match="thinking budgets"):
        engine.submit([Request(0, (3,), 1, 0, thinking_budgets=(3,))])
    with pytest.raises(ValueError, match="2 thinking budgets"):
        make_engine(model, interrupt=INTERRUPT).submit([Request(0, (3,), 2, 0, thinking_budgets=(3,))])
    with pytest.raises(ValueError, match="group 1 is already"):
        engine.submit([Request(1, (3,), 1, 0), Request(1, (3,), 1, 0)])
    assert engine.idle and engine.n_unfinished == 0 and engine.tick() == []
    with pytest.raises(ValueError, match="temperature"):
        make_engine(model, temperature=0.0)


def test_a_diverged_model_is_reported(make_model, make_engine):
    model = make_model()
    engine = make_engine(model)
    engine.submit(ragged())
    engine.tick()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    engine.update_weights(broken, 1)
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.tick()
