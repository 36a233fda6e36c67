"""The CPU path: faster modules are the same functions, and stay away where they would not be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from flashdraft import fast
from flashdraft.fast import FusedRMSNorm, PackedLinear, pack, packed_product, speed_up
from flashdraft.target.tiny import FAMILIES, tiny_model

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 16, 33, 64])
def test_packed_product_equals_linear(rows: int, bias: bool) -> None:
    """Every number of rows, not only the one that the weight was reordered for."""
    linear = nn.Linear(96, 160, bias=bias)
    for shape in ((rows, 96), (1, rows, 96)):
        x = torch.randn(shape)
        with torch.no_grad():
            expected = linear(x)
            torch.testing.assert_close(packed_product(x, pack(linear), linear.bias), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(PackedLinear(linear, pack(linear), 1)(x), expected, atol=1e-5, rtol=1e-5)


@onednn
def test_packed_linear_uses_the_stock_product_outside_its_range() -> None:
    linear = nn.Linear(64, 64)
    poisoned = PackedLinear(linear, pack(nn.Linear(64, 64)), fewest=4)
    for rows, same in ((1, True), (3, True), (4, False), (64, False), (65, True)):
        x = torch.randn(rows, 64)
        with torch.no_grad():
            assert torch.allclose(poisoned(x), linear(x)) == same
        assert torch.allclose(poisoned(x), linear(x))  # gradients are made by the stock product


@onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_sped_up_models_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything replaced that can be, whatever it costs: the logits stay."""
    monkeypatch.setattr(fast, "GAIN", 1e9)
    stock, quick = tiny_model(family), tiny_model(family)
    report = speed_up(quick)
    assert report.linears and report.extra_bytes > 0
    assert all(fewest == 1 for fewest in report.linears.values())
    assert any(isinstance(m, PackedLinear) for m in quick.modules())
    assert (report.norms > 0) == any(isinstance(m, FusedRMSNorm) for m in quick.modules())
    assert report.norms == 0 or family not in ("gemma2", "gemma3", "gpt2")
    for rows in (1, 8, 40):
        ids = torch.randint(0, 97, (1, rows))
        with torch.no_grad():
            torch.testing.assert_close(quick(ids).logits, stock(ids).logits, atol=2e-4, rtol=2e-4)


def test_nothing_is_replaced_without_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "GAIN", 0.0)
    model = tiny_model()
    report = speed_up(model)
    assert report.linears == {} and report.extra_bytes == 0
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


@onednn
def test_timings_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start reads the first one's decisions, for and against; a busy machine notes none."""
    monkeypatch.setattr(fast, "GAIN", 1e9)
    monkeypatch.setattr(fast, "load_average", lambda: 99.0)
    assert speed_up(tiny_model(), tmp_path / "notes").linears and not (tmp_path / "notes").exists()
    monkeypatch.setattr(fast, "load_average", lambda: 0.0)
    first = speed_up(tiny_model(), tmp_path / "notes")
    (file,) = (tmp_path / "notes").iterdir()
    monkeypatch.setattr(fast, "_time", lambda *_: pytest.fail("timed again"))
    assert speed_up(tiny_model(), tmp_path / "notes") == first
    file.write_text(json.dumps({key: None for key in json.loads(file.read_text())}))
    assert speed_up(tiny_model(), tmp_path / "notes").linears == {}


def test_half_precision_is_left_alone() -> None:
    model = tiny_model().bfloat16()
    assert speed_up(model).norms == 0
    assert not any(isinstance(m, (PackedLinear, FusedRMSNorm)) for m in model.modules())
