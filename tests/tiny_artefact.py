"""Hand-made engines whose output is exact integer arithmetic, with numpy references, for tests of the runtime.

Token t is the integer vector E[t]; position p attends causally to everything before it with weight 1 + p % 7, so
    hidden[p] = sum over q <= p of (1 + q % 7) * E[token_q]        logits[p] = hidden[p] @ W + bias.
`dense` keeps E[token] in one fp16 state; `coded` keeps sinks and a ring in one and int8 codes (E itself) in another;
with a stride, every stride-th code row is read from a third state. With a selection there is an output "selected": 0,
1, ..., select_len - 1, then -1. All must give the same logits, bit for bit, at every length.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from plugins.contract import HOST_INPUTS, OPTIONAL_OUTPUTS, TensorSpec
from plugins.geometry import Geometry
from runtime.artefact import write_config
from runtime.session import Session, StepFailed

WIDTH = 8
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)
SMALL = Geometry(sinks=2, window=5, block=3)
SELECTING = Geometry(sinks=2, window=5, block=3, stride=4, select_fraction=0.3)


def tokenizer() -> Tokenizer:
    """Byte-level: every byte is a token, so that any character beyond ASCII spans several; then two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "th", "the"])}
    result = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(text, special=True) for text in ("<start>", "<end>")])
    return result


VOCAB = tokenizer().get_vocab_size()
START, END = VOCAB - 2, VOCAB - 1


def tables(ascii_only: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E [V, WIDTH], W [WIDTH, V], bias [V]: small integers; the bias keeps greedy text within lower-case ASCII."""
    rng = np.random.default_rng(0)
    embed = rng.integers(-4, 5, (VOCAB, WIDTH)).astype(np.float32)
    project = rng.integers(-4, 5, (WIDTH, VOCAB)).astype(np.float32)
    bias = np.full(VOCAB, -1e6 if ascii_only else 0.0, np.float32)
    words = tokenizer()
    bias[[words.token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] + [words.token_to_id("Ġ")]] = 0
    return embed, project, bias


def reference(tokens: list[int]) -> np.ndarray:
    """Logits of every position, float32 [N, V], without any cache."""
    embed, project, bias = tables()
    weight = 1 + np.arange(len(tokens), dtype=np.float32) % 7
    return np.cumsum(weight[:, None] * embed[tokens], axis=0) @ project + bias


_COMMON = """
  x = Gather(E, tokens)
  shape = Shape(tokens)
  batch = Slice(shape, i0, i1)
  s_count = Gather(shape, one)
  s = Range(zero, s_count, one)
  srow = Unsqueeze(s, i0)
  past = Cast<to=7>(past_len)
  pastc = Unsqueeze(past, i1)
  newc0 = Cast<to=7>(new_len)
  newc = Unsqueeze(newc0, i1)
  pos = Add(pastc, srow)
  real = Less(srow, newc)
  posmod = Mod(pos, seven)
  w0 = Add(posmod, one)
  w = Cast<to=1>(w0)
  wc = Unsqueeze(w, i2)
  xw = Mul(x, wc)
  fresh = CumSum(xw, one)
"""
_LOGITS = """
  total = Add(fresh, old)
  picki = Unsqueeze(logit_index, i2)
  picked = GatherND<batch_dims=1>(total, picki)
  projected = MatMul(picked, W)
  logits = Add(projected, bias)
"""
_DENSE = """
  live64 = Cast<to=7>(live)
  livev = Unsqueeze(live64, i0)
  seen16 = Slice(cache, i0, livev, i2)
  seen1 = Cast<to=1>(seen16)
  seen = Squeeze(seen1, i1)
  p = Range(zero, live64, one)
  prow = Unsqueeze(p, i0)
  valid = Less(prow, pastc)
  pmod = Mod(prow, seven)
  pw0 = Add(pmod, one)
  validi = Cast<to=7>(valid)
  pw1 = Mul(pw0, validi)
  pw = Cast<to=1>(pw1)
  pwm = Unsqueeze(pw, i1)
  old = MatMul(pwm, seen)
  cshape = Shape(cache)
  rows = Gather(cshape, two)
  trash = Sub(rows, one)
  target0 = Where(real, pos, trash)
  target1 = Unsqueeze(target0, i1)
  target2 = Unsqueeze(target1, im1)
  eshape = Concat<axis=0>(batch, i1, scountv, width)
  scountv = Unsqueeze(s_count, i0)
  target = Expand(target2, eshape)
  x16 = Cast<to=10>(x)
  update = Unsqueeze(x16, i1)
  cache_out = ScatterElements<axis=2>(cache, target, update)
"""
# ring rows C = old exact rows ++ new tokens; slot s of the state holds the largest position < past congruent to it.
_CODED = """
  exact1 = Cast<to=1>(exact)
  exact3 = Squeeze(exact1, i1)
  c = Concat<axis=1>(exact3, x)
  beyond0 = Sub(pastc, reach)
  beyond = Max(beyond0, zero)
  blocks = Div(beyond, block)
  coded = Mul(blocks, block)
  slot = Range(zero, exactrows, one)
  slotr = Unsqueeze(slot, i0)
  slotring = Sub(slotr, sinks)
  lastp = Sub(pastc, oneplus)
  back0 = Sub(lastp, slotring)
  back = Mod(back0, ring)
  ringpos0 = Sub(pastc, one)
  ringpos = Sub(ringpos0, back)
  insink = Less(slotr, sinks)
  where = Where(insink, slotr, ringpos)
  firstexact = Add(coded, sinks)
  okring0 = GreaterOrEqual(where, firstexact)
  okring = Or(insink, okring0)
  okpast = Less(where, pastc)
  ok = And(okring, okpast)
  oki = Cast<to=7>(ok)
  emod = Mod(where, seven)
  ew0 = Add(emod, one)
  ew1 = Mul(ew0, oki)
  ew2 = Cast<to=1>(ew1)
  ew = Unsqueeze(ew2, i1)
  oldexact = MatMul(ew, exact3)
  codes1 = Cast<to=1>(codes)
  codes3 = Squeeze(codes1, i1)
  cshape = Shape(codes3)
  crows = Gather(cshape, one)
  j = Range(zero, crows, one)
  jrow = Unsqueeze(j, i0)
  okcode = {okcode}
  okcodei = Cast<to=7>(okcode)
  jpos = Add(jrow, sinks)
  jmod = Mod(jpos, seven)
  jw0 = Add(jmod, one)
  jw1 = Mul(jw0, okcodei)
  jw2 = Cast<to=1>(jw1)
  jw = Unsqueeze(jw2, i1)
  oldcodes = MatMul(jw, codes3)
  {old}
  src = Cast<to=7>(enc_src)
  srci = Unsqueeze(src, i2)
  torow = GatherND<batch_dims=1>(c, srci)
  torow8 = Cast<to=3>(torow)
  rowsnew = Unsqueeze(torow8, i1)
  dst = Cast<to=7>(enc_dst)
  dst1 = Unsqueeze(dst, i1)
  dst2 = Unsqueeze(dst1, im1)
  esize = Shape(rowsnew)
  dstx = Expand(dst2, esize)
  codes_out = ScatterElements<axis=2>(codes, dstx, rowsnew)
  endp = Add(pastc, newc)
  lastn = Sub(endp, oneplus)
  nback0 = Sub(lastn, slotring)
  nback = Mod(nback0, ring)
  nring0 = Sub(endp, one)
  nring = Sub(nring0, nback)
  nwhere = Where(insink, slotr, nring)
  isnew0 = GreaterOrEqual(nwhere, pastc)
  isnew1 = Less(nwhere, endp)
  isnew = And(isnew0, isnew1)
  newidx0 = Sub(nwhere, pastc)
  newidx = Add(newidx0, exactrows)
  from = Where(isnew, newidx, slotr)
  fromi = Unsqueeze(from, i2)
  nexact = GatherND<batch_dims=1>(c, fromi)
  nexact16 = Cast<to=10>(nexact)
  exact_out = Unsqueeze(nexact16, i1)
"""

_REFERENCES = """
  okcode0 = Less(jrow, coded)
  jref = Mod(jrow, stride)
  plain = Greater(jref, zero)
  refs1 = Cast<to=1>(refs)
  refs3 = Squeeze(refs1, i1)
  rshape = Shape(refs3)
  rrows = Gather(rshape, one)
  r = Range(zero, rrows, one)
  rrow = Unsqueeze(r, i0)
  rcode = Mul(rrow, stride)
  okref = Less(rcode, coded)
  okrefi = Cast<to=7>(okref)
  rpos = Add(rcode, sinks)
  rmod = Mod(rpos, seven)
  rw0 = Add(rmod, one)
  rw1 = Mul(rw0, okrefi)
  rw2 = Cast<to=1>(rw1)
  rw = Unsqueeze(rw2, i1)
  oldrefs = MatMul(rw, refs3)
  old0 = Add(oldexact, oldcodes)
  dmod = Mod(dst, stride)
  ismult = Equal(dmod, zero)
  ctrash = Sub(crows, one)
  used = Less(dst, ctrash)
  isref = And(ismult, used)
  rtarget0 = Div(dst, stride)
  rtrash = Sub(rrows, one)
  rtarget = Where(isref, rtarget0, rtrash)
  rdst1 = Unsqueeze(rtarget, i1)
  rdst2 = Unsqueeze(rdst1, im1)
  torow16 = Cast<to=10>(torow)
  refsnew = Unsqueeze(torow16, i1)
  rsize = Shape(refsnew)
  rdstx = Expand(rdst2, rsize)
  refs_out = ScatterElements<axis=2>(refs, rdstx, refsnew)
"""
_SELECTED = """
  slen = Cast<to=7>(select_len)
  slenc = Unsqueeze(slen, i1)
  swidth = Cast<to=7>(select_width)
  slots = Range(zero, swidth, one)
  slotsr = Unsqueeze(slots, i0)
  chosen = Less(slotsr, slenc)
  rows64 = Where(chosen, slotsr, minus)
  layer0_selected = Cast<to=6>(rows64)
"""


def _order(body: str) -> str:
    """Topological order, so that the text above may be read in any."""
    defined = {line.split(" = ")[0].strip() for line in body.splitlines()}
    known: set[str] = set()
    waiting, done = [line.strip() for line in body.splitlines() if line.strip()], []
    while waiting:
        used = {line: set(line[line.rindex("(") + 1 : -1].replace(" ", "").split(",")) for line in waiting}
        ready = [line for line in waiting if used[line] & defined <= known]
        done += ready
        known |= {line.split(" = ")[0] for line in ready}
        waiting = [line for line in waiting if line not in ready]
        assert ready, waiting
    return "\n".join(done)


def _graph(geometry: Geometry | None, ballast: int) -> tuple[onnx.ModelProto, list[TensorSpec], list[TensorSpec]]:
    selects, stride = (geometry.selects, geometry.stride) if geometry is not None else (False, 0)
    roles = [
        role
        for role in HOST_INPUTS
        if not role.startswith(("enc", "select")) or (geometry is not None and (selects or role.startswith("enc")))
    ]
    if geometry is not None:
        roles.remove("live")
        states = [
            TensorSpec("exact", "state", "float16", ("batch", 1, geometry.dense_rows, WIDTH), "exact_out"),
            TensorSpec("codes", "state", "int8", ("batch", 1, "code_rows", WIDTH), "codes_out"),
        ]
        if stride:
            states.append(TensorSpec("refs", "state", "float16", ("batch", 1, "ref_rows", WIDTH), "refs_out"))
    else:
        states = [TensorSpec("cache", "state", "float16", ("batch", 1, "rows", WIDTH), "cache_out")]
    if ballast:
        states.append(TensorSpec("ballast", "state", "int8", ("batch", "rows", ballast), "ballast_out"))
    inputs = [TensorSpec(role, role, *HOST_INPUTS[role]) for role in roles] + states
    outputs = [TensorSpec("logits", "logits", "float32", ("batch", "picks", VOCAB))]
    outputs += [TensorSpec(state.alias or "", "state", state.dtype, state.shape) for state in states]
    if selects:
        outputs.append(TensorSpec("layer0.selected", "selected", *OPTIONAL_OUTPUTS["selected"]))

    def declare(spec: TensorSpec) -> str:
        kind = {"float32": "float"}.get(spec.dtype, spec.dtype)
        shape = f"[{','.join(map(str, spec.shape))}]" if spec.shape else ""
        return f"{kind}{shape} {spec.name.replace('.', '_')}"

    body = _COMMON + (_DENSE if geometry is None else _CODED) + _LOGITS
    if geometry is not None:
        plain = {"okcode": "Less(jrow, coded)", "old": "old = Add(oldexact, oldcodes)"}
        split = {"okcode": "And(okcode0, plain)", "old": "old = Add(old0, oldrefs)"}
        body = body.format(**(split if stride else plain))
        body += (_REFERENCES if stride else "") + (_SELECTED if selects else "")
    body += "ballast_out = Identity(ballast)\n" if ballast else ""
    text = (
        '<ir_version: 9, opset_import: ["": 18]>\n'
        f"tiny ({', '.join(map(declare, inputs))}) => ({', '.join(map(declare, outputs))}) {{\n{_order(body)}\n}}"
    )
    model = parser.parse_model(text)
    if selects:  # the text format has no dots in names
        model.graph.output[-1].name = "layer0.selected"
        next(node for node in model.graph.node if "layer0_selected" in node.output).output[0] = "layer0.selected"
    embed, project, bias = tables()
    constants: dict[str, Any] = {"E": embed, "W": project, "bias": bias, "zero": 0, "one": 1, "two": 2, "seven": 7}
    constants |= {"i0": [0], "i1": [1], "i2": [2], "im1": [-1], "width": [WIDTH]}
    if geometry is not None:
        constants |= {"sinks": geometry.sinks, "ring": geometry.ring, "block": geometry.block}
        constants |= {"reach": geometry.sinks + geometry.window, "oneplus": geometry.sinks + 1}
        constants |= {"exactrows": geometry.dense_rows}
        constants |= ({"stride": stride} if stride else {}) | ({"minus": -1} if selects else {})
    for name, value in constants.items():
        array = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model, inputs, outputs


def make(folder: Path, *, geometry: Geometry | None = None, max_length: int = 8192, ballast: int = 0) -> Path:
    """Write a tiny engine: dense without a geometry, coded with one. Returns the folder.

    ballast: bytes per token of one more state, which no step reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, inputs, outputs = _graph(geometry, ballast)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    tokenizer().save(str(folder / "tokenizer.json"))
    texts: dict[str, Any] = {
        "tokenizer_config.json": {"bos_token": "<start>", "eos_token": {"content": "<end>"}},
        "generation_config.json": {"eos_token_id": [END]},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_config(
        folder,
        {
            "format": 2,
            "kvpack": "0.1.0",
            "model": {
                "name": "tiny", "architecture": "sum", "sha256": "0" * 64, "vocab_size": VOCAB, "num_layers": 1,
                "num_kv_heads": 1, "head_dim": WIDTH,
            },
            "method": {"name": "none" if geometry is None else "vqkv", "config": {}, "ratio": 1.0},
            "dtype": "fp32",
            "kv_dtype": "fp16",
            "limits": {"max_length": max_length},
            "geometry": None if geometry is None else geometry.to_json(),
            "inputs": [spec.to_json() for spec in inputs],
            "outputs": [spec.to_json() for spec in outputs],
            "fixed_bytes": 0,
            "target": {"backend": "onnxruntime", "versions": {}},
        },
    )  # fmt: skip
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def decode_all(session: Any, tokens: list[int], start: int) -> None:
    """Decode tokens[start:], each beside its reference."""
    expected = reference(tokens)
    for position in range(start, len(tokens)):
        np.testing.assert_array_equal(session.decode([tokens[position]])[0], expected[position])


def endless_prefill(monkeypatch: pytest.MonkeyPatch, patience: float) -> tuple[threading.Event, threading.Event]:
    """From now on a prefill ends by an interrupt alone, as failed. Returns what is set by its begin, and by its end."""
    inside, pressed = threading.Event(), threading.Event()

    def endless(session: Session, tokens: list[int]) -> Any:
        inside.set()
        assert pressed.wait(patience)
        raise StepFailed("interrupted")

    monkeypatch.setattr(Session, "prefill", endless)
    monkeypatch.setattr(Session, "interrupt", lambda session: inside.is_set() and pressed.set())
    return inside, pressed


def prefill_together(monkeypatch: pytest.MonkeyPatch, number: int, patience: float) -> None:
    """From now on prefills begin by the `number`: nobody's generation begins before everybody's."""
    meeting, prefill = threading.Barrier(number), Session.prefill

    def together(session: Session, tokens: list[int]) -> Any:
        meeting.wait(patience)
        return prefill(session, tokens)

    monkeypatch.setattr(Session, "prefill", together)
