"""One optimiser step: from scored groups to new weights. The same mathematics for every split into micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalerl.rl import entropy_control
from scalerl.rl.batch import TrainBatch, assemble, tokens_of
from scalerl.rl.checkpoint import read_tensors, write_tensors
from scalerl.rl.config import RunConfig
from scalerl.rl.engines.generator import head_dtype, torch_dtype
from scalerl.rl.ledger import FlopModel
from scalerl.rl.metrics import Metrics
from scalerl.rl.micro_batches import MicroBatch, balance, micro_batch
from scalerl.rl.mismatch import mismatch_metrics
from scalerl.rl.models.load import load_for_training
from scalerl.rl.models.packing import require_packing
from scalerl.rl.models.router_replay import replay, replayable_routers
from scalerl.rl.objective import is_tokenwise, objective, objective_gradient
from scalerl.rl.policy import Policy
from scalerl.rl.sharding import Gathered, World, checkpoint_activations, collective, local_device, shard, whole
from scalerl.rl.shared_prompts import require_shared_prompts
from scalerl.rl.types import ScoredGroup


@dataclass
class Prepared:
    """A batch ready for its updates. micro_batches: this rank's, with theta_b's and the reference's log-probabilities.
    number: how many were prepared before."""

    batch: TrainBatch
    micro_batches: list[MicroBatch]
    version: int
    number: int


class NonFinite(Exception):
    """The loss or the gradient was not finite; no step was made."""


class Trainer:
    """Holds the policy in fp32, its optimiser and, where the recipe has a KL term, the reference; in a world of several
    ranks each holds a shard, and rank 0's calls reach the others (`collective`, `follow`).

    `flops` counts what was computed so far, by all ranks: 3 forwards a trained token, 1 for each pass without
    gradient."""

    def __init__(self, config: RunConfig, model_path: Path, world: World | None = None) -> None:
        self._config = config
        self._recipe = config.recipe
        self.world = world or World()
        self._device = local_device(config.trainer.device)
        torch.manual_seed(config.seed)
        self.model: Any = load_for_training(model_path, self._device)
        self.flop_model = flop_model(self.model)
        self.flops = 0.0
        if self._recipe.router_replay == "r3":
            replayable_routers(self.model)  # raises UserError where it can't be
        if config.trainer.layout == "packed":
            require_packing(self.model)  # raises UserError where it can't be
        if config.trainer.layout == "shared":
            require_shared_prompts(self.model)  # raises UserError where it can't be
        self._reference = None
        if self._recipe.kl != "none":
            self._reference = self._policy(copy.deepcopy(self.model).requires_grad_(False))
        if config.trainer.activation_checkpointing:
            checkpoint_activations(self.model)
        self.policy = self._policy(self.model)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.trainer.lr,
            betas=config.trainer.betas,
            eps=config.trainer.eps,
            weight_decay=config.trainer.weight_decay,
        )
        # The Triton kernels write no logits, so that on a GPU a second pass over them is worth its products.
        self._one_pass = is_tokenwise(self._recipe) and self._device.type == "cpu"
        self._updates = 0  # of the optimiser, so far
        self._n_prepared = 0
        self._prepared: dict[int, Prepared] = {}  # batches between `prepare` and `finish_batch`
        self._saving = ThreadPoolExecutor(1, "tensors")

    def _policy(self, model: Any) -> Policy:
        dtype, chunk = torch_dtype(self._config.model.dtype), self._config.trainer.logprob_chunk
        # Sharded blocks are gathered in `dtype`; in one process autocast brings fp32 weights to it.
        autocast = dtype if self.world.size == 1 else torch.float32
        policy = Policy(model, self._recipe, dtype=autocast, head_dtype=head_dtype(self._config), chunk=chunk)
        shard(policy, model, self.world, self._device, dtype)
        return policy

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's parameters by their Hugging Face names; tied ones once. A sharded one is gathered whenever it is
        looked up, so that nowhere need all be whole at once."""
        parameters = dict(self.model.named_parameters())
        if self.world.size == 1:
            return {name: parameter.detach() for name, parameter in parameters.items()}
        return Gathered(parameters.keys(), self._gather)

    @collective
    def _gather(self, name: str) -> Tensor:
        return whole(self.model.get_parameter(name).detach())

    @collective
    def prepare(self, groups: Sequence[ScoredGroup], version: int) -> Prepared:
        """Assemble the batch that is trained at policy version `version`; call just before its first update."""
        batch = assemble(groups, self._recipe)
        settings = self._config.trainer
        parts = balance(batch.rows, self.world.size, settings.micro_batch_tokens, settings.layout)
        own = parts[self.world.rank]
        micro_batches = [micro_batch(lines, self._recipe, self._device, settings.layout) for lines in own]
        prepared = Prepared(batch, micro_batches, version, self._n_prepared)
        self._n_prepared += 1
        self._prepared[prepared.number] = prepared
        if self._recipe.ratio == "trainer_old" or self._recipe.mismatch_correction != "none":
            self._attach(prepared, "logp_old", self.policy)
        if self._reference is not None:
            self._attach(prepared, "logp_ref", self._reference)
        return prepared

    def update(self, prepared: Prepared, step: int) -> dict[str, Any]:
        """One optimiser step on a batch with at least one row; returns its metrics.

        Raises NonFinite, with the policy unchanged, where the objective or the gradient norm is not finite."""
        return self._update(prepared.number, step)

    @collective
    def _update(self, number: int, step: int) -> dict[str, Any]:
        prepared = self._prepared[number]
        if self._recipe.entropy_control in ("clip_cov", "kl_cov"):
            self._select(prepared, step)
        self._optimizer.zero_grad(set_to_none=True)
        own, own_total = Metrics(), 0.0
        with_entropy = self._recipe.entropy_control == "bonus"
        for micro in prepared.micro_batches:
            with self._routing(self.policy, micro):
                coefficient = objective_gradient(micro.tokens, self._recipe) if self._one_pass else None
                scores = self.policy(micro, with_entropy=with_entropy, coefficient=coefficient)
                value, measured = objective(scores.score, scores.entropy, micro.tokens, self._recipe)
                (-(value if scores.weighted is None else scores.weighted)).backward()
            own_total += float(value.detach())
            own.update(measured)
            own.update(mismatch_metrics(scores.logp.detach(), micro.tokens, prepared.version))
        self.flops += 3 * self._batch_flops(prepared.batch)
        norm = float(whole(nn.utils.clip_grad_norm_(self.model.parameters(), self._config.trainer.clip_norm)))
        metrics, total = Metrics(), 0.0
        for items, value in self.world.gather((own.items, own_total)):
            metrics.update(items)
            total += value
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NonFinite(f"objective {total}, gradient norm {norm}")
        lr = self._config.trainer.lr * min(1.0, (self._updates + 1) / (self._config.trainer.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._updates += 1
        lag_median = metrics.items["lag_histogram"].quantile(0.5)
        return {"objective": total, "grad_norm": norm, "lr": lr, "lag_median": lag_median, **metrics.compute()}

    @collective
    def finish_batch(self, batches: int) -> None:
        """Told after each batch how many have been trained: the reference is reset on its schedule."""
        if self._prepared:
            del self._prepared[min(self._prepared)]
        every = self._recipe.kl_params.reset_ref_every
        if self._reference is not None and every is not None and batches % every == 0:
            self._reference.load_state_dict(self.policy.state_dict())

    def train_tokens(self, prepared: Prepared) -> int:
        """Tokens of the sequences that one update puts through backward, prompts included: under every layout the
        same, so that the axis compares recipes."""
        return sum(row.length for row in prepared.batch.rows)

    @collective
    def save(self, folder: Path) -> Future[Any]:
        """Begin to write the tensors into `folder`; they have been copied when this returns."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()}
        return self._saving.submit(write_tensors, copies, folder, self.world.writing)

    def close(self) -> None:
        """Let the other ranks go, and leave their world."""
        if self.world.rank == 0:
            self.world.broadcast((None, (), {}))
        self._saving.shutdown()
        self.world.leave()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer beside its tensors."""
        return {"updates": self._updates, "flops": self.flops}

    @collective
    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take up a checkpoint: its tensors in `folder`, and its `state_dict`. Learning rate and the like are the
        configuration's."""
        self._updates, self.flops = state["updates"], state["flops"]
        if self._updates:
            for parameter in self.model.parameters():
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(self._updates)), **moments}
        read_tensors(self._tensors(), folder, self.world.writing)

    def _tensors(self) -> dict[str, Tensor]:
        """The policy, AdamW's moments once it has made a step, and the reference, by name."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            if self._updates:
                moments = self._optimizer.state[parameter]
                tensors |= {f"optimizer.{name}.{kind}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
        if self._reference is not None:
            tensors |= {f"reference.{name}": p for name, p in self._reference.model.named_parameters()}
        return tensors

    def _routing(self, policy: Policy, micro: MicroBatch) -> AbstractContextManager[None]:
        """The policy goes through the generator's experts; the reference is another policy and chooses its own."""
        if micro.experts is None or policy is self._reference:
            return nullcontext()
        return replay(policy.model, micro.experts)

    @torch.no_grad()
    def _passes(self, prepared: Prepared, policy: Policy) -> list[Tensor]:
        self.flops += self._batch_flops(prepared.batch)
        found = []
        for micro in prepared.micro_batches:
            with self._routing(policy, micro):
                found.append(policy(micro).logp)
        return found

    def _attach(self, prepared: Prepared, name: str, policy: Policy) -> None:
        for micro, logp in zip(prepared.micro_batches, self._passes(prepared, policy), strict=True):
            micro.tokens = replace(micro.tokens, **{name: logp})

    def _select(self, prepared: Prepared, step: int) -> None:
        """Entropy control's choice of tokens, over the whole step and in an order that no split changes."""
        own: dict[int, Tensor] = {}
        for micro, logp in zip(prepared.micro_batches, self._passes(prepared, self.policy), strict=True):
            lengths = [len(row.completion.tokens) for row in micro.rows]
            own |= {row.order: part for row, part in zip(micro.rows, logp.cpu().split(lengths), strict=True)}
        logps = {order: logp for part in self.world.gather(own) for order, logp in part.items()}
        rows = sorted(prepared.batch.rows, key=lambda row: row.order)
        tokens = tokens_of(rows, trainer_ratio=False, device=torch.device("cpu"), dtype=torch.float32)
        chosen = entropy_control.select(
            torch.cat([logps[row.order] for row in rows]),
            tokens.advantage,
            tokens.mask,
            self._recipe,
            torch.Generator().manual_seed((self._config.seed * 1_000_003 + step) % 2**63),
        )
        lengths = [len(row.completion.tokens) for row in rows]
        flags = {row.order: part for row, part in zip(rows, chosen.split(lengths), strict=True)}
        field = "policy_keep" if self._recipe.entropy_control == "clip_cov" else "kl_cov"
        for micro in prepared.micro_batches:
            joined = torch.cat([chosen[:0], *(flags[row.order] for row in micro.rows)])
            micro.tokens = replace(micro.tokens, **{field: joined.to(self._device)})

    def _batch_flops(self, batch: TrainBatch) -> float:
        return sum(self.flop_model.sequence(row.length) for row in batch.rows)


def flop_model(model: Any) -> FlopModel:
    """The ledger's FLOP model of a Hugging Face causal LM: the head and all other weights but the embedding table, of
    the experts those that a token goes through."""
    config = model.config
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight
    tied = head is model.get_input_embeddings().weight
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    if experts:
        n_experts = getattr(config, "num_experts", None) or config.num_local_experts
        total -= experts * (n_experts - config.num_experts_per_tok) // n_experts
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return FlopModel(
        n_active=total if tied else total - embedding,
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * head_dim,
    )


def follow(trainer: Trainer) -> None:
    """What the ranks but 0 do: repeat rank 0's calls until it closes."""
    while True:
        name, args, kwargs = trainer.world.broadcast(None)
        if name is None:
            break
        with suppress(NonFinite):  # rank 0 deals with it
            getattr(trainer, name)(*args, **kwargs)
    trainer.close()
