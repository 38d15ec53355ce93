"""From logits to what is kept of a sample, and from those to cells: means with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calib.quality import RESAMPLES, bootstrap

from .sample import Item, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from .tasks import Case

BUCKETS = 8  # parts of a window's decoded tokens that are told apart
Z = 1.959964  # of a 95 % interval


def measure(sample: Sample, exact: Tensor, coded: Tensor) -> dict[str, Any]:
    """What is kept of one sample. exact, coded: float32 [R, vocabulary], of `sample.picks`, on one device.

    Of a window, by bucket: {"buckets": [[from, to, tokens with a known successor, their mean negative log-likelihood
    exact and compressed, mean KL divergence, share of equal top-1 tokens], ...]}, in nats. Of a question:
    {"answers": {variant: {"right", "log_likelihood", "exact_right", "exact_log_likelihood"}}}: the share of items that
    are right and the mean log-likelihood of an answer token.
    """
    true, approx = torch.log_softmax(exact, -1), torch.log_softmax(coded, -1)
    if not sample.answers:
        return {"buckets": _buckets(sample, true, approx)}
    row = {position: number for number, position in enumerate(sample.picks)}
    ids = torch.tensor(sample.ids, device=exact.device)[torch.tensor(sample.picks, device=exact.device) + 1, None]
    told = torch.stack(
        [x for rows in (approx, true) for x in (rows.gather(1, ids)[:, 0].double(), rows.argmax(-1).double())]
    )
    likely, best, exact_likely, exact_best = told.cpu().numpy()
    answers = {}
    for variant, items in sample.answers.items():
        rows = [row[position - 1] for item in items for position in range(item.start, item.stop)]
        answers[variant] = {
            "right": _right(items, row, best),
            "log_likelihood": float(likely[rows].mean()),
            "exact_right": _right(items, row, exact_best),
            "exact_log_likelihood": float(exact_likely[rows].mean()),
        }
    return {"answers": answers}


def _right(items: Sequence[Item], row: Mapping[int, int], best: np.ndarray) -> float:
    right = [
        all(int(best[row[item.start + place - 1]]) in good for place, good in enumerate(item.allowed)) for item in items
    ]
    return sum(right) / len(right)


def _buckets(sample: Sample, true: Tensor, approx: Tensor) -> list[list[float]]:
    count = len(sample.picks)
    target = torch.tensor(sample.ids[sample.first + 1 :], device=true.device)[:, None]
    losses = [-rows[:-1].gather(1, target)[:, 0] for rows in (true, approx)]
    kl = (true.exp() * (true - approx)).sum(-1)
    same = (true.argmax(-1) == approx.argmax(-1)).float()
    edges = np.linspace(0, count, min(BUCKETS, count) + 1).astype(int).tolist()
    columns = [
        torch.stack([x[start:stop].mean() if len(x[start:stop]) else x.new_zeros(()) for x in (*losses, kl, same)])
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    rows = torch.stack(columns).double().cpu().tolist()
    return [
        [start, stop, min(stop, count - 1) - start, *row]
        for start, stop, row in zip(edges, edges[1:], rows, strict=False)
    ]


# -- cells


def cells(cases: Sequence[Case], found: Sequence[Mapping[str, Any]], label: str, tasks: Sequence[str]) -> list[dict]:
    """The cells of one subject. found: for each case what `measure` made of it."""
    groups: dict[tuple[str, str, str, int], list[tuple[Case, Mapping[str, Any]]]] = {}
    for case, result in zip(cases, found, strict=True):
        for variant in result.get("answers") or {"": None}:
            groups.setdefault((case.task, variant, case.text, case.length), []).append((case, result))
    made: list[dict[str, Any]] = []
    for (task, variant, text, length), members in groups.items():
        shared = {"variant": variant, "text": text, "length": length, "samples": len(members)}
        if variant == "":
            buckets = np.array([result["buckets"] for _, result in members])
            for name, cell in (("ppl", _perplexity), ("kld", _divergence)):
                if name in tasks:
                    made.append({"subject": label, "task": name, **shared, **cell(buckets)})
        else:
            made.append({"subject": label, "task": task, **shared, **_accuracy(variant, members)})
    return made


def _split(buckets: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of windows' buckets [windows, buckets, 7]: tokens with a successor, losses exact and coded, KL, top-1, tokens."""
    return (*(buckets[:, :, column] for column in range(2, 7)), buckets[:, :, 1] - buckets[:, :, 0])


def _perplexity(buckets: np.ndarray) -> dict[str, Any]:
    counts, exact, coded, kl, _, _ = _split(buckets)
    exact_mean, coded_mean = ((x * counts).sum(1) / counts.sum(1) for x in (exact, coded))  # per window
    positions = [
        {"from": int(start), "to": int(stop), "change": float(np.expm1((c - e).mean())), "kl": float(k.mean())}
        for start, stop, e, c, k in zip(*buckets[0, :, :2].T, exact.T, coded.T, kl.T, strict=True)
    ]
    return {
        "exact": float(np.exp(exact_mean.mean())),
        "value": float(np.exp(coded_mean.mean())),
        "change": float(np.expm1((coded_mean - exact_mean).mean())),
        "interval": list(bootstrap(coded_mean - exact_mean)),
        "positions": positions,
    }


def _divergence(buckets: np.ndarray) -> dict[str, Any]:
    _, _, _, kl, same, tokens = _split(buckets)
    per_window = (kl * tokens).sum(1) / tokens.sum(1)
    positions = [
        {"from": int(start), "to": int(stop), "kl": float(k.mean()), "top1": float(s.mean())}
        for start, stop, k, s in zip(*buckets[0, :, :2].T, kl.T, same.T, strict=True)
    ]
    return {
        "exact": 0.0,
        "value": float(per_window.mean()),
        "interval": mean_interval(per_window),
        "top1": float(((same * tokens).sum(1) / tokens.sum(1)).mean()),
        "positions": positions,
    }


def _accuracy(variant: str, members: Sequence[tuple[Case, Mapping[str, Any]]]) -> dict[str, Any]:
    answers = [result["answers"][variant] for _, result in members]
    mean = {name: sum(answer[name] for answer in answers) / len(answers) for name in answers[0]}
    cell: dict[str, Any] = {
        "exact": mean["exact_right"],
        "value": mean["right"],
        "interval": wilson(mean["right"], len(answers)),
        "log_likelihood": mean["log_likelihood"],
        "exact_log_likelihood": mean["exact_log_likelihood"],
    }
    depths: dict[str, list[float]] = {}
    for case, result in members:
        if case.sample.depth is not None:
            depths.setdefault(f"{case.sample.depth:.1f}", []).append(result["answers"][variant]["right"])
    if depths:
        cell["by_depth"] = {depth: sum(right) / len(right) for depth, right in sorted(depths.items())}
    return cell


def wilson(share: float, count: int) -> list[float]:
    """Wilson's 95 % interval of a share of `count` samples."""
    middle = share + Z * Z / (2 * count)
    reach = Z * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return [max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)]


def mean_interval(values: np.ndarray, seed: int = 0) -> list[float]:
    """95 % bootstrap interval of the mean of `values` [windows]."""
    pick = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    return [float(x) for x in np.quantile(values[pick].mean(axis=1), (0.025, 0.975))]
