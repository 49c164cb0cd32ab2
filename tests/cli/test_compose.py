"""Configuration: every option loads, every mistake is answered with the nearest right one."""

from __future__ import annotations

import pytest

from scalerl.cli.compose import GROUPS, compose, options
from scalerl.rl.errors import UserError


def test_the_default_composes_and_each_key_has_its_source():
    composed = compose(["recipe.loss=dapo", "task.seed=3"], run_dir="r")
    assert composed.config.recipe.loss == "dapo"
    assert composed.config.run_dir == "r"
    sources = composed.sources
    assert sources["recipe.loss"] == "command line"
    assert sources["task.seed"] == "command line"
    assert sources["recipe.zero_variance"] == "recipe/scalerl.yaml"
    assert sources["recipe.generation_budget"] == "task/addition.yaml"
    assert sources["eval.seed"] == "eval/default.yaml"
    assert sources["run_dir"] == "command line"


REQUIRED = {"model=hf": ["model.path=m"], "task=math": ["task.data.train=a"], "task=code": ["task.data.train=a"]}
REQUIRED |= {"task=python": ["task.module=m.py"], "task=reasoning_gym": ["task.name=chain_sum"]}
REQUIRED |= {"task=mixture": ["task.tasks.math.data.train=a", "task.tasks.code.data.train=b"]}


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in options(group)])
def test_every_yaml_loads(choice):
    compose([choice, *REQUIRED.get(choice, [])])


def test_keys_of_a_mixtures_tasks_have_their_sources():
    sources = compose(["task=mixture", *REQUIRED["task=mixture"]]).sources
    assert sources["task.tasks.math.asking.template"] == "task/math.yaml"
    assert sources["task.tasks.code.memory"] == "task/code.yaml"
    assert sources["task.tasks.code.data.train"] == "command line"
    assert sources["task.weights.math"] == "task/mixture.yaml"


def test_a_mixture_names_weights_and_tasks_alike():
    with pytest.raises(UserError, match="name them alike"):
        compose(["task=mixture", *REQUIRED["task=mixture"], "~task.weights.math"])


@pytest.mark.parametrize("choice", REQUIRED)
def test_what_has_no_default_is_asked_for(choice):
    key = REQUIRED[choice][0].partition("=")[0]
    with pytest.raises(UserError, match=rf"{key} is missing; set it with {key}=VALUE"):
        compose([choice])


def test_a_hugging_face_model_needs_its_path():
    with pytest.raises(UserError, match=r"model\.path is missing; set it with model\.path=VALUE"):
        compose(["model=hf"])
    assert compose(["model=hf", "model.path=/m"]).config.model.kind == "hf"


@pytest.mark.parametrize(
    "override,message",
    [
        ("recipe.los=cispo", r"no key 'recipe\.los'; did you mean 'recipe\.loss'\?"),
        ("recipe.loss=cispoo", r"recipe\.loss: unknown loss 'cispoo'.*cispo"),
        ("recipe.loss_aggregation=promt", r"recipe\.loss_aggregation=promt; did you mean 'prompt'\?"),
        ("recipe=scalerll", r"no recipe 'scalerll'; did you mean 'scalerl'\?"),
        ("task=addtion", r"no task 'addtion'; did you mean 'addition'\?"),
        ("steps=many", r"steps=many: "),
        ("steps=0", r"steps=0: "),
        ("recipe.interrupt.phrase=</think>", r"needs quotes of its own: 'recipe\.interrupt\.phrase=\"</think>\"'"),
        ("seed=99999999999999999999999999", r"seed=9+: "),
        ("steps", r"'steps' is not an override; write KEY=VALUE"),
        ("seed=1,2", r"asks for several runs"),
        ("+recipe.new=1", r"no key 'recipe\.new'(?!; did you mean 'recipe\.new')"),
        ("+recipe.los=cispo", r"no key 'recipe\.los'; did you mean 'recipe\.loss'\?"),
        ("~recipe.loss", r"recipe\.loss is missing"),
        ("recipe.kl=k1_as_loss", r"expected on-policy gradient is zero"),
        ("engine.logits_precision=model", r"set both alike"),
        ("recipe.mismatch_correction=tis_token", r"corrects twice"),
        ("recipe.sampling.top_p=0.9", r"sampling_mask=keep"),
        ("trainer.device=gpu", r"trainer\.device: cpu, cuda, or one GPU such as cuda:1, and not gpu"),
        ("recipe.offpolicy_sequence_mask=-1", r"recipe\.offpolicy_sequence_mask=-1"),
        ("recipe.loss_params.cispo.eps_max=-5", r"recipe\.loss_params\.cispo\.eps_max=-5"),
        ("recipe.loss_params.cispo.eps_max=nan", r"recipe\.loss_params\.cispo\.eps_max=nan"),
        ("recipe.clip_cov.cov_low=nan", r"recipe\.clip_cov\.cov_low=nan"),
        ("trainer.lr=inf", r"trainer\.lr=inf"),
        ("trainer.betas=[0.9,1.0]", r"trainer\.betas"),
        ("seed=-1", r"seed=-1: "),
        ("task.seed=-1", r"task\.seed=-1: "),
        ("steps=${oc.env:NO_SUCH_VARIABLE}", r"NO_SUCH_VARIABLE"),
        ("model.architecture.hidden_size=12", r"hidden_size=12 over heads=4 must be even"),
        ("+recipe.kl_params.beta_by_task.maths=0.1", r"beta_by_task: no task 'maths'; this run knows addition, "),
        ("eval.extra=[longer,longer]", r"eval\.extra.*each set once"),
    ],
)
def test_a_mistake_is_answered_in_one_line(override, message):
    with pytest.raises(UserError, match=message) as caught:
        compose([override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "recipe.off_policy=ppo",
        "recipe.loss=dapo",
        "recipe.loss_aggregation=sample",
        "recipe.advantage_norm=prompt",
        "recipe.logits_precision=model",
        "recipe.zero_variance=keep",
        "recipe.resample_positive=true",
        "recipe.length_control=penalty",
        "recipe.offpolicy_sequence_mask=0.5",
        "recipe.kl=k3_as_loss",
        "recipe.entropy_control=clip_cov",
    ],
)
def test_every_leave_one_out_value_is_one_override(override):
    compose([override])


def test_what_sglang_can_not_do_is_refused():
    with pytest.raises(UserError, match=r"model\.head_dtype=bfloat16 but model\.dtype=float32"):
        compose(["engine=sglang", "recipe.logits_precision=model"])
    compose(["engine=sglang", "recipe.logits_precision=model", "model.head_dtype=float32"])
    on_policy = ["recipe.k=0", "recipe.loss=reinforce", "recipe.sampling_mask=aux_token"]
    with pytest.raises(UserError, match=r"recipe\.sampling_mask=aux_token needs engine=torch"):
        compose(["engine=sglang", *on_policy])
    replay = ["engine=sglang", "trainer.layout=padded", "recipe.router_replay=r3"]
    compose([*replay, "recipe.sampling_mask=keep", "recipe.sampling.top_p=0.9"])
    with pytest.raises(UserError, match=r"router_replay=r3 with engine\.update=retract: .* set engine\.update="):
        compose([*replay, "engine.update=retract"])
