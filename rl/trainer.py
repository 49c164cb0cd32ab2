"""One optimiser step: from scored groups to new weights. The same mathematics for every split into micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalerl.kernels.logprob import token_logits, token_logprobs
from scalerl.rl import entropy_control
from scalerl.rl.batch import Row, TrainBatch, assemble, tokens_of
from scalerl.rl.checkpoint import read_tensors, write_tensors
from scalerl.rl.config import RunConfig
from scalerl.rl.engines.generator import head_dtype, torch_dtype
from scalerl.rl.ledger import FlopModel
from scalerl.rl.metrics import Metrics
from scalerl.rl.mismatch import mismatch_metrics
from scalerl.rl.models.load import load_model
from scalerl.rl.models.router_replay import replay, replayable_routers
from scalerl.rl.objective import objective
from scalerl.rl.tokens import Tokens
from scalerl.rl.types import ScoredGroup


@dataclass
class MicroBatch:
    """Rows that go through the model at once, right-padded; T completion tokens in all.

    input_ids: int64 [n, S]. row, column: int64 [T], where the hidden state that predicts each completion token stands.
    targets: int64 [T]. kept: int64 [T, K] padded with -1, or None. aux: int64 [T] or None. experts: int32
    [n, S, layers, top_k], -1 where the generator fed nothing, or None."""

    rows: list[Row]
    input_ids: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    tokens: Tokens
    kept: Tensor | None
    aux: Tensor | None
    experts: Tensor | None


@dataclass
class Prepared:
    """A batch ready for its updates: theta_b's and the reference's log-probabilities are in its micro-batches."""

    batch: TrainBatch
    micro_batches: list[MicroBatch]
    version: int


class NonFinite(Exception):
    """The loss or the gradient was not finite; no step was made."""


class Trainer:
    """Holds the policy in fp32, its optimiser and, where the recipe has a KL term, the reference.

    `flops` counts what was computed so far: 3 forwards a trained token, 1 for each pass without gradient."""

    def __init__(self, config: RunConfig, model_path: Path) -> None:
        self._config = config
        self._recipe = config.recipe
        self._device = torch.device(config.trainer.device)
        self._head_dtype = head_dtype(config)
        self._autocast = torch_dtype(config.model.dtype)
        torch.manual_seed(config.seed)
        self.model: Any = load_model(model_path).to(self._device)
        self._reference = copy.deepcopy(self.model).requires_grad_(False) if self._recipe.kl != "none" else None
        if self._recipe.router_replay == "r3":
            replayable_routers(self.model)  # raises UserError where it can't be
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.trainer.lr,
            betas=config.trainer.betas,
            eps=config.trainer.eps,
            weight_decay=config.trainer.weight_decay,
        )
        self._updates = 0  # of the optimiser, so far
        self._saving = ThreadPoolExecutor(1, "tensors")
        self.flop_model = flop_model(self.model)
        self.flops = 0.0

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by their Hugging Face names; tied ones once."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def prepare(self, groups: Sequence[ScoredGroup], version: int) -> Prepared:
        """Assemble the batch that is trained at policy version `version`; call just before its first update."""
        batch = assemble(groups, self._recipe)
        micro_batches = [self._micro_batch(rows) for rows in self._split(batch.rows)]
        if self._recipe.ratio == "trainer_old" or self._recipe.mismatch_correction != "none":
            self._attach(micro_batches, "logp_old", self.model)
        if self._reference is not None:
            self._attach(micro_batches, "logp_ref", self._reference)
        return Prepared(batch, micro_batches, version)

    def update(self, prepared: Prepared, step: int) -> dict[str, Any]:
        """One optimiser step on a batch with at least one row; returns its metrics.

        Raises NonFinite, with the policy unchanged, where the objective or the gradient norm is not finite."""
        if self._recipe.entropy_control in ("clip_cov", "kl_cov"):
            self._select(prepared.micro_batches, step)
        self._optimizer.zero_grad(set_to_none=True)
        metrics, total = Metrics(), 0.0
        for micro in prepared.micro_batches:
            with self._routing(self.model, micro):
                hidden, weight = self._hidden(self.model, micro)
                logp, entropy = self._logprobs(
                    hidden, weight, micro, with_entropy=self._recipe.entropy_control == "bonus"
                )
                score = logp if micro.aux is None else self._aux_score(hidden, weight, micro.targets, micro.aux)
                value, measured = objective(score, entropy, micro.tokens, self._recipe)
                (-value).backward()
            total += float(value.detach())
            metrics.update(measured)
            metrics.update(mismatch_metrics(logp.detach(), micro.tokens, prepared.version))
            self.flops += 3 * self._sequence_flops(micro)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self._config.trainer.clip_norm))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NonFinite(f"objective {total}, gradient norm {norm}")
        lr = self._config.trainer.lr * min(1.0, (self._updates + 1) / (self._config.trainer.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._updates += 1
        lag_median = metrics.items["lag_histogram"].quantile(0.5)
        return {"objective": total, "grad_norm": norm, "lr": lr, "lag_median": lag_median, **metrics.compute()}

    def finish_batch(self, batches: int) -> None:
        """Told after each batch how many have been trained: the reference is reset on its schedule."""
        every = self._recipe.kl_params.reset_ref_every
        if self._reference is not None and every is not None and batches % every == 0:
            self._reference.load_state_dict(self.model.state_dict())

    def train_tokens(self, prepared: Prepared) -> int:
        """Tokens that one update puts through backward, prompts included."""
        return sum(_length(row) for row in prepared.batch.rows)

    def save(self, folder: Path) -> Future[Any]:
        """Begin to write the tensors into `folder`; they have been copied when this returns."""
        return self._saving.submit(
            write_tensors, {k: t.detach().to("cpu", copy=True) for k, t in self._tensors().items()}, folder
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer beside its tensors."""
        return {"updates": self._updates, "flops": self.flops}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take up a checkpoint: its tensors in `folder`, and its `state_dict`. Learning rate and the like are the
        configuration's."""
        self._updates, self.flops = state["updates"], state["flops"]
        if self._updates:
            for parameter in self.model.parameters():
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(self._updates)), **moments}
        read_tensors(self._tensors(), folder)

    def _tensors(self) -> dict[str, Tensor]:
        """The policy, AdamW's moments once it has made a step, and the reference, by name."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            if self._updates:
                moments = self._optimizer.state[parameter]
                tensors |= {f"optimizer.{name}.{kind}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
        if self._reference is not None:
            tensors |= {f"reference.{name}": p for name, p in self._reference.named_parameters()}
        return tensors

    def _split(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Micro-batches of like lengths, each within the budget of padded tokens (or of one row)."""
        budget, current = self._config.trainer.micro_batch_tokens, []
        for row in sorted(rows, key=_length, reverse=True):
            if current and (len(current) + 1) * _length(current[0]) > budget:
                yield current
                current = []
            current.append(row)
        if current:
            yield current

    def _micro_batch(self, rows: list[Row]) -> MicroBatch:
        ids = torch.zeros(len(rows), max(_length(row) for row in rows), dtype=torch.int64)
        row_index, columns, targets = [], [], []
        for i, row in enumerate(rows):
            p, sampled = len(row.prompt_ids), torch.as_tensor(row.completion.tokens, dtype=torch.int64)
            ids[i, :p] = torch.tensor(row.prompt_ids)
            ids[i, p : p + len(sampled)] = sampled
            row_index.append(torch.full((len(sampled),), i))
            columns.append(torch.arange(p - 1, p - 1 + len(sampled)))
            targets.append(sampled)
        to = self._device
        return MicroBatch(
            rows=rows,
            input_ids=ids.to(to),
            row=torch.cat(row_index).to(to),
            column=torch.cat(columns).to(to),
            targets=torch.cat(targets).to(to),
            tokens=tokens_of(rows, trainer_ratio=self._recipe.ratio == "trainer_old", device=to, dtype=torch.float32),
            kept=_kept_sets(rows, to) if self._recipe.sampling_mask == "keep" else None,
            aux=_aux_tokens(rows, to) if self._recipe.sampling_mask == "aux_token" else None,
            experts=_experts(rows, ids.shape[1], to) if self._recipe.router_replay == "r3" else None,
        )

    def _routing(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        """The policy goes through the generator's experts; the reference is another policy and chooses its own."""
        return nullcontext() if micro.experts is None or model is self._reference else replay(model, micro.experts)

    def _hidden(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Hidden states [T, H] that predict the completion tokens, and the head's weight [V, H]."""
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast != torch.float32):
            hidden = model.base_model(input_ids=micro.input_ids, use_cache=False).last_hidden_state
        return hidden[micro.row, micro.column], model.get_output_embeddings().weight

    def _aux_score(self, hidden: Tensor, weight: Tensor, targets: Tensor, aux: Tensor) -> Tensor:
        """(z(a_t) - z(u_t)) / temperature [T], whose gradient stands in for that of the truncated policy's logp."""
        z = token_logits(hidden, weight, torch.stack([targets, aux], dim=1), head_dtype=self._head_dtype)
        return (z[:, 0] - z[:, 1]) / self._recipe.sampling.temperature

    def _logprobs(
        self, hidden: Tensor, weight: Tensor, micro: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [T] of the completion tokens, of the distribution that the generator's are of, and
        entropies [T]."""
        return token_logprobs(
            hidden,
            weight,
            micro.targets,
            temperature=self._recipe.sampling.temperature,
            head_dtype=self._head_dtype,
            kept=micro.kept,
            chunk=self._config.trainer.logprob_chunk,
            with_entropy=with_entropy,
        )

    @torch.no_grad()
    def _passes(self, model: Any, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        self.flops += sum(self._sequence_flops(micro) for micro in micro_batches)
        found = []
        for micro in micro_batches:
            with self._routing(model, micro):
                found.append(self._logprobs(*self._hidden(model, micro), micro, with_entropy=False)[0])
        return found

    def _attach(self, micro_batches: Sequence[MicroBatch], name: str, model: Any) -> None:
        for micro, logp in zip(micro_batches, self._passes(model, micro_batches), strict=True):
            micro.tokens = replace(micro.tokens, **{name: logp})

    def _select(self, micro_batches: Sequence[MicroBatch], step: int) -> None:
        """Entropy control's choice of tokens, over the whole step and in an order that no split changes."""
        logps = self._passes(self.model, micro_batches)
        order = torch.cat(
            [torch.tensor([row.order for row in m.rows])[m.tokens.completion.cpu()] for m in micro_batches]
        )
        by_row = torch.argsort(order, stable=True)
        joined = {
            name: torch.cat([getattr(m.tokens, name) for m in micro_batches]).cpu()[by_row]
            for name in ("advantage", "mask")
        }
        chosen = entropy_control.select(
            torch.cat(logps).cpu()[by_row],
            joined["advantage"],
            joined["mask"],
            self._recipe,
            torch.Generator().manual_seed(self._config.seed * 1_000_003 + step),
        )
        field = "policy_keep" if self._recipe.entropy_control == "clip_cov" else "kl_cov"
        unsorted = torch.empty_like(chosen)
        unsorted[by_row] = chosen
        for micro, flags in zip(micro_batches, unsorted.split([len(m.targets) for m in micro_batches]), strict=True):
            micro.tokens = replace(micro.tokens, **{field: flags.to(self._device)})

    def _sequence_flops(self, micro: MicroBatch) -> float:
        return sum(self.flop_model.sequence(_length(row)) for row in micro.rows)


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


def _length(row: Row) -> int:
    return len(row.prompt_ids) + len(row.completion.tokens)


def _kept_sets(rows: Sequence[Row], device: torch.device) -> Tensor:
    sets = [torch.as_tensor(ids, dtype=torch.int64) for row in rows for ids in row.completion.kept or ()]
    # An injected token has no kept set: its own id alone keeps the row valid, and its mask keeps it out of everything.
    targets = [int(t) for row in rows for t in row.completion.tokens]
    filled = [ids if len(ids) else torch.tensor([t]) for ids, t in zip(sets, targets, strict=True)]
    return nn.utils.rnn.pad_sequence(filled, batch_first=True, padding_value=-1).to(device)


def _aux_tokens(rows: Sequence[Row], device: torch.device) -> Tensor:
    return torch.cat([torch.as_tensor(row.completion.aux_tokens, dtype=torch.int64) for row in rows]).to(device)


def _experts(rows: Sequence[Row], longest: int, device: torch.device) -> Tensor:
    """[n, longest, layers, top_k]; -1 on padding and on the last token, which the generator never fed."""
    recorded = [torch.as_tensor(row.completion.experts, dtype=torch.int32) for row in rows]
    experts = torch.full((len(rows), longest, *recorded[0].shape[1:]), -1, dtype=torch.int32)
    for i, chosen in enumerate(recorded):
        experts[i, : len(chosen)] = chosen
    return experts.to(device)
