"""Fit VQKV's quantisers: error metric, rotation, residual k-means; deterministic for a seed, resumable by layer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.errors import UserError
from plugins.methods import reference
from plugins.vqkv.config import VQKVConfig
from plugins.vqkv.reference import LayerCodec, Quantiser, nearest

from .adapter import layer_specs
from .codec import Codec, CodecInfo, check_target, compressed_layers, save
from .record import LayerRecord, record
from .texts import Text, token_windows

HELD_OUT = 8  # every eighth window is kept from the fit
WARM_STRIDE = 8  # early k-means iterations read every eighth vector, when that leaves as many per codeword
RIDGE = 0.02  # of a metric's mean eigenvalue, added to all of them
MOST_VECTORS = 1 << 18
CPU_SCORES = 1 << 18  # distances formed at once on a CPU: they stay in its cache
RECORD_BYTES = 6 << 30  # layers are recorded in as many passes over the text as this asks for


@dataclass(frozen=True)
class Effort:
    """How much to spend. vectors: wanted per codeword; least: refuse to fit on fewer; share: of a window's tokens that
    are kept; queries: of a window, whose attention weighs the errors; warm: k-means iterations on some of the vectors;
    sweeps: then on all of them."""

    vectors: int
    least: int
    share: float
    queries: int
    warm: int
    sweeps: int


EFFORTS = {
    "quick": Effort(vectors=88, least=24, share=1.0, queries=128, warm=12, sweeps=2),
    "full": Effort(vectors=512, least=200, share=0.5, queries=512, warm=30, sweeps=12),
}


def default_effort() -> str:
    """ "full" where there is a GPU, "quick" without one."""
    return "full" if torch.cuda.is_available() else "quick"


def fit_codec(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: VQKVConfig,
    texts: Sequence[Text],
    effort: str,
    seed: int,
    context: int,
    out_dir: str | Path,
    progress: bool = True,
    *,
    model_name: str = "",
    model_sha256: str = "",
) -> CodecInfo:
    """Fit a codec for `model` on `texts`, read in windows of `context` tokens, and write it to `out_dir`.

    Runs on the first CUDA device when there is one (the model comes back to where it was). Finished layers are kept
    in `out_dir`.partial, from where an interrupted fit with the same arguments goes on.
    Raises UserError when the texts are too short, a layer cannot be fitted, or `out_dir` holds something else.
    """
    out_dir = Path(out_dir)
    check_target(out_dir)
    specs = layer_specs(model)
    layers = compressed_layers(config, specs)
    if context <= config.sinks:
        raise UserError(f"--context {context} must be more than the {config.sinks} sinks")
    plan = EFFORTS[effort]
    windows, rows = plan_windows(tokenizer, config, texts, plan, context, effort)
    first = next(spec for spec in specs if spec.layer == layers[0])
    info = CodecInfo(
        method="vqkv",
        config=config,
        model={
            "name": model_name,
            "sha256": model_sha256,
            "architecture": type(model).__name__,
            "num_layers": len(specs),
            "num_kv_heads": first.num_kv_heads,
            "head_dim": first.head_dim,
        },
        texts=[text.to_json() for text in texts],
        effort=effort,
        seed=seed,
        context=context,
        vectors=rows * sum(not held for held in held_out(len(windows))),
        versions={"torch": torch.__version__},
    )
    partial = Partial(out_dir.with_name(out_dir.name + ".partial"), info)
    finished = partial.open()
    missing = [layer for layer in layers if layer not in finished]
    size = 8 * first.num_kv_heads * first.head_dim * rows * len(windows)
    step = max(1, RECORD_BYTES // size)
    passes = [missing[index : index + step] for index in range(0, len(missing), step)]
    home = model.device
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with _bars(progress, len(passes) * len(windows), len(layers), len(finished)) as (recorded, fitted):
            for chunk in passes:
                records = record(model, windows, chunk, rows, plan.queries, config, seed, recorded)
                for layer in chunk:
                    tables, errors = fit_layer(records.pop(layer), config, plan, len(windows), (seed, layer))
                    for side, error in errors.items():
                        if not error["stages"][-1] < 1:
                            raise UserError(
                                f"layer {layer}: the {side} codes lose {error['stages'][-1]:.2f} of the energy on "
                                f"held-out text; keep it whole with --set full_layers={layer} or give more --text"
                            )
                    finished[layer] = partial.add(layer, tables, errors)
                    fitted()
    finally:
        model.to(home)
    info.errors = {str(layer): finished[layer][1] for layer in layers}
    save(Codec(info, {layer: finished[layer][0] for layer in layers}), out_dir)
    partial.remove()
    return info


def plan_windows(
    tokenizer: PreTrainedTokenizerBase,
    config: VQKVConfig,
    texts: Sequence[Text],
    plan: Effort,
    context: int,
    effort: str,
) -> tuple[list[list[int]], int]:
    """The windows to read and the tokens to keep of each. Raises UserError when the texts are too short."""
    entries = max(config.k_entries, config.v_entries)
    wanted = min(plan.vectors * entries, max(MOST_VECTORS, plan.least * entries))
    usable = context - config.sinks
    count = max(1, math.ceil(wanted / (plan.share * usable)))
    windows = token_windows(tokenizer, texts, context, count + max(1, -(-count // (HELD_OUT - 1))))
    fitted = sum(not held for held in held_out(len(windows)))
    if fitted * usable < plan.least * entries:
        need = math.ceil(plan.least * entries / usable)
        need += max(1, -(-need // (HELD_OUT - 1)))
        raise UserError(
            f"the texts give {len(windows) * context} tokens in windows of {context}, a {effort} fit needs "
            f"{need * context}; give more with --text, or shorten --context"
        )
    return windows, min(usable, math.ceil(wanted / fitted))


def held_out(windows: int) -> list[bool]:
    """Which windows are kept from the fit: every eighth, or the last of fewer."""
    step = min(HELD_OUT, windows)
    return [index % step == step - 1 for index in range(windows)]


# -- one layer


def fit_layer(
    seen: LayerRecord, config: VQKVConfig, plan: Effort, windows: int, salt: tuple[int, int]
) -> tuple[LayerCodec, dict[str, dict[str, Any]]]:
    """Both quantisers of a layer, on the CPU, with their errors: side ("k", "v") -> {"stages": held-out error after
    each stage as a fraction of the energy about the mean, in the metric the side was fitted in; "plain": the last one
    in plain squared error; "train": on the fitted vectors; "dead": codewords no vector chose}.
    """
    held = torch.tensor(held_out(windows)).repeat_interleave(seen.keys.shape[1] // windows).to(seen.keys.device)
    weighing = {
        "k": (seen.query_metric, None) if config.query_weighting else (None, None),
        "v": (seen.value_metric, seen.attention[:, ~held]) if config.value_weighting else (None, None),
    }
    sides, errors = {}, {}
    for number, (side, x) in enumerate((("k", seen.keys), ("v", seen.values))):
        generator = torch.Generator().manual_seed((salt[0] * 1_000_003 + salt[1]) * 2 + number)
        quantiser, errors[side] = fit_side(x[:, ~held], x[:, held], *weighing[side], config, side, plan, generator)
        sides[side] = quantiser.to("cpu")
    return LayerCodec(config, sides["k"], sides["v"]), errors


def fit_side(
    x: Tensor,
    held: Tensor,
    metric: Tensor | None,
    weight: Tensor | None,
    config: VQKVConfig,
    side: str,
    plan: Effort,
    generator: torch.Generator,
) -> tuple[Quantiser, dict[str, Any]]:
    """One quantiser from x [Hkv, n, D], with errors on held [Hkv, m, D].

    metric [Hkv, D, D] weighs errors by their direction, weight [Hkv, n] by their vector (None: all alike).
    """
    groups, entries, stages = (getattr(config, f"{side}_{name}") for name in ("groups", "entries", "stages"))
    heads, rows, dim = x.shape
    weight = x.new_ones(heads, rows) if weight is None else weight
    mean = x.new_zeros(heads, dim)
    if config.mean:
        mean = (x * weight[..., None]).sum(dim=1) / weight.sum(dim=1, keepdim=True)
    tables = heads if config.tables == "head" else 1
    metric = torch.eye(dim, device=x.device).expand(heads, -1, -1) if metric is None else metric
    root = metric_root(metric if tables == heads else metric.mean(dim=0, keepdim=True))
    centred, weight = (x - mean[:, None]).reshape(tables, -1, dim), weight.reshape(tables, -1)
    axes = torch.eye(dim, device=x.device).expand(tables, -1, -1)
    if config.rotation:
        bits = [sum(width > group for width in stages) * math.log2(entries) for group in range(groups)]
        axes = balanced_axes(centred @ root, weight, bits)
    encode = (root @ axes).contiguous()
    decode = torch.linalg.inv(encode.double()).float()

    def parts(data: Tensor) -> Tensor:  # [T, G, n, d]
        return (data @ encode).unflatten(-1, (groups, -1)).transpose(1, 2).contiguous()

    train, test = parts(centred), parts((held - mean[:, None]).reshape(tables, -1, dim))
    books = fit_stages(train, weight, stages, entries, config.projection, plan, generator)
    errors = stage_errors(train, test, books, stages)
    quantiser = Quantiser(torch.cat(books, dim=1), encode, decode, mean, stages)
    energy = (held - mean[:, None]).square().sum()
    errors["plain"] = float((quantiser.rebuild(held) - held).square().sum() / energy.clamp_min(1e-30))
    return quantiser, errors


def metric_root(metric: Tensor) -> Tensor:
    """Symmetric square root of metric [T, D, D], scaled to a mean eigenvalue of 1 and kept invertible by RIDGE."""
    metric = metric.double()
    scale = metric.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)
    metric = metric / scale[:, None, None] + RIDGE * torch.eye(metric.shape[-1], device=metric.device)
    value, vector = torch.linalg.eigh(metric)
    return (vector * value.clamp_min(1e-12).sqrt()[:, None] @ vector.transpose(1, 2)).float()


def balanced_axes(y: Tensor, weight: Tensor, bits: Sequence[float]) -> Tensor:
    """Orthogonal [T, D, D]: the principal axes of y [T, n, D], dealt to groups of D / len(bits) columns.

    Each axis in turn, the largest first, goes to the group with the least log-variance net of what its `bits` take off,
    so that the groups end with like errors (the start of optimised product quantisation, Ge et al. 2013).
    """
    covariance = ((y * weight[..., None]).transpose(1, 2) @ y).double() / y.shape[1]
    value, vector = torch.linalg.eigh(covariance)
    size = y.shape[-1] // len(bits)
    turned = []
    for variance, axes in zip(value.flip(1), vector.flip(2), strict=True):
        log = variance.clamp_min(variance[0] * 1e-9 + 1e-30).log()
        log = (log - log[-1]).tolist()  # all >= 0, so that a group never gains room by taking an axis
        load = [-2 * math.log(2) * bit for bit in bits]
        members: list[list[int]] = [[] for _ in load]
        for axis, height in enumerate(log):
            group = min((g for g in range(len(load)) if len(members[g]) < size), key=lambda g: load[g])
            members[group].append(axis)
            load[group] += height
        turned.append(axes[:, [axis for group in members for axis in group]])
    return torch.stack(turned).float()


# -- codebooks


def fit_stages(
    y: Tensor,
    weight: Tensor,
    stages: Sequence[int],
    entries: int,
    projection: bool,
    plan: Effort,
    generator: torch.Generator,
) -> list[Tensor]:
    """Residual codebooks, per stage [T, width, entries, d], of y [T, G, n, d] with weight [T, n]."""
    residual, books = y.clone(), []
    for number, width in enumerate(stages, start=1):
        part = residual[:, :width].flatten(0, 1)
        heavy = weight[:, None].expand(-1, width, -1).flatten(0, 1)
        book = (simvq if projection else kmeans)(part, heavy, entries, plan, generator)
        books.append(book.view(len(y), width, entries, -1))
        if number < len(stages):
            residual[:, :width] -= look_up(books[-1], encode_stage(residual[:, :width], books[-1]))
    return books


def kmeans(y: Tensor, weight: Tensor, entries: int, plan: Effort, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm on y [B, n, d] with weight [B, n], all tables at once: codebooks [B, entries, d]."""
    few = _few(y, entries)
    books = lloyd(y[:, few], weight[:, few], _draw(y, entries, generator), plan.warm, generator)
    return lloyd(y, weight, books, plan.sweeps, generator)


def simvq(y: Tensor, weight: Tensor, entries: int, plan: Effort, generator: torch.Generator) -> Tensor:
    """RSimVQ's codebook: a Gaussian base times the projection that fits best, then a few Lloyd steps."""
    batch, rows, dim = y.shape
    base = torch.randn(batch, entries, dim, generator=generator).to(y.device)
    scale = y.square().mean(dim=(1, 2)).sqrt()[:, None, None]
    books = scale * (base @ metric_root(y.transpose(1, 2) @ y))
    few = _few(y, entries)
    for _ in range(plan.warm):
        total, count = cluster_sums(y[:, few], weight[:, few], assign(y[:, few], books), entries)
        gram = base.transpose(1, 2) @ (base * count[..., None])
        gram = gram + 1e-6 * rows * torch.eye(dim, device=y.device)
        books = base @ torch.linalg.solve(gram, base.transpose(1, 2) @ total)
    return lloyd(y, weight, books, plan.sweeps, generator)


def _few(y: Tensor, entries: int) -> slice:
    return slice(None, None, WARM_STRIDE if y.shape[1] >= WARM_STRIDE**2 * entries else 1)


def lloyd(y: Tensor, weight: Tensor, books: Tensor, iterations: int, generator: torch.Generator) -> Tensor:
    """`iterations` of assignment and mean; a codeword that nothing chose restarts on a vector drawn at random."""
    for _ in range(iterations):
        total, count = cluster_sums(y, weight, assign(y, books), books.shape[1])
        mean = total / count.clamp_min(1e-30)[..., None]
        books = torch.where(count[..., None] > 0, mean, _draw(y, books.shape[1], generator))
    return books


def assign(y: Tensor, books: Tensor) -> Tensor:
    """`nearest` for fitting. On a CPU to 1 part in 2^(23 - bits of an index), and three times as fast.

    Non-negative floats sort like the integers they are stored as, so the index can ride in a distance's lowest bits
    and one integer minimum finds both.
    """
    if y.is_cuda:
        return nearest(y, books)
    entries = books.shape[1]
    low = (1 << (entries - 1).bit_length()) - 1
    index = torch.arange(entries, dtype=torch.int32)
    code = torch.empty(y.shape[:2], dtype=torch.int32)
    step = max(1, CPU_SCORES // entries)
    buffer = y.new_empty(step, entries)
    for table, book in enumerate(books):
        half_book, half_y = 0.5 * book.square().sum(-1), 0.5 * y[table].square().sum(-1, keepdim=True)
        turned = -book.T.contiguous()
        for first in range(0, y.shape[1], step):
            span = slice(first, min(first + step, y.shape[1]))
            half = torch.addmm(half_book, y[table, span], turned, out=buffer[: span.stop - first])
            packed = half.add_(half_y[span]).view(torch.int32)  # half the squared distances
            packed.bitwise_and_(~low).bitwise_or_(index)
            code[table, span] = packed.amin(dim=-1).bitwise_and_(low)
    return code.long()


def _draw(y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` vectors of every table of y [B, n, d]."""
    row = torch.randperm(y.shape[1], generator=generator)[:count].to(y.device)
    if len(row) < count:
        row = row.repeat(-(-count // len(row)))[:count]
    return y[:, row]


def cluster_sums(y: Tensor, weight: Tensor, code: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Per code [B, n], the weighted sum [B, entries, d] and the weight [B, entries] of its vectors; deterministic."""
    batch, _, dim = y.shape
    index = (code + entries * torch.arange(batch, device=y.device)[:, None]).flatten()
    rows = torch.cat((y * weight[..., None], weight[..., None]), dim=-1).view(-1, dim + 1)
    total = y.new_zeros(batch * entries, dim + 1)
    if y.is_cuda:
        total.index_put_((index,), rows, accumulate=True)  # sorts first, unlike index_add_
    else:
        total.index_add_(0, index, rows)
    total = total.view(batch, entries, -1)
    return total[..., :dim], total[..., dim]


def encode_stage(y: Tensor, book: Tensor, find: Callable[[Tensor, Tensor], Tensor] = assign) -> Tensor:
    """Codes [T, width, n] of y [T, width, n, d] in book [T, width, entries, d]."""
    return find(y.flatten(0, 1), book.flatten(0, 1)).view(y.shape[:3])


def look_up(book: Tensor, code: Tensor) -> Tensor:
    return torch.take_along_dim(book, code[..., None], dim=2)


def stage_errors(train: Tensor, test: Tensor, books: list[Tensor], stages: Sequence[int]) -> dict[str, Any]:
    """Errors after each stage as fractions of the energy, on [T, G, n, d]; codewords that training left unused."""
    dead = 0

    def losses(y: Tensor, find: Callable[[Tensor, Tensor], Tensor], count: bool) -> Iterator[float]:
        nonlocal dead
        residual, energy = y.clone(), y.square().sum().clamp_min(1e-30)
        for width, book in zip(stages, books, strict=True):
            code = encode_stage(residual[:, :width], book, find)
            residual[:, :width] -= look_up(book, code)
            if count:
                used = torch.zeros(book.shape[:3], dtype=torch.bool, device=y.device).scatter_(2, code, True)
                dead += int((~used).sum())
            yield float(residual.square().sum() / energy)

    fitted = list(losses(train, assign, True))
    return {"stages": list(losses(test, nearest, False)), "train": fitted[-1], "dead": dead}


# -- resuming and progress


class Partial:
    """The folder of an unfinished fit: one file per finished layer, and what they were fitted with."""

    def __init__(self, folder: Path, info: CodecInfo) -> None:
        self.folder, self.info, self.stamp = folder, info, json.dumps(info.to_json(), sort_keys=True)

    def open(self) -> dict[int, tuple[Any, dict[str, Any]]]:
        """Layers already fitted with the same arguments; whatever else is in the folder is dropped."""
        stamp = self.folder / "fit.json"
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != self.stamp:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            stamp.write_text(self.stamp, encoding="utf-8")
        found = {}
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                meta = json.loads(file.metadata()["layer"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
            tables = reference(self.info.method).LayerCodec.from_tensors(self.info.config, tensors)
            found[meta["number"]] = (tables, meta["errors"])
        return found

    def add(self, layer: int, tables: Any, errors: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        path = self.folder / f"layer-{layer:03d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in tables.tensors().items()}
        meta = {"layer": json.dumps({"number": layer, "errors": errors})}
        save_file(tensors, str(path.with_suffix(".writing")), metadata=meta)
        path.with_suffix(".writing").rename(path)
        return tables, errors

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _bars(show: bool, windows: int, layers: int, done: int) -> Iterator[Iterable[Any]]:
    """Two progress bars on stderr, as functions that advance them by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bars:
        recording = bars.add_task("recording windows", total=windows)
        fitting = bars.add_task("fitting layers", total=layers, completed=done)
        yield (lambda: bars.advance(recording)), (lambda: bars.advance(fitting))
