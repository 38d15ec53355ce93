"""DeltaKV's quality fit: f and g trained through the frozen model, from the fast fit on (arXiv 2602.08005, section 4).

Two passes over every batch. The first is exact: it gives each compressed layer's x and what the model says. In the
second every query sees tokens past its window as g(z) + m gives them, with the sinks, window, block, stride and full
layers of inference; a selection is not simulated. The loss is a next-token term plus the relative error of x.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.errors import UserError

from .codec import Codec
from .compressors import Compressors
from .passes import compressed_pass, exact_pass, next_token, tiles
from .recall import training_window
from .texts import Text, token_windows

HELD_OUT = 4  # windows that are kept from training
SAVE_SECONDS = 60.0  # between checkpoints
STATE, LOG = "training.safetensors", "training.jsonl"
OBJECTIVES, INPUTS = ("kl", "ce"), ("exact", "own")
PATIENCE = timedelta(days=2)  # of processes that wait for the first one to fit the layers
Made = TypeVar("Made")


@dataclass(frozen=True)
class TrainPlan:
    """How to train.

    tokens: to read in all. batch: tokens per step, over all processes. micro: tokens that one process takes through
    the model at once; bounds memory. lr: step of a parameter, as a part of its row's (or column's) root mean square;
    rises over the first `warmup` of the steps and then falls to 0. clip: largest gradient norm.
    objective: next-token term, "kl" (divergence from the exact pass) or "ce" (cross entropy, the paper's).
    inputs: whose keys and values are compressed, those of the "exact" pass, as after a prefill, or the second pass's
    "own", as while generating (the paper's).
    fidelity: weight of the layers' mean relative error of x. recall_share: part of the windows that are made to train
    exact recall. bfloat16: run the model in mixed precision (None: on a GPU).
    """

    tokens: int
    batch: int = 32_768
    micro: int = 32_768
    lr: float = 1e-3
    warmup: float = 0.02
    clip: float = 1.0
    objective: str = "kl"
    inputs: str = "exact"
    fidelity: float = 0.1
    recall_share: float = 0.2
    bfloat16: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("objective", OBJECTIVES), ("inputs", INPUTS)):
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r} must be {' or '.join(known)}")
        if min(self.tokens, self.batch, self.micro) < 1 or not 0 <= self.recall_share <= 1:
            raise UserError(
                f"tokens={self.tokens}, batch={self.batch}, micro={self.micro} must be positive and "
                f"recall_share={self.recall_share} from 0 to 1"
            )

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of step 0 .. steps - 1."""
        rise = max(1, math.ceil(self.warmup * steps))
        return self.lr * min((step + 1) / rise, (steps - step) / max(1, steps - rise))


PLANS = {"quick": TrainPlan(tokens=4_000_000), "full": TrainPlan(tokens=20_000_000)}


# -- text


class Stream:
    """Training windows by number, the same for the same seed: texts in an order drawn anew each time round, and in
    place of some of them text that trains recall."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        windows: list[list[int]],
        recall_share: float,
        context: int,
        seed: int,
    ) -> None:
        self.tokenizer, self.windows, self.context, self.seed = tokenizer, windows, context, seed
        self.recall_share = recall_share

    def __getitem__(self, number: int) -> list[int]:
        turn, place = divmod(number, len(self.windows))
        order = torch.randperm(len(self.windows), generator=self._draw(turn, 0))
        if float(torch.rand((), generator=self._draw(number, 1))) < self.recall_share:
            return training_window(self.tokenizer, self.context, self.seed, number)
        return self.windows[int(order[place])]

    def _draw(self, number: int, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number) * 2 + salt)


# -- training


@dataclass(frozen=True)
class World:
    """This process among those of a torchrun: alone it is 0 of 1."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[World]:
        """The processes joined for as long as the context lasts, unless they already are.

        Each takes the GPU of its number on this host. Raises UserError when there are fewer GPUs than processes.
        """
        size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        joins = size > 1 and not dist.is_initialized()
        if device.type == "cuda":
            if local >= (gpus := torch.cuda.device_count()):
                raise UserError(f"process {local} has no GPU: this host has {gpus}; use --nproc-per-node {gpus}")
            torch.cuda.set_device(device)
        if joins:
            if device.type == "cuda":
                dist.init_process_group("nccl", timeout=PATIENCE, device_id=device)
            else:
                dist.init_process_group("gloo", timeout=PATIENCE)
        yield cls(dist.get_rank() if size > 1 else 0, size, device)
        if joins:  # a process that failed ends at once, and torchrun then ends the others
            dist.destroy_process_group()

    def first(self, make: Callable[[], Made]) -> Made:
        """What `make` gives in process 0, in all of them: the others wait for it, and end when it raises UserError."""
        if self.size == 1:
            return make()
        told: list[Any] = [None, True]
        problem: UserError | None = None
        if self.rank == 0:
            try:
                told = [make(), False]
            except UserError as error:
                problem = error
        dist.broadcast_object_list(told, src=0, device=self.device)
        made, failed = told
        if problem:
            raise problem
        if failed:
            raise SystemExit(2)
        return made

    def wait(self) -> None:
        """Until every process has come here."""
        if self.size > 1:
            dist.barrier()

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    codec: Codec,
    texts: Sequence[Text],
    plan: TrainPlan | str,
    seed: int,
    context: int,
    folder: str | Path,
    progress: bool = True,
) -> Codec:
    """Train a DeltaKV codec on windows of `context` tokens, starting from what it is.

    plan: a plan or the name of one of PLANS. Runs on the CUDA device of this process when there is one (the model
    comes back to where it was); under torchrun the processes share the batches, and all of them return the codec.
    folder: keeps a checkpoint, from where an interrupted training with the same arguments goes on, and a log.
    The result's info.errors has each layer's relative error of x on held-out windows "before" and "after", and
    info.choice["training"] the plan and the next-token term there.
    Raises UserError when the context or the texts are too short or the loss is not finite.
    """
    effort = plan if isinstance(plan, str) else codec.info.effort
    plan = PLANS[plan] if isinstance(plan, str) else plan
    geometry, folder = codec.config.geometry(), Path(folder)
    if not geometry.encoded(context - 1):
        raise UserError(
            f"--context {context}: nothing is compressed in it; training needs more than the {geometry.sinks} sinks, "
            f"the window of {geometry.window} and a block of {geometry.block}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with World.joined() as world, _placed(model, world.device):
        per_step = max(1, plan.batch // context // world.size) * world.size  # sequences
        steps = max(1, round(plan.tokens / (per_step * context)))
        windows = token_windows(tokenizer, texts, context, steps * per_step + HELD_OUT)
        if len(windows) < 2:
            raise UserError(
                f"the texts give {len(windows)} windows of {context} tokens, training needs 2; give more with --text"
            )
        kept = min(HELD_OUT, len(windows) // 2)
        held = [windows.pop((number + 1) * len(windows) // (kept + 1)) for number in range(kept)]
        stream = Stream(tokenizer, windows, plan.recall_share, context, seed)
        trainer = _Trainer(model, codec.to(world.device), plan, world, context)
        stamp = _stamp(codec, texts, plan, seed, context)
        state, done = _load(folder / STATE, stamp, world.device)
        if state is None:
            trainer.begin(exact_ids(stream, range(1), world.device), seed)
        else:
            trainer.resume(state, done)
        report = trainer.run(stream, held, steps, per_step, done, folder, stamp, progress and world.rank == 0)
    errors = {
        str(layer): {**codec.info.errors.get(str(layer), {}), "before": before, "after": after}
        for layer, before, after in zip(codec.layers, report.pop("x_before"), report.pop("x_after"), strict=True)
    }
    info = replace(
        codec.info,
        effort=effort,
        fit="quality",
        seed=seed,
        context=context,
        texts=[text.to_json() for text in texts],
        vectors=steps * per_step * context,
        errors=errors,
        choice={**codec.info.choice, "training": {**asdict(plan), **report}},
    )
    return Codec(info, trainer.compressors.tables())


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """On a GPU, float32 products in TF32: several times as fast, and closer than the bfloat16 of a model's weights."""
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _placed(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """The model on `device`, frozen, its products in TF32 on a GPU."""
    home, trainable = model.device, [x.requires_grad for x in model.parameters()]
    model.to(device).requires_grad_(False)
    try:
        with tf32_products(device):
            yield
    finally:
        model.to(home)
        for x, wanted in zip(model.parameters(), trainable, strict=True):
            x.requires_grad_(wanted)


def exact_ids(stream: Stream, numbers: range, device: torch.device) -> Tensor:
    """Windows of the stream as ids [len(numbers), context]."""
    return torch.tensor([stream[number] for number in numbers], device=device)


class _Trainer:
    """Model, compressors and optimizer of one training."""

    compressors: Compressors
    optimizer: torch.optim.AdamW

    def __init__(self, model: PreTrainedModel, codec: Codec, plan: TrainPlan, world: World, context: int) -> None:
        self.model, self.codec, self.plan, self.world, self.context = model, codec, plan, world, context
        self.layers = list(codec.layers)
        self.tiles = tiles(codec.config.geometry(), context, world.device)
        self.mixed = world.device.type == "cuda" if plan.bfloat16 is None else plan.bfloat16

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.world.device.type, torch.bfloat16) if self.mixed else nullcontext()

    def begin(self, ids: Tensor, seed: int) -> None:
        """Start from the codec; what it is scaled by comes from text ids [B, N]."""
        with self.precision():
            seen = exact_pass(self.model, ids, self.layers).x
        self._optimize(Compressors.start(self.codec.layers, seen, seed))

    def _optimize(self, compressors: Compressors) -> None:
        self.compressors = compressors
        self.optimizer = torch.optim.AdamW(
            list(compressors.parameters.values()), lr=self.plan.lr, betas=(0.9, 0.95), weight_decay=0.0
        )

    def state(self) -> dict[str, Tensor]:
        """Parameters, their scales and the optimizer's moments."""
        result = {}
        for key, parameter in self.compressors.parameters.items():
            moments = self.optimizer.state[parameter]
            result |= {
                f"value.{key}": parameter.detach(),
                f"scale.{key}": self.compressors.scales[key],
                f"first.{key}": moments["exp_avg"],
                f"second.{key}": moments["exp_avg_sq"],
            }
        return result

    def resume(self, state: dict[str, Tensor], done: int) -> None:
        """Go on from what `state` gave after `done` steps."""
        keys = [key[6:] for key in state if key.startswith("value.")]
        compressors = Compressors(self.codec.layers, {key: state[f"scale.{key}"] for key in keys})
        for key, parameter in compressors.parameters.items():
            parameter.data.copy_(state[f"value.{key}"])
        self._optimize(compressors)
        for key, parameter in compressors.parameters.items():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(done)),
                "exp_avg": state[f"first.{key}"],
                "exp_avg_sq": state[f"second.{key}"],
            }

    def terms(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of windows ids [B, N]: the next-token term, and the relative error of x per layer [layers]."""
        with self.precision():
            exact = exact_pass(self.model, ids, self.layers)
            hidden, errors = compressed_pass(self.model, ids, exact, self.compressors, self.plan.inputs, self.tiles)
            return next_token(self.model, hidden, exact.hidden, ids, self.plan.objective), errors

    def step(self, stream: Stream, number: int, per_step: int) -> tuple[float, float]:
        """One step of the optimizer on windows number, number + 1, ...: both terms of the loss before it."""
        own, group = per_step // self.world.size, max(1, self.plan.micro // self.context)
        first = number + self.world.rank * own
        told = torch.zeros(2, device=self.world.device)
        for start in range(0, own, group):
            numbers = range(first + start, first + min(start + group, own))
            token, errors = self.terms(exact_ids(stream, numbers, self.world.device))
            share = len(numbers) / per_step
            ((token + self.plan.fidelity * errors.mean()) * share).backward()
            told += torch.stack((token.detach(), errors.detach().mean())) * share
        parameters = list(self.compressors.parameters.values())
        self.world.sum([told, *(x.grad for x in parameters if x.grad is not None)])
        nn.utils.clip_grad_norm_(parameters, self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        token, error = told.tolist()
        return token, error

    @torch.no_grad()
    def evaluate(self, held: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
        """Mean terms over held-out windows."""
        seen = [self.terms(torch.tensor([list(window)], device=self.world.device)) for window in held]
        errors = torch.stack([errors for _, errors in seen]).mean(0)
        return float(torch.stack([token for token, _ in seen]).mean()), errors.tolist()

    def run(
        self,
        stream: Stream,
        held: Sequence[Sequence[int]],
        steps: int,
        per_step: int,
        done: int,
        folder: Path,
        stamp: dict[str, Any],
        progress: bool,
    ) -> dict[str, Any]:
        log = folder / LOG
        told = [json.loads(line) for line in log.read_text().splitlines()] if done and log.is_file() else []
        told = [line for line in told if line["step"] <= done and (line["step"] == 0 or "held_out" not in line)]
        if not told:
            token, errors = self.evaluate(held)
            told = [{"step": 0, "held_out": token, "x": errors}]
        before = told[0]
        _write_log(log, told, self.world.rank)
        saved = time.monotonic()
        with _bar(progress, steps, done) as advance:
            for step in range(done, steps):
                began = time.monotonic()
                for group in self.optimizer.param_groups:
                    group["lr"] = self.plan.rate(step, steps)
                token, error = self.step(stream, step * per_step, per_step)
                if not math.isfinite(token + error):
                    raise UserError(f"training: the loss of step {step + 1} is not finite; lower lr={self.plan.lr:g}")
                pace = per_step * self.context / (time.monotonic() - began)
                line = {"step": step + 1, self.plan.objective: token, "x": error, "tokens_per_s": round(pace)}
                _write_log(log, [line], self.world.rank, append=True)
                advance(f"{self.plan.objective} {token:.4f}, x {error:.4f}, {pace:,.0f} tokens/s")
                if self.world.rank == 0 and (time.monotonic() - saved >= SAVE_SECONDS or step + 1 == steps):
                    _save(folder / STATE, self.state(), stamp, step + 1)
                    saved = time.monotonic()
        token, errors = self.evaluate(held)
        _write_log(log, [{"step": steps, "held_out": token, "x": errors}], self.world.rank, append=True)
        return {
            "steps": steps,
            "held_out_before": before["held_out"],
            "held_out_after": token,
            "x_before": before["x"],
            "x_after": errors,
        }


# -- checkpoints, log and progress


def _stamp(codec: Codec, texts: Sequence[Text], plan: TrainPlan, seed: int, context: int) -> dict[str, Any]:
    """What a checkpoint belongs to."""
    digest = hashlib.sha256()
    for name, tensor in sorted(codec.tensors().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return {
        "codec": digest.hexdigest(),
        "config": codec.config.to_json(),
        "model": codec.info.model,
        "texts": [text.sha256 for text in texts],
        "plan": asdict(plan),
        "seed": seed,
        "context": context,
    }


def _save(path: Path, state: dict[str, Tensor], stamp: dict[str, Any], done: int) -> None:
    """Write a checkpoint; it appears under its name only when it is whole."""
    partial = path.with_suffix(".writing")
    tensors = {key: tensor.cpu().contiguous() for key, tensor in state.items()}
    save_file(tensors, str(partial), metadata={"training": json.dumps({"stamp": stamp, "done": done})})
    partial.rename(path)


def _load(path: Path, stamp: dict[str, Any], device: torch.device) -> tuple[dict[str, Tensor] | None, int]:
    """The checkpoint and the steps behind it; None where there is none of a training with the same arguments."""
    if not path.is_file():
        return None, 0
    with safe_open(str(path), framework="pt", device=str(device)) as file:
        meta = json.loads(file.metadata()["training"])
        if meta["stamp"] != json.loads(json.dumps(stamp)):
            return None, 0
        return {key: file.get_tensor(key) for key in file.keys()}, meta["done"]  # noqa: SIM118 (no dict)


def _write_log(path: Path, lines: Sequence[dict[str, Any]], rank: int, append: bool = False) -> None:
    if rank == 0:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


@contextmanager
def _bar(show: bool, steps: int, done: int) -> Iterator[Any]:
    """A progress bar on stderr, as a function that advances it by one and says how training goes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), disable=not show) as bars:
        task = bars.add_task("", total=steps, completed=done)
        yield lambda text: bars.update(task, advance=1, description=text)
