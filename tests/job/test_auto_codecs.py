"""In one process nothing is sent: `auto` is its weakest codec there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import beside_own_model, checkpoints, decided, settings, write_rows
from safetensors.torch import load_file
from torch import nn

from shadowsync import Job, Result, Trained

KINDS = ("pull", "push", "dense")


class Line(nn.Module):
    """One layer of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(14, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1)

    def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(torch.cat([dense, *(embeddings[name] for name in ("c0", "c1", "many"))], dim=1)).squeeze(1)


def run(tmp_path: Path, codec: Any, out: str) -> tuple[Result, list[torch.Tensor]]:
    data = write_rows(tmp_path / "rows.parquet", 60)
    config = settings(
        data, data, compression=dict.fromkeys(KINDS, codec), sync={"method": "easgd", "schedule": "every_k", "k": 2}
    )
    result = Job(beside_own_model(config), model=Line(), out=tmp_path / out).run()
    parts = Trained(tmp_path / out, model=Line()).server.state()
    dense = load_file(checkpoints(tmp_path / out)[-1] / "dense.safetensors")
    return result, [*(tensor for part in parts for tensor in part.tensors.values()), *dense.values()]


@pytest.mark.parametrize(("options", "codec"), [("auto", "plain"), ({"name": "auto", "weakest": "int8"}, "int8")])
def test_auto_is_its_weakest_codec_bit_by_bit_and_says_so(tmp_path: Path, options: Any, codec: str) -> None:
    chosen, numbers = run(tmp_path, options, "auto")
    fixed, wanted = run(tmp_path, codec, "fixed")
    assert all(torch.equal(found, expected) for found, expected in zip(numbers, wanted, strict=True))
    assert chosen.wire == fixed.wire
    assert chosen.wire.codecs == dict.fromkeys(KINDS, codec)
    expected = [f"compression.{kind}=auto is {codec}, because in one process nothing is sent" for kind in KINDS]
    assert decided(tmp_path / "auto") == expected
    assert not decided(tmp_path / "fixed")
