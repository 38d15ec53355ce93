"""What lies between the attentions, on the CPU emulator, against torch in float32."""

from __future__ import annotations

import pytest
import torch
from native import DTYPES, emulated, relative
from torch.nn.functional import gelu, silu

from plugins.native.abi import Library, NativeError

BARS = {torch.float16: 5e-3, torch.bfloat16: 1e-2}
ACTIVATIONS = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "gelu": gelu}


@pytest.fixture(scope="module")
def library() -> Library:
    return emulated()


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def placed(x: torch.Tensor, shift: int) -> torch.Tensor:
    """The same numbers `shift` elements after a place of 16 bytes."""
    room = torch.empty(x.numel() + shift + 8, dtype=x.dtype)
    start = -room.data_ptr() // 2 % 8 + shift
    return room[start : start + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("columns", [1, 24, 30, 896, 4096, 8200])
@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_the_sum_and_its_norm(library: Library, dtype: torch.dtype, columns: int, shift: int) -> None:
    rows, epsilon = 3, 1e-5
    x, y = (placed(drawn(rows, columns, dtype=dtype, seed=n), shift) for n in range(2))
    weight = placed(drawn(columns, dtype=dtype, seed=2), shift)
    sum, out = (placed(torch.full_like(x, torch.nan), shift) for _ in range(2))
    addresses = [t.data_ptr() for t in (x, y, weight, sum, out)]
    library.add_rms_norm(DTYPES[dtype], rows, columns, epsilon, addresses)
    assert torch.equal(sum, x + y)
    whole = sum.float()
    normal = (whole * (whole.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(dtype)
    assert relative(out, (normal * weight).float()) < 1e-3
    wanted = (x.float() + y.float()) * weight.float()
    wanted = wanted * ((x.float() + y.float()).square().mean(-1, keepdim=True) + epsilon).rsqrt()
    assert relative(out, wanted) < BARS[dtype]
    library.add_rms_norm(DTYPES[dtype], rows, columns, epsilon, [*addresses[:3], x.data_ptr(), out.data_ptr()])
    assert torch.equal(x, sum)  # in its place


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("columns", [1, 24, 30, 2056])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_a_gated_activation(library: Library, dtype: torch.dtype, activation: str, columns: int, shift: int) -> None:
    rows = 3
    x = placed(4 * drawn(rows, 2, columns, dtype=dtype), shift)
    out = placed(torch.full((rows, columns), torch.nan, dtype=dtype), shift)
    library.gated_activation(DTYPES[dtype], activation, rows, columns, x.data_ptr(), out.data_ptr())
    gate, up = x[:, 0].float(), x[:, 1].float()
    assert relative(out, ACTIVATIONS[activation](gate) * up) < BARS[dtype]
    if dtype == torch.float16:  # rounded twice, as torch does op by op
        assert relative(out, (ACTIVATIONS[activation](gate).to(dtype) * x[:, 1]).float()) < 1e-3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_finite_far_from_0(library: Library, activation: str) -> None:
    gate = torch.tensor([-60000.0, -200.0, -20.0, 0.0, 20.0, 200.0, 60000.0, 1.0]).half()
    x, out = torch.stack((gate, torch.ones(8).half())), torch.empty(8).half()
    library.gated_activation(DTYPES[torch.float16], activation, 1, 8, x.data_ptr(), out.data_ptr())
    torch.testing.assert_close(out.float(), ACTIVATIONS[activation](gate.float()), atol=1e-3, rtol=1e-3)


def test_refusals_say_why(library: Library) -> None:
    x = torch.zeros(16).half()
    with pytest.raises(NativeError, match="dtype 7 is neither fp16 nor bf16"):
        library.add_rms_norm(7, 1, 8, 1e-5, [x.data_ptr()] * 5)
    with pytest.raises(NativeError, match="1 rows of 0 numbers"):
        library.gated_activation(0, "silu", 1, 0, x.data_ptr(), x.data_ptr())
    with pytest.raises(NativeError, match="must not be null"):
        library.add_rms_norm(0, 1, 8, 1e-5, [x.data_ptr()] * 4 + [0])
    library.add_rms_norm(0, 0, 8, 1e-5, [0] * 5)  # no rows, nothing to do
