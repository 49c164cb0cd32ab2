"""The engine against a real server: its log-probabilities, versions, interruptions and weight updates."""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.sglang.probe import Probe
from scalerl.rl.engines.sglang.transfer import TransferFailed
from scalerl.rl.engines.torch_engine import TorchEngine
from scalerl.rl.errors import UserError
from scalerl.rl.types import Interrupt, Sampling

from .conftest import TOKENIZER, generate, requests, slowed, trainer_logprobs

pytestmark = pytest.mark.slow
END, END_THINK = TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("</think>")
SAMPLING = Sampling(0.7, 24, (END,))
GREEDY = Sampling(1.0, 24, (END,), top_k=1)
LONG = Sampling(1.0, 200, ())


def weights(path):
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


def greedy_by_torch(path, asked):
    decoder = load_decoder(path, dtype=torch.float32, head_dtype=torch.float32, device="cpu")
    engine, found = TorchEngine(decoder, slots=16, sampling=GREEDY), {}
    engine.submit(asked)
    while not engine.idle:
        found |= {group.group: [c.tokens.tolist() for c in group.completions] for group in engine.tick()}
    return found


def tokens(groups):
    return {number: [c.tokens.tolist() for c in completions] for number, completions in groups.items()}


def test_log_probabilities_agree_with_the_trainers(make_generator, models):
    asked = requests(64, 16)
    groups = generate(make_generator(SAMPLING), asked)
    model, differences = AutoModelForCausalLM.from_pretrained(models["first"], dtype=torch.float32), []
    for request in asked:
        for completion in groups[request.group]:
            differences.append(trainer_logprobs(model, request, completion, 0.7).numpy() - completion.logprobs)
            assert completion.tokens[-1] == END or len(completion.tokens) == 24
            assert END not in completion.tokens[:-1]
    difference = np.concatenate(differences).astype(np.float64)
    k3 = np.mean(np.expm1(difference) - difference)
    print(f"{len(differences)} completions: max {abs(difference).max():.1e}, k3 {k3:.1e}")
    assert len(differences) == 1024 and abs(difference).max() < 1e-4
    assert 0 <= k3 < 1e-9


@pytest.mark.parametrize("transfer", ["broadcast", "disk"])
def test_after_an_update_the_greedy_output_is_the_torch_engines(make_generator, models, transfer):
    checked = (f"engine.transfer={transfer}", "engine.bucket_mb=1", "engine.check_weights=true")
    generator, asked = make_generator(GREEDY, *checked), requests(8, 1)
    expected = {name: greedy_by_torch(models[name], asked) for name in ("first", "second")}
    assert expected["first"] != expected["second"]
    assert tokens(generate(generator, asked)) == expected["first"]
    for version, name in enumerate(("second", "first", "second"), 1):
        generator.update_weights(weights(models[name]), version)
        groups = generate(generator, asked)
        assert tokens(groups) == expected[name]
        assert all((c.versions == version).all() for completions in groups.values() for c in completions)


def test_another_run_on_the_server_meets_none_of_its_keys_and_values(make_generator, models):
    """Both runs ask the same prompts of their version 0."""
    asked = requests(8, 1)
    for name in ("first", "second"):
        assert tokens(generate(make_generator(GREEDY, model=name), asked)) == greedy_by_torch(models[name], asked)


@pytest.mark.parametrize("update", ["in_place", "retract", "drained"])
def test_versions_add_up_and_change_at_an_update(make_generator, server, models, update):
    generator, asked = make_generator(LONG, f"engine.update={update}"), requests(4, 4)
    with nullcontext() if update == "drained" else slowed(server):
        generator.call("submit", asked)
        time.sleep(0.5)
        generator.update_weights(weights(models["second"]), 1)
    outcome = generator.call("run_until", [request.group for request in asked])
    versions = [c.versions for group in outcome.groups for c in group.completions]
    assert len(versions) == 16 and all(len(v) == 200 and (np.diff(v) >= 0).all() for v in versions)
    changed = sum(v[0] != v[-1] for v in versions)
    assert (changed > 0) == (update != "drained")  # of 16, those that the server had begun in half a second
    assert outcome.work.decode_tokens == 16 * 199 and outcome.busy > 0


def test_an_interrupted_completion_takes_two_requests(make_generator, models):
    phrase = (*TOKENIZER.encode("stop", add_special_tokens=False), END_THINK)
    sampling = Sampling(0.7, 30, (END,), interrupt=Interrupt(phrase, END_THINK, answer_budget=6))
    asked, model = requests(8, 4, budgets=(3, 5, 8, 11)), AutoModelForCausalLM.from_pretrained(models["first"])
    groups, interrupted = generate(make_generator(sampling), asked), 0
    for request in asked:
        for budget, completion in zip((3, 5, 8, 11), groups[request.group], strict=True):
            difference = trainer_logprobs(model, request, completion, 0.7).numpy() - completion.logprobs
            assert abs(difference[~completion.injected]).max() < 1e-4
            if completion.interrupted:
                interrupted += 1
                assert np.flatnonzero(completion.injected).tolist() == list(range(budget, budget + len(phrase)))
                assert completion.tokens[budget : budget + len(phrase)].tolist() == list(phrase)
                assert len(completion.tokens) <= budget + len(phrase) + 6
            else:
                assert END in completion.tokens[:budget] or END_THINK in completion.tokens[:budget]
    assert interrupted > 16


def test_an_evaluation_has_one_version_and_the_rollouts_go_on_after_it(make_generator, server, models):
    generator, rollouts = make_generator(LONG), requests(2, 4)
    with slowed(server):
        generator.call("submit", rollouts)
        time.sleep(0.5)
        generator.update_weights(weights(models["second"]), 1)
        generator._call(generator._fleet.land())
    outcome = generator.call("evaluate", requests(3, 2), 1, False)
    assert [group.group for group in outcome.groups] == [0, 1, 2]
    assert all((c.versions == 1).all() for group in outcome.groups for c in group.completions)
    decoded = outcome.work.decode_tokens
    assert outcome.eval_work.decode_tokens == 6 * 199 and 0 < decoded < 8 * 199
    finished = generator.call("run_until", [0, 1])
    assert all(len(c.tokens) == 200 for group in finished.groups for c in group.completions)
    assert finished.work.decode_tokens > decoded


def test_what_is_out_is_handed_out_again_after_a_resume(make_generator):
    generator, asked = make_generator(LONG), requests(3, 2)
    generate(generator, asked[:1])
    generator.call("submit", asked[1:])
    state = generator.call("save").state
    assert [request.group for request in state["requests"]] == [1, 2] and state["complete"] == []
    resumed = make_generator(LONG)
    resumed.call("load", state)
    assert sorted(group.group for group in resumed.call("run_until", [1, 2]).groups) == [1, 2]


def test_other_weights_than_those_that_were_sent_are_noticed(make_generator, models):
    generator = make_generator(GREEDY)
    fleet = generator._fleet
    generator._call(fleet._compare(fleet.servers, weights(models["first"])))
    with pytest.raises(TransferFailed, match=r"rank 0 has \S+ with checksum \w{16}, the trainer's is \w{16}"):
        generator._call(fleet._compare(fleet.servers, weights(models["second"])))


def test_a_server_with_another_model_refuses_in_its_own_words_and_goes_on(make_generator):
    with pytest.raises(UserError, match=r"(?s)weight update to version 0 failed: .*/update_weights_from_.*discard"):
        make_generator(SAMPLING, model="wide")
    assert generate(make_generator(SAMPLING), requests(1, 1)).keys() == {0}


@pytest.mark.parametrize("model", ["shallow", "deep"])
def test_a_server_with_other_layers_takes_the_weights_and_is_found_out(make_generator, model):
    """It keeps those that it isn't sent, or passes over what it has no place for."""
    with pytest.raises(UserError, match=r"^http://\S+: with the run's weights .* start it with the run's model"):
        make_generator(SAMPLING, model=model)
    assert generate(make_generator(SAMPLING), requests(1, 1)).keys() == {0}


def test_a_prefill_meets_none_of_another_runs_keys_and_values(make_generator, models):
    for name in ("first", "second"):
        probe = Probe.of(AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32))
        beginnings = [probe.ids[:end] for end in range(2, len(probe.ids) + 1)]
        found = make_generator(GREEDY, model=name).call("prefill_logprobs", beginnings).state
        assert np.abs(probe.logprobs - np.array(found)).max() < 1e-4
